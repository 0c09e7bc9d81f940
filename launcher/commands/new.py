"""`new`: the skeleton of a recipe of one's own, in the current folder.

Owns the text of the skeleton, which runs as it is. Never overwrites a file. Imports neither torch nor Hydra.
"""

from __future__ import annotations

import keyword
from importlib.util import find_spec
from pathlib import Path

from launcher.commands.arguments import Arguments
from launcher.config.messages import command_name
from launcher.errors import ConfigError
from launcher.launch.config_broadcast import ConfigBroadcast

PYTHON = """\
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from launcher.recipe import Config, Recipe, columns, cross_entropy, recipe

class Points(Dataset):  # any data set with a length, of torch or Hugging Face, or TensorData
    def __init__(self, size: int, seed: int) -> None:
        self.points = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))
    def __len__(self) -> int:
        return len(self.points)
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.points[index], int(self.points[index].norm() > 1.2)

@recipe
def {name}(config: Config, width: int = 64) -> Recipe:  # recipe.width=128 sets it
    return Recipe(
        build_model=lambda: nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2)),
        train=Points(1600, seed=1),
        validation=Points(400, seed=2),
        collate=columns("image", "label"),  # names for the parts of a sample
        loss=cross_entropy,  # (network, batch) -> Loss(sum, count, outputs)
        classes=("inner", "outer"),  # without classes: metrics=[...] or the loss alone
    )
"""
OPTIMIZER = "optim=adamw optim.lr=1e-2"  # with which the skeleton learns in the default ten epochs


def write_recipe(arguments: Arguments, broadcast: ConfigBroadcast) -> None:
    """new NAME: writes a recipe of your own that already trains

    Writes NAME.py, a recipe that trains without changes, into the working directory, and prints the
    command that trains it. NAME consists of letters, digits and '_'. No file is overwritten.

    Example: {program} new mine
    """
    if len(arguments.positionals) != 1:
        raise ConfigError(f"new: give the name of your recipe: {command_name()} new mine")
    (name,) = arguments.positionals
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"new {name}: it becomes the name of a function: letters, digits and '_'.")
    module = find_spec(name)  # a file of this name in the working directory would be imported in its place
    if module is not None and module.origin is not None:
        raise ConfigError(f"new {name}: a module of Python has this name. Choose another.")
    file = Path(f"{name}.py")
    try:
        with open(file, "x", encoding="utf-8") as opened:
            opened.write(PYTHON.replace("{name}", name))
    except FileExistsError as error:
        raise ConfigError(f"new {name}: {file} exists already. Choose another name.") from error
    print(file)
    print(f"train it: {command_name()} recipe={file} {OPTIMIZER}")
