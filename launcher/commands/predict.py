"""`predict`: classes with probabilities for photographs, texts or rows, by a run or an exported folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands.arguments import Arguments
from launcher.config.messages import command_name
from launcher.errors import ConfigError, escaped
from launcher.launch.config_broadcast import ConfigBroadcast
from launcher.run_dir.atomic import read_json
from launcher.run_dir.records import CONFIG, MODEL

if TYPE_CHECKING:
    from torch import nn


def predict(arguments: Arguments, broadcast: ConfigBroadcast) -> None:
    """predict RUN FILE... [--best]: prints classes with probabilities for photographs, texts or rows

    RUN is a run, or a folder that `export RUN DIR/` has written. Each FILE is a photograph; for a model of
    sentences a text file with a sentence in each line (two separated by a tab); for others a .csv or .npy
    file of numbers, a sample in each row. Samples are cut, resized and normalised as in the evaluation.

      --best             the checkpoint of the best evaluation instead of the newest
      --no-ema           the trained weights instead of their average

    Example: {program} predict outputs/resnet18/20260101-120000-ab12 ant.jpg bee.jpg
    """
    from safetensors.torch import load_file

    from launcher.checkpoint.export import weights_of
    from launcher.evaluation.prediction import FACTS, Predictor

    if len(arguments.positionals) < 2:
        raise ConfigError(
            f"predict: give a run and files: {command_name()} predict outputs/<recipe>/<run> FILE..."
        )
    directory, *files = map(Path, arguments.positionals)
    is_run = (directory / MODEL / FACTS).is_file()
    folder = directory / MODEL if is_run else directory
    if not (folder / FACTS).is_file():
        raise ConfigError(f"predict {directory}: this is no run, and no folder that `export RUN DIR/` wrote.")
    if is_run:
        weights = weights_of(
            directory, "--best" in arguments.flags, "--no-ema" not in arguments.flags
        ).tensors
    elif {"--best", "--no-ema"} & arguments.flags.keys():
        raise ConfigError(f"{directory} is an export: --best and --no-ema choose among a run's checkpoints.")
    else:
        weights = load_file(folder / "model.safetensors")
    predictor = Predictor(
        folder, read_json(folder / FACTS), weights, partial(model_of_run, directory) if is_run else None
    )
    for file in files:
        for name, text in predictor.predictions(file):
            print(escaped(f"{name}: {text}"), flush=True)


def model_of_run(run_dir: Path) -> nn.Module:
    """The model that the recipe of a run builds, with other weights. The recipe makes its data sets too."""
    import yaml

    from launcher.config.validation import parse
    from launcher.recipe.registry import load_recipe

    config = parse(yaml.safe_load((run_dir / CONFIG).read_text(encoding="utf-8")))
    return load_recipe(config).build_model()
