"""Opens the files of a run, and rewrites small ones atomically.

Owns the refusal of everything but plain files, the atomic rewrite (a temporary file in the same directory,
then one rename) and the strict JSON of all run files. Never writes through a link, never leaves a partial
file under a final name, and never imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import StorageError

TEMPORARY = ".tmp"
_STRICT = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}  # by what `strict` makes of them


class NotPlainError(OSError):
    """A link, pipe, device or folder is in the place of a file or folder of the run."""


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
    try:
        value = restored(json.loads(read_regular(path)))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def read_regular(path: Path) -> bytes:
    """The content of a file of a run. Raises OSError, also for a link, pipe or device in its place."""
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        return file.read()


def open_plain(path: Path, flags: int) -> int:
    """A descriptor of a plain file of a run. Raises OSError, also for a link, pipe or device in its place."""
    require_plain(path)  # before opening: opening a device or a pipe may have side effects
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        require_plain(path)
        raise OSError(errno.EINVAL, "has just been replaced", str(path))
    return descriptor


def require_plain(path: Path) -> None:
    """Raise OSError, naming the kind of file, unless `path` is a plain file or does not exist."""
    _require(path, stat.S_ISREG, "a plain file")


def require_folder(path: Path) -> None:
    """Raise OSError, naming the kind of file, unless `path` is a directory or does not exist."""
    _require(path, stat.S_ISDIR, "a directory of its own")


def make_folder(path: Path) -> None:
    """Make a directory of a run unless it exists. Raises OSError, also for a link to one."""
    require_folder(path)
    path.mkdir(exist_ok=True)


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """`write_content` of a text in UTF-8, made `encodable`."""
    write_content(path, encodable(text).encode(), durable)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a new file, which replaces `path` in one rename at the end. Raises OSError."""
    require_plain(path)
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


def _require(path: Path, is_kind: Callable[[int], bool], wanted: str) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not is_kind(mode):
        raise NotPlainError(
            errno.EINVAL, f"{path.name} is {_kind(path, mode)}; it must be {wanted}", str(path)
        )


def _kind(path: Path, mode: int) -> str:
    if stat.S_ISLNK(mode):
        return f"a symbolic link to {os.readlink(path)}"
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")
