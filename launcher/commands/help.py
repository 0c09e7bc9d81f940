"""The text of `--help` and `recipes`. The page of a command is the docstring of its function.

The first line of such a docstring is the usage, a colon, and what the command does.

Reads only the names and the YAML of conf/, so that it is fast. Imports neither torch nor Hydra.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from launcher.commands.arguments import Arguments
from launcher.commands.compare import compare
from launcher.commands.doctor import doctor
from launcher.commands.export import export_weights
from launcher.commands.new import write_recipe
from launcher.commands.plan import plan
from launcher.commands.predict import predict
from launcher.commands.report import write_reports
from launcher.commands.run import run_sweep_job
from launcher.commands.watch import watch
from launcher.config.groups import choice_file, choice_values, conf_dir, description, group_choices
from launcher.config.messages import command_name, show, tool
from launcher.errors import escaped
from launcher.launch.config_broadcast import ConfigBroadcast

TRAINING = ("recipe=resnet18 [key=value ...]", "trains on all GPUs, or on CPU workers")
HELP = """\
Trains models with fp16 arithmetic and fp16 gradients on every GPU, or on CPU workers.

{usage}
COMMAND --help has the options of a command, and an example.
Several machines: {torchrun} ... -m launcher recipe=resnet18, on each machine (scripts/README.md)

Choices (group=name):
{choices}

Single keys (see conf/config.yaml or --cfg job):
  train.epochs=5 optim.lr=0.05 data.batch_size=256 seed=1 run.dir=outputs/mine

Flags, before or after the keys:
  -m, --multirun             a sweep: optim.lr=0.05,0.1 seed=0,1 runs all combinations
  -c, --cfg job              print the config instead of running
  -cd, --config-dir DIR      a config tree of your own, with the same groups
  --version, -h, --help
"""


def help_text(directories: Sequence[Path], command: str = "train") -> str:
    """The page of a command, which is its docstring; that of training lists all commands and choices."""
    name = command_name()
    if command in COMMANDS:
        words, summary, page = parts_of(COMMANDS[command])
        return f"{name} {words}\n{summary[0].upper()}{summary[1:]}.\n\n{page.format(program=name)}\n"
    choices = group_choices(*directories)
    listed = "\n".join(columns((group, ", ".join(names)) for group, names in choices.items()))
    usages = [TRAINING, *(parts_of(function)[:2] for function in COMMANDS.values())]
    usage = "\n".join(columns((f"{name} {words}", summary) for words, summary in usages))
    return HELP.format(usage=usage, choices=listed, program=name, torchrun=tool("torchrun"))


def parts_of(function: Callable[..., object]) -> tuple[str, str, str]:
    """The words after the name of the program, what they do, and the page."""
    usage, _, page = (inspect.getdoc(function) or "").partition("\n\n")
    words, _, summary = usage.partition(": ")
    return words, summary, page


def print_recipes(arguments: Arguments, broadcast: ConfigBroadcast) -> None:
    """recipes: lists recipes, models and data, with their keys

    Lists all recipes, and the keys of all models and data sets. All keys of a recipe with their values:
    {program} recipe=NAME --cfg job

      --config-dir DIR   also list the recipes of your own config folder

    Example: {program} recipes --config-dir mine
    """
    print(escaped(recipes_text(config_directories(arguments))), end="")


def config_directories(arguments: Arguments) -> list[Path]:
    own = arguments.config_dir
    return [conf_dir(), *([own] if own else [])]


# Besides training, in the order in which they are listed.
COMMANDS: Mapping[str, Callable[[Arguments, ConfigBroadcast], int | None]] = {
    "recipes": print_recipes,
    "compare": compare,
    "plan": plan,
    "report": write_reports,
    "watch": watch,
    "export": export_weights,
    "predict": predict,
    "new": write_recipe,
    "doctor": doctor,
    "job": run_sweep_job,
}


def recipes_text(directories: Sequence[Path]) -> str:
    """Each recipe with what it is and what it chooses, and the keys of the models and data sets."""
    choices = group_choices(*directories)
    lines = ["Recipes (recipe=<name>):"]
    names = choices.get("recipe", [])
    lines += columns((name, description(choice_file(directories, "recipe", name))) for name in names)
    for group in ("model", "data"):
        lines += ["", f"{group.capitalize()} ({group}=<name>) and the keys that it sets:"]
        values = {name: choice_values(directories, group, name) for name in choices.get(group, ())}
        lines += columns((name, ", ".join(own_keys(values[name], group))) for name in values)
    return "\n".join(lines) + "\n"


def columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    """One line per row, the texts below each other."""
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0)
    return [f"  {name:<{width}}  {text}".rstrip() for name, text in listed]


def own_keys(values: Mapping[str, object], group: str) -> Iterator[str]:
    for key, value in values.items():
        if key not in ("name", "defaults"):
            yield f"{group}.{key}={'{...}' if isinstance(value, Mapping) else show(value)}"


def version_text() -> str:
    from importlib.metadata import version

    return f"fp16-launcher {version('fp16-launcher')}"
