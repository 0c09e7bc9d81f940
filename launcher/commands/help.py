"""The text of `--help` and `recipes`.

Reads only the names and the YAML of conf/, so that it is fast. Imports no torch, and Hydra only to compose
the values of one recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.config.groups import choice_file, choice_values, description, group_choices
from launcher.config.messages import nearest, program, show, suggestion
from launcher.errors import ConfigError

SECTIONS = ("model", "data", "optim", "schedule")  # of which the page of a recipe has all keys
HELP = """\
Trains models with fp16 arithmetic and fp16 gradients on every GPU, or on CPU workers.

{usage}
COMMAND --help says more about one of them. On several machines: torchrun ... -m launcher recipe=resnet18

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
  -sc, --shell-completion    eval "$({program} -sc install=bash)"; uninstall=bash
  --hydra-help, --version, -h, --help
"""
USAGE = {  # the words after the name of the program, and what they do
    "train": ("recipe=resnet18 [key=value ...]", "trains on all GPUs, or on CPU workers"),
    "recipes": ("recipes [NAME]", "what can be trained; one recipe with all that it sets"),
    "compare": ("compare recipe=resnet18 precision=fp32,fp16", "side by side: time, memory, loss, and why"),
    "report": ("report RUN ... [--out FILE]", "a page of one run or sweep, or of several compared"),
    "watch": ("watch RUN [--every SECONDS]", "follows a run or a sweep until it ends"),
    "export": ("export RUN FILE [--dtype fp16] [--best]", "weights as a safetensors file"),
    "new": ("new NAME", "the skeleton of a recipe of your own"),
}
PAGES = {
    "recipes": """\
Without NAME: all recipes, models and data sets, each with what it is and its options.
With NAME: that recipe and every value that it sets, written as it can be overridden.

  --config-dir DIR   also the recipes of a config tree of your own

Example: {program} recipes resnet18
""",
    "compare": """\
Trains the same recipe in several precisions, seed by seed in turn, and writes side_by_side.md: time of a
step with its parts, memory, bytes sent, skipped steps, loss and metric, and in words what the difference is.
The others are compared with the first precision. All other words are overrides, as in training; they take
one value each. A run that diverges is a finding, and the exit code stays 0.

  precision=A,B      two precisions or more
  seed=0,1,2         several seeds say how much of a difference is chance

Example: {program} compare recipe=resnet18 precision=fp32,fp16 seed=0,1,2
""",
    "report": """\
Writes report.html from the files of a run: into the run, into a sweep, or for several runs into this folder.
RUN is a directory, such as outputs/resnet18/20260101-120000-ab12; that of a sweep stands for all its jobs.

  --out FILE         write the page there

Example: {program} report outputs/resnet18/* --out runs.html
""",
    "watch": """\
Shows how a run or a sweep stands: on a terminal the whole screen, elsewhere a line every 10 seconds. It only
reads files, so that a run of any machine on the same disk can be watched; Ctrl-C ends the watching, and the
run continues. Its exit code is that of the run.

  --every SECONDS    the time between two looks, from 0.05 to 86400

Example: {program} watch outputs/resnet18/20260101-120000-ab12
""",
    "export": """\
Writes the weights of the newest checkpoint of RUN into FILE, in the safetensors format, under the names of
the model's state_dict. A run that averages its weights exports the average.

Where FILE is a folder, or ends with a slash, it gets model.safetensors, prediction.json (the classes, the
normalisation of images) and, for a model of transformers, config.json and the tokenizer: from_pretrained
reads it.

  --dtype fp32|fp16  the type of floating-point tensors; fp32 without it
  --best             the checkpoint of the best evaluation instead of the newest
  --no-ema           the weights themselves instead of their average

Example: {program} export outputs/resnet18/20260101-120000-ab12 weights.safetensors --dtype fp16 --best
""",
    "new": """\
Writes NAME.py, a recipe that trains as it is, and NAME/recipe/NAME.yaml, its settings, into this folder, and
prints the command that trains it. NAME consists of letters, digits and '_'. No file is overwritten.

Example: {program} new mine
""",
}


def help_text(directories: Sequence[Path], command: str = "train") -> str:
    """The page of a command; that of training lists all commands and choices."""
    name = program()
    if command in PAGES:
        words, summary = USAGE[command]
        return f"{name} {words}\n{summary[0].upper()}{summary[1:]}.\n\n{PAGES[command].format(program=name)}"
    choices = group_choices(*directories)
    width = max(map(len, choices), default=0)
    listed = [f"  {group:<{width}}  {', '.join(names)}" for group, names in choices.items()]
    usage = columns((f"{name} {words}", summary) for words, summary in USAGE.values())
    return HELP.format(usage="\n".join(usage), choices="\n".join(listed), program=name)


def recipe_text(directories: Sequence[Path], name: str, config_dir: Path | None) -> str:
    """One recipe: what it is, its model, data and optimizer, and what else it sets. Raises ConfigError."""
    names = group_choices(*directories).get("recipe", [])
    if name not in names:
        raise ConfigError(
            f"recipes {name}: there is no such recipe.{suggestion(nearest(name, names))} "
            f"All: {', '.join(names)}."
        )
    from launcher.config.composition import Composer, Request, hydra_initialised
    from launcher.config.trees import leaves

    request = Request((), config_dir)
    with hydra_initialised(request):
        composer = Composer(request)
        default, own = (dict(leaves(composer.tree(words))) for words in ((), (f"recipe={name}",)))
    shown = {
        key: value
        for key, value in own.items()
        if key.partition(".")[0] in SECTIONS or key not in default or default[key] != value
    }
    sets = [f"  {key}={show(value)}" for key, value in shown.items() if not key.startswith("recipe.")]
    head = f"recipe={name}: {description(choice_file(directories, 'recipe', name))}"
    after = f"Its settings; the command line overrides each. All keys: {program()} recipe={name} --cfg job"
    return "\n".join([head, "", f"  {program()} recipe={name}", "", after, "", *sets]) + "\n"


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
