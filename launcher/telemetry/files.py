"""How small files of a run reach the disk: whole, under their final name, or not at all.

Owns the atomic rewrite (a temporary file in the same directory, then one rename) and the strict JSON of
all run files. Never leaves a partial file under a final name, and never imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp"
NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def strict(value: Any) -> Any:
    """The same value with non-finite floats spelt as strings, because JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _spell(value)
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value


def restored(value: Any) -> Any:
    """What `strict` was given: the three spellings become floats again."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return value


def json_line(value: Mapping[str, Any]) -> bytes:
    """One line of strict JSON. Raises TypeError for anything but plain numbers, strings, lists and dicts."""
    return json.dumps(strict(value), allow_nan=False, ensure_ascii=False).encode() + b"\n"


def write_json(path: Path, value: Mapping[str, Any], durable: bool = False) -> None:
    """Replaces `path` by the value as indented strict JSON; see `write_text`."""
    text = json.dumps(strict(value), allow_nan=False, ensure_ascii=False, indent=2)
    write_text(path, text + "\n", durable)


def read_json(path: Path) -> dict[str, Any]:
    """The value that `write_json` was given. Raises OSError or ValueError."""
    try:
        value = restored(json.loads(read_regular(path)))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def read_regular(path: Path) -> bytes:
    """The content of a file. Raises OSError, also for a pipe or a device, whose reading might never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return path.read_bytes()


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Replaces `path` in one rename: a reader sees the old text or the new, never a part. Raises OSError.

    `durable` also waits until the text is on the disk: for what must survive a power cut.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def clear_away(directory: Path) -> None:
    """Delete what writers that were killed have left of their rewrites. Nobody may be writing there."""
    for rest in directory.glob(f".*{TEMPORARY}"):
        with contextlib.suppress(OSError):
            rest.unlink()


def _spell(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"
