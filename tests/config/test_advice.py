"""Every `key=value` that a message of the launcher advises is one that the config accepts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launcher.config.composition import Composer, Request
from launcher.config.groups import choice_values, conf_dir, group_choices
from launcher.config.resolve import compose_one
from launcher.config.schema import constraints, paths_of
from tests.config.test_composition import CHOICES

ROOT = Path(__file__).parents[2]
WORD = re.compile(rf"(?<![\w.{{/])((?:{'|'.join([*CHOICES, 'seed'])}|[a-z_]+(?:\.\w+)+)=[^\s,;:'\"`)]+)")
SECTIONS = {path.partition(".")[0] for path in constraints()}
SAMPLES = {
    "N": "2",
    "K": "1",
    "F": "0.1",
    "NAME": "name",
    "HOST": "'h:1'",
    "A": "fp16",
    "[0.75": "[0.75,0.25]",
}
SAMPLES |= dict.fromkeys(("DIR", "FILE", "FOLDER", "PATH", "/data/imagenet", "photos"), str(ROOT))
# Words of the program that are not advice: a choice that is refused, a file of one's own, a list of words.
OTHERS = ("model=null", "data.cache=none|auto|DIR", "optim.lr=tag(log")
OTHER_VALUES = (
    "recipe=<name>",
    "recipe=NAME",
    "recipe=FILE",
    "recipe=FILE.py",
    "recipe=mine.py",
    "recipe.width=128",
)
NEEDS = {"data.share": ("launch.nproc=2",), "reduce_lr_on_plateau.factor": ("schedule=constant",)}


def words_of_messages() -> Iterator[str]:
    """Each override in a text of the launcher; {} stands for what is filled in."""
    for file in sorted((ROOT / "launcher").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                yield from WORD.findall("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from WORD.findall(node.value)


WORDS = sorted({word.rstrip(".?!") for word in words_of_messages()} - {*OTHERS, *OTHER_VALUES})
WORDS = [word for word in WORDS if word.split(".")[0].split("=")[0] in SECTIONS]


@cache
def composer() -> Composer:
    return Composer(Request(("recipe=resnet18",)))


@cache
def choice_with(key: str) -> str | None:
    """The choice of a group that brings the key; None for one that every config has, "" for none at all."""
    group, _, inner = key.partition(".")
    if key in composer().known(("recipe=resnet18",)) or key in group_choices(conf_dir()):
        return None
    names = group_choices(conf_dir()).get(group, [])
    having = [name for name in names if inner in paths_of(choice_values([conf_dir()], group, name))]
    return f"{group}={having[0]}" if having else ""


@pytest.mark.parametrize("key", sorted({word.partition("=")[0] for word in WORDS}))
def test_a_key_that_a_message_names_is_one_that_there_is(key: str) -> None:
    assert choice_with(key) != ""


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("word", [word for word in WORDS if "{" not in word])
def test_what_a_message_advises_is_accepted(word: str) -> None:
    key, _, value = word.partition("=")
    needed = [each for each in (choice_with(key), *NEEDS.get(key, ())) if each]
    compose_one(composer(), ("recipe=resnet18", *needed, f"{key}={SAMPLES.get(value, value)}"))
