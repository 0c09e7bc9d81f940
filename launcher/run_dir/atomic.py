"""The strict JSON of all files of a run, and the atomic rewrite of small ones.

An atomic rewrite is a temporary file in the same directory, then one rename: there is never a partial file
under a final name. Never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import StorageError

TEMPORARY = ".tmp"
_STRICT = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}  # by what `strict` makes of them


def encodable(text: str) -> str:
    """The text with lone surrogates escaped, as in caf\\udce9, because UTF-8 cannot represent them.

    They stand for bytes that are not UTF-8, in names of files for example.
    """
    return text.encode(errors="backslashreplace").decode()


def all_encodable(value: object, number: Callable[[float], object] = float) -> Any:
    """The value with all texts in it `encodable`, and `number` of each float that is not a key."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {all_encodable(key): all_encodable(item, number) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [all_encodable(item, number) for item in value]
    return value


def strict(value: object) -> object:
    """The value with non-finite floats as strings and texts `encodable`: strict JSON represents neither."""
    return all_encodable(value, lambda each: each if math.isfinite(each) else str(float(each)))


def restored(value: Any) -> Any:
    """The floats of `strict`: its three strings become floats again. Escaped texts stay escaped."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return value


def json_line(value: Mapping[str, object]) -> bytes:
    """One line of strict JSON. Raises TypeError for anything but plain numbers, strings, lists and dicts."""
    try:
        return _STRICT.encode(value).encode() + b"\n"
    except ValueError:  # a number that is not finite or a lone surrogate, which few lines have
        return _STRICT.encode(strict(value)).encode() + b"\n"


def write_json(path: Path, value: Mapping[str, object], durable: bool = False) -> None:
    """Replace `path` by the value as indented strict JSON; see `write_text`."""
    text = json.dumps(strict(value), allow_nan=False, ensure_ascii=False, indent=2)
    write_text(path, text + "\n", durable)


def read_json(path: Path) -> dict[str, Any]:
    """The value that `write_json` wrote. Raises OSError or ValueError."""
    value = restored(json.loads(path.read_bytes()))
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """`write_content` of a text in UTF-8, made `encodable`."""
    write_content(path, encodable(text).encode(), durable)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a new file, which replaces `path` in one rename at the end. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_content(path: Path, content: bytes, durable: bool = False) -> None:
    """Replace `path` in one rename: readers see the old content or the new one. Raises OSError.

    `durable` also waits until the content is on disk, for files that must survive a power failure.
    """
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def failing_as_storage_error(what: str, advice: str) -> Iterator[None]:
    """Raise a StorageError in place of an OSError: `what` has failed, why, and `advice`."""
    try:
        yield
    except OSError as error:
        place = error.filename
        where = f" ({place})" if isinstance(place, str | os.PathLike) and str(place) not in what else ""
        raise StorageError(f"{what}: {error.strerror or error}{where}. {advice}") from error


def clear_away(directory: Path) -> None:
    """Delete the temporary files of killed writers. No other process may be writing."""
    for rest in directory.glob(f".*{TEMPORARY}"):
        with contextlib.suppress(OSError):
            rest.unlink()
