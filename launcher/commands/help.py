"""The text of `--help` and `recipes`.

Reads only the names and the YAML of conf/, so that it is fast; imports neither torch nor Hydra.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.config.groups import choice_file, choice_values, description, group_choices
from launcher.config.messages import show

HELP = """\
Trains models with fp16 arithmetic and fp16 gradients on every GPU, or on CPU workers.

  scripts/run recipe=resnet18 [key=value ...]                      all GPUs, or 2 CPU workers
  torchrun --standalone --nproc-per-node=2 -m launcher recipe=resnet18 [key=value ...]
  python -m launcher recipe=resnet18 [key=value ...]               one process
  python -m launcher recipes                                       what can be trained
  python -m launcher compare recipe=resnet18 precision=fp32,fp16   side by side: time, memory, loss, and why
  python -m launcher report RUN_DIR ... [--out FILE]               report.html: one run, or several compared
  python -m launcher watch RUN_DIR [--every SECONDS]               follows a run or sweep until it ends
  python -m launcher export RUN_DIR FILE [--dtype fp16] [--best] [--no-ema]   weights as safetensors
  python -m launcher new NAME                                      the skeleton of a recipe of your own

Choices (group=name):
{choices}

Single keys (see conf/config.yaml or --cfg job):
  train.epochs=5 optim.lr=0.05 data.batch_size=256 seed=1 run.dir=outputs/mine

Flags, anywhere among them:
  -m, --multirun             a sweep: optim.lr=0.05,0.1 seed=0,1 runs all combinations
  -c, --cfg job              print the config instead of running; -p optim prints a part of it
  -cd, --config-dir DIR      a config tree of your own, with the same groups
  -cn, --config-name NAME    another primary config than config.yaml
  -i, --info [TOPIC]         how Hydra found the config
  -sc, --shell-completion    eval "$(python -m launcher -sc install=bash)"; uninstall=bash
  --hydra-help, --version, -h, --help
"""


def help_text(directories: Sequence[Path]) -> str:
    choices = group_choices(*directories)
    width = max(map(len, choices), default=0)
    listed = [f"  {group:<{width}}  {', '.join(names)}" for group, names in choices.items()]
    return HELP.format(choices="\n".join(listed))


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


def own_keys(values: Mapping[str, Any], group: str) -> Iterator[str]:
    for key, value in values.items():
        if key not in ("name", "defaults"):
            yield f"{group}.{key}={'{...}' if isinstance(value, Mapping) else show(value)}"


def version_text() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"fp16-launcher {version('fp16-launcher')}"
    except PackageNotFoundError:
        return "fp16-launcher, not installed (run from its sources)"
