"""Formatting of messages: values as written in overrides, the nearest valid names, commands to type.

Owns these texts, so that all errors have the same form. Reads nothing but how this process was started.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from launcher.config.other_keys import removed_key

COMMAND = "LAUNCHER_COMMAND"  # scripts/run sets it: its path as it was typed
# Text that Hydra reads as text unquoted. YAML also reads 1e-3 as text, because YAML 1.1 wants a dot in it;
# whoever lists it among values means the number.
UNQUOTED = re.compile(
    r"(?!(null|true|false|nan|inf)$)[a-z_][a-z0-9_-]*|[+-]?[0-9]+(\.[0-9]*)?e[+-]?[0-9]+", re.IGNORECASE
)


def command_name() -> str:
    """How this program was called, for the commands in messages: `scripts/run`, `python -m launcher`."""
    if typed := os.environ.get(COMMAND):
        return shlex.quote(typed)
    return "launcher" if os.path.basename(sys.argv[0]) == "launcher" else "python -m launcher"


def tool(name: str) -> str:
    """The command that runs another program of the environment: `scripts/run wandb`, or `wandb`."""
    return f"{command_name()} {name}" if os.environ.get(COMMAND) else name


def install_line(*packages: str) -> str:
    """The command that installs packages into the environment of this process, active or not."""
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def unknown_key(written: str, path: str, valid: Iterable[str]) -> str:
    if instead := removed_key(path):
        return f"{shortened(written)}: this key is gone. {instead}"
    return f"{shortened(written)}: there is no such key.{suggestion(nearest(path, valid))}"


def unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    """The message for a name of a registry that has only these."""
    return f"{what} is not known.{suggestion(nearest(name, known))} Known: {', '.join(known) or 'none'}."


def suggestion(candidates: Iterable[str]) -> str:
    listed = ", ".join(candidates)
    return f" Nearest: {listed}." if listed else ""


def nearest(word: str, valid: Iterable[str], count: int = 3) -> list[str]:
    """The valid names most like `word`, best first; of dotted names the last part weighs most."""
    rated = sorted((-likeness(word.lower(), candidate.lower()), candidate) for candidate in set(valid))
    best = -rated[0][0] if rated else 0.0
    return [candidate for rating, candidate in rated[:count] if -rating >= max(0.55, best - 0.15)]


def likeness(word: str, candidate: str) -> float:
    last_parts = (word.rpartition(".")[2], candidate.rpartition(".")[2])
    whole_path = difflib.SequenceMatcher(None, word, candidate).ratio()
    return 0.7 * difflib.SequenceMatcher(None, *last_parts).ratio() + 0.3 * whole_path


def shortened(text: str, longest: int = 200) -> str:
    """The text; of a long one the beginning, and its length."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}... ({len(text):,} characters)"


def show(value: object) -> str:
    """A value as written on the command line; a very long one is shortened."""
    return shortened(to_override(value))


def to_override(value: object, text_of: Callable[[str], str] = str) -> str:
    """A value as written on the command line, in full."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(to_override(item, text_of) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{to_override(item, text_of)}" for key, item in value.items()) + "}"
    return str(value)


def directory_override(key: str, directory: Path) -> str:
    """The override that gives a directory, to be typed in a shell: Hydra reads `=` or a comma as its own."""
    if re.fullmatch(r"[\w./:%+@-]+", str(directory)):
        return f"{key}={directory}"
    return shlex.quote(f"{key}={quoted(str(directory))}")


def literal(value: object) -> str:
    """A value in the syntax of Hydra's overrides, which reads it back with its type."""
    return to_override(value, lambda text: text if UNQUOTED.fullmatch(text) else quoted(text))


def quoted(value: str) -> str:
    """The text as a quoted value of Hydra's syntax, in which a backslash escapes only before a quote."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"


def summary(problems: Sequence[str]) -> str:
    """The message of a ConfigError with these problems."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join((f"{len(problems)} problems:", *problems))
