"""The command line, sorted into a command, flags and overrides.

Owns which flags exist and how many values each takes, so that flags may be mixed with overrides (Hydra itself
does not allow that). Reads nothing but its arguments, and the names of recipes for an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.config.groups import conf_dir, group_choices
from launcher.config.messages import nearest, shortened, suggestion
from launcher.errors import ConfigError

COMMANDS = ("recipes", "report", "watch", "export", "new", "compare")
INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
SHORT = {
    "-h": "--help",
    "-c": "--cfg",
    "-p": "--package",
    "-m": "--multirun",
    "-r": "--run",
    "-i": "--info",
    "-cn": "--config-name",
    "-cd": "--config-dir",
    "-cp": "--config-path",
    "-sc": "--shell-completion",
}
SWITCHES = (
    "--help",
    "--hydra-help",
    "--version",
    "--resolve",
    "--run",
    "--multirun",
    "--shell-completion",
    "--best",
    "--no-ema",
)
WITH_VALUE: Mapping[str, tuple[str, ...]] = {  # the values that a flag takes; none listed: any
    "--cfg": ("job", "hydra", "all"),
    "--package": (),
    "--config-name": (),
    "--config-dir": (),
    "--dtype": ("fp32", "fp16"),
    "--out": (),
    "--every": (),
}
OF_ONE_COMMAND = {
    "--best": "export",
    "--dtype": "export",
    "--no-ema": "export",
    "--out": "report",
    "--every": "watch",
}
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

    def hydra_flags(self) -> list[str]:
        """The flags to pass to Hydra, in its form."""
        ours = {"--config-dir", "--config-name"}
        return [
            flag if value is None else f"{flag}={value}"
            for flag, value in self.flags.items()
            if flag not in ours
        ]


def parse(argv: Sequence[str]) -> Arguments:
    """Sort argv; raises ConfigError for flags and commands that do not exist."""
    words: list[str] = []
    flags: dict[str, str | None] = {}
    rest = list(argv)
    if broken := [word for word in rest if "\0" in word]:
        raise ConfigError(
            f"{shortened(broken[0])!r}: holds a NUL character, which no path or value may have."
        )
    while rest:
        word = rest.pop(0)
        if word.startswith("-") and word != "-":
            flag, value = read_flag(word, rest)
            flags[flag] = value
        else:
            words.append(
                word.removeprefix("++")
            )  # of a key that exists it means the same; others are refused
    has_command = bool(words) and is_command(words[0])
    command = known_command(words[0]) if has_command else "train"
    for flag, owner in OF_ONE_COMMAND.items():
        if flag in flags and command != owner:
            raise ConfigError(f"{flag}: belongs to the command {owner} only.")
    return Arguments(command, tuple(words[has_command:]), flags)


def read_flag(word: str, rest: list[str]) -> tuple[str, str | None]:
    """The flag's long name and value; removes the value from `rest` if it is a separate word."""
    written, has_value, value = word.partition("=")
    flag = SHORT.get(written, written)
    if flag in REFUSED:
        raise ConfigError(f"{word}: {REFUSED[flag]}")
    if flag in SWITCHES and not has_value:
        return flag, None
    if flag == "--info":
        if not has_value:
            is_topic = rest and is_command(rest[0]) and not rest[0].startswith("-")
            value = rest.pop(0) if is_topic else "all"
        return flag, allowed(flag, value, INFO_TOPICS)
    if flag in WITH_VALUE:
        if not has_value and not rest:
            raise ConfigError(f"{word}: a value is missing after it.")
        return flag, allowed(flag, value if has_value else rest.pop(0), WITH_VALUE[flag])
    raise ConfigError(f"{word}: there is no such flag.{suggestion(nearest(flag, ALL_FLAGS))} See --help.")


ALL_FLAGS = (*SWITCHES, *WITH_VALUE, "--info")


def allowed(flag: str, value: str, choices: Sequence[str]) -> str:
    if choices and value not in choices:
        raise ConfigError(f"{flag} {value}: must be one of {', '.join(choices)}.")
    return value


def is_command(word: str) -> bool:
    """Whether a word names a command; one with a dot, such as optim.lr, is a key without its value."""
    return "=" not in word and "." not in word and not word.startswith(("+", "~"))


def known_command(word: str) -> str:
    if word in COMMANDS:
        return word
    is_recipe = word in group_choices(conf_dir()).get("recipe", ())
    train = f"recipe={word}." if is_recipe else "recipe=<name>; the command recipes lists them."
    near = "" if is_recipe else suggestion(nearest(word, COMMANDS))
    raise ConfigError(
        f"{word}: there is no such command.{near} Commands: {', '.join(COMMANDS)}. To train: {train}"
    )
