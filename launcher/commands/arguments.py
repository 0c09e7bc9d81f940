"""The command line, sorted into a command, flags and overrides.

Owns which flags exist and how many values each takes, so that flags may be mixed with overrides (Hydra itself
does not allow that). Reads nothing but its arguments, and the names of recipes for an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.groups import conf_dir, group_choices
from launcher.config.messages import nearest, shortened, suggestion
from launcher.errors import ConfigError

COMMANDS = ("recipes", "report", "watch", "export", "predict", "new", "compare", "plan", "job", "doctor")
ANY = ()  # any value
INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


@dataclass(frozen=True)
class Flag:
    short: str = ""
    values: tuple[str, ...] | None = None  # that it takes; None: it is a switch
    commands: tuple[str, ...] = ()  # that have it; none: all


FLAGS: Mapping[str, Flag] = {
    "--help": Flag("-h"),
    "--hydra-help": Flag(),
    "--version": Flag(),
    "--resolve": Flag(),
    "--run": Flag("-r"),
    "--multirun": Flag("-m"),
    "--cfg": Flag("-c", ("job", "hydra", "all")),
    "--info": Flag("-i", INFO_TOPICS),
    "--package": Flag("-p", ANY),
    "--config-name": Flag("-cn", ANY),
    "--config-dir": Flag("-cd", ANY),
    "--best": Flag(commands=("export", "predict")),
    "--no-ema": Flag(commands=("export", "predict")),
    "--dtype": Flag(values=("fp32", "fp16"), commands=("export",)),
    "--out": Flag(values=ANY, commands=("report",)),
    "--every": Flag(values=ANY, commands=("watch",)),
    "--json": Flag(commands=("plan", "doctor")),
    "--rates": Flag(values=ANY, commands=("plan",)),
}
SHORT = {flag.short: name for name, flag in FLAGS.items() if flag.short} | {"-cp": "--config-path"}
REFUSED = {
    "--config-path": "the tree of the program is fixed. Add your own with --config-dir DIR.",
    "--experimental-rerun": "it would execute a pickle. Give the overrides of the run again (its "
    "overrides.txt), with run.dir=DIR of the run to resume it.",
}


@dataclass(frozen=True)
class Arguments:
    command: str  # "train" if no other is given
    words: tuple[str, ...]  # overrides, or what the command works on
    flags: Mapping[str, str | None]  # by long name

    @property
    def config_dir(self) -> Path | None:
        """The config tree of the user's own."""
        directory = self.flags.get("--config-dir")
        return Path(directory) if directory else None

    def hydra_flags(self) -> list[str]:
        """The flags to pass to Hydra, in its form."""
        theirs = [(flag, value) for flag, value in self.flags.items() if not flag.startswith("--config-")]
        return [flag if value is None else f"{flag}={value}" for flag, value in theirs]

    def numbers(self, flag: str, usual: str, holds: Callable[[list[float]], bool], rule: str) -> list[float]:
        """The numbers of a flag, separated by commas. Raises ConfigError unless they follow the rule."""
        text = self.flags.get(flag)
        text = usual if text is None else text
        try:
            found = [float(each) for each in text.split(",")] if text else []
        except ValueError:
            found = [math.nan]
        if not holds(found):
            raise ConfigError(f"{flag} {text}: must be {rule}.")
        return found


def parse(argv: Sequence[str]) -> Arguments:
    """Sort argv; raises ConfigError for flags and commands that do not exist."""
    words: list[str] = []
    flags: dict[str, str | None] = {}
    rest = list(argv)
    for word in rest:
        if "\0" in word:
            raise ConfigError(f"{shortened(word)!r}: holds a NUL character, which no path or value may have.")
    while rest:
        word = rest.pop(0)
        if word.startswith("-") and word != "-":
            flag, value = read_flag(word, rest)
            flags[flag] = value
        else:
            # `++` means the same for a key that exists; others are refused.
            words.append(word.removeprefix("++"))
    has_command = bool(words) and is_command(words[0])
    command = known_command(words[0]) if has_command else "train"
    for name in flags:
        if (owners := FLAGS[name].commands) and command not in owners:
            raise ConfigError(f"{name}: belongs to the command {' and '.join(owners)} only.")
    if "--package" in flags and "--cfg" not in flags:
        raise ConfigError("--package: chooses the part of the config that --cfg job shows. Add --cfg job.")
    return Arguments(command, tuple(words[has_command:]), flags)


def read_flag(word: str, rest: list[str]) -> tuple[str, str | None]:
    """The flag's long name and value; removes the value from `rest` if it is a separate word."""
    written, has_value, value = word.partition("=")
    name = SHORT.get(written, written)
    if name in REFUSED:
        raise ConfigError(f"{word}: {REFUSED[name]}")
    if name not in FLAGS or (has_value and FLAGS[name].values is None):
        raise ConfigError(f"{word}: there is no such flag.{suggestion(nearest(name, FLAGS))} See --help.")
    values = FLAGS[name].values
    if values is None:
        return name, None
    if name == "--info" and not has_value and not (rest and is_command(rest[0])):
        return name, "all"  # the only value that may be left out
    if not has_value and not rest:
        raise ConfigError(f"{word}: a value is missing after it.")
    value = value if has_value else rest.pop(0)
    if values and value not in values:
        raise ConfigError(f"{name} {value}: must be one of {', '.join(values)}.")
    return name, value


def is_command(word: str) -> bool:
    """Whether a word names a command; one with a dot, such as optim.lr, is a key without its value."""
    return "=" not in word and "." not in word and not word.startswith(("+", "~", "-"))


def known_command(word: str) -> str:
    if word in COMMANDS:
        return word
    is_recipe = word in group_choices(conf_dir()).get("recipe", ())
    train = f"recipe={word}." if is_recipe else "recipe=<name>; the command recipes lists them."
    near = "" if is_recipe else suggestion(nearest(word, COMMANDS))
    names = ", ".join(COMMANDS)
    raise ConfigError(f"{word}: there is no such command.{near} Commands: {names}. To train: {train}")
