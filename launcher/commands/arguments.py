"""The command line, sorted into a command, flags and overrides.

Owns which flags exist, so that flags may be mixed with overrides (Hydra itself does not allow that). Reads
nothing but its arguments, and the names of recipes for an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from launcher.config.groups import conf_dir, group_choices
from launcher.config.messages import nearest, suggestion
from launcher.errors import ConfigError

COMMANDS = ("recipes", "report", "watch", "export", "predict", "new", "compare", "plan", "job", "doctor")
OWNERS: Mapping[str, Sequence[str]] = {  # of the flags that only these commands have
    "--best": ("export", "predict"),
    "--no-ema": ("export", "predict"),
    "--dtype": ("export",),
    "--out": ("report",),
    "--every": ("watch",),
    "--json": ("plan", "doctor"),
    "--rates": ("plan",),
}


@dataclass(frozen=True)
class Arguments:
    command: str  # "train" if no other is given
    positionals: tuple[str, ...]  # overrides, or what the command works on
    flags: Mapping[str, Any]  # by long name; None: a switch

    @property
    def config_dir(self) -> Path | None:
        """The config tree of the user's own."""
        directory = self.flags.get("--config-dir")
        return Path(directory) if directory else None


class FlagParser(argparse.ArgumentParser):
    """The flags of all commands. Raises ConfigError for others."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        for names in (
            ("-h", "--help"),
            ("-m", "--multirun"),
            ("--version",),
            ("--best",),
            ("--no-ema",),
            ("--json",),
        ):
            self.add_argument(*names, action="store_const", const=None)
        self.add_argument("-cd", "--config-dir")
        self.add_argument("-c", "--cfg", choices=("job",))
        self.add_argument("--dtype", choices=("fp32", "fp16"))
        self.add_argument("--out")
        self.add_argument("--every", type=float)
        self.add_argument("--rates", type=numbers)
        self.add_argument("positionals", nargs="*", default=[])

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See --help.")


def numbers(text: str) -> list[float]:
    """Numbers that are separated by commas."""
    return [float(each) for each in text.split(",")]


def parse(argv: Sequence[str]) -> Arguments:
    """Sort argv; raises ConfigError for flags and commands that do not exist."""
    parser = FlagParser()
    found, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        near = suggestion(nearest(unknown[0], [*parser._option_string_actions]))
        raise ConfigError(f"{unknown[0]}: there is no such flag.{near} See --help.")
    # Hydra adds keys with `+`; here each key exists, or is refused.
    words = tuple(word.lstrip("+") for word in found.positionals)
    has_command = bool(words) and is_command(words[0])
    command = known_command(words[0]) if has_command else "train"
    flags = {
        f"--{key.replace('_', '-')}": value for key, value in vars(found).items() if key != "positionals"
    }
    for name in flags.keys() & OWNERS.keys():
        if command not in OWNERS[name]:
            raise ConfigError(f"{name}: belongs to the command {' and '.join(OWNERS[name])} only.")
    return Arguments(command, words[has_command:], flags)


def is_command(word: str) -> bool:
    """Whether a word names a command; one with a dot, such as optim.lr, is a key without its value."""
    return "=" not in word and "." not in word and not word.startswith(("~", "-"))


def known_command(word: str) -> str:
    if word in COMMANDS:
        return word
    is_recipe = word in group_choices(conf_dir()).get("recipe", ())
    train = f"recipe={word}." if is_recipe else "recipe=<name>; the command recipes lists them."
    near = "" if is_recipe else suggestion(nearest(word, COMMANDS))
    names = ", ".join(COMMANDS)
    raise ConfigError(f"{word}: there is no such command.{near} Commands: {names}. To train: {train}")
