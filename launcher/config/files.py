"""Checks of a YAML file before its values are read: it must be a regular, small file of UTF-8 text.

Owns the limits of a config file and their error messages, so that a device or a data dump is refused
instead of composed. Builds no value.
"""

from __future__ import annotations

from pathlib import Path

from launcher.errors import ConfigError

MAX_BYTES = 64_000  # the largest of conf/ has 4,000; PyYAML reads about 200 kB per second
RULE = f"A config file is UTF-8 text of at most {MAX_BYTES:,} bytes."


def checked_text(path: Path) -> str:
    """The text of a config file that is safe to parse. Raises ConfigError, which names the file."""
    try:
        if not path.is_file():  # before opening it: a pipe without a writer would block forever
            raise ConfigError(f"{path}: is not a regular file. {RULE}")
        size_bytes = path.stat().st_size
        if size_bytes > MAX_BYTES:
            raise ConfigError(f"{path}: has {size_bytes:,} bytes. {RULE} Data belongs in files of its own.")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start}). {RULE}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{path}: cannot be read: {error}.") from error
