"""The manifest of a checkpoint, and the verification of its files.

Owns manifest.json: size and SHA-256 of each file, and a digest of the manifest, so that a flipped bit in it
is detected too. A link in place of a checkpoint is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from launcher.checkpoint.tensors import FileDigest
from launcher.errors import ConfigError

FORMAT = 6
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
STEP = "step-"


def step_name(step: int) -> str:
    """The directory name of a step's checkpoint: at least eight digits."""
    return f"{STEP}{step:08d}"


def verify(path: Path) -> list[str]:
    """All damage of a checkpoint, as messages; empty where every byte is as it was written.

    Raises ConfigError for another format, and PermissionError for files that this user may not
    read: neither is damage.
    """
    if path.is_symlink() or not path.is_dir():
        return [f"{path.name} is {'a symbolic link' if path.is_symlink() else 'not a directory'}"]
    try:
        files = read_manifest(path)
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        return [f"{MANIFEST} cannot be read: {error}"]
    with ThreadPoolExecutor(len(files), thread_name_prefix="verify") as threads:  # hashing takes no lock
        found = threads.map(lambda name: _problems_of(path / name, files[name]), files)
        return [problem for problems in found for problem in problems]


def read_manifest(path: Path) -> dict[str, FileDigest]:
    """Expected size and digest of each file. Raises OSError, ValueError, ConfigError for another format."""
    try:
        raw = (path / MANIFEST).read_bytes()
        content = json.loads(raw).get("content") if raw else None
        if not isinstance(content, dict) or raw != manifest_text(content):
            raise ValueError("it is incomplete or has been changed")
        if content["format"] != FORMAT:
            raise ConfigError(
                f"{path} has format {content['format']}; this version reads format {FORMAT}. "
                "Resume with the version that wrote it, or start a new run with another run.dir."
            )
        if path.name.startswith(STEP) and path.name != step_name(content["step"]):
            raise ValueError(f"it belongs to step {content['step']}")
        files = {name: FileDigest(**entry) for name, entry in content["files"].items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it is not what a run writes") from error
    if set(files) != {WEIGHTS, OPTIMIZER, STATE}:
        raise ValueError(f"it lists {', '.join(sorted(files))}")
    return files


def manifest_text(content: Mapping[str, object]) -> bytes:
    """The file's bytes. Later formats must keep this frame, or older versions report them as damaged."""
    text = json.dumps(content, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"content": {text}, "sha256": "{digest}"}}\n'.encode()


def manifest_of(step: int, files: Mapping[str, FileDigest]) -> bytes:
    entries = {name: asdict(written) for name, written in files.items()}
    return manifest_text({"format": FORMAT, "step": step, "files": entries})


def _problems_of(file: Path, entry: FileDigest) -> list[str]:
    try:
        with file.open("rb") as opened:
            size_bytes = os.fstat(opened.fileno()).st_size
            if size_bytes != entry.size_bytes:
                return [f"{file.name} has {size_bytes} bytes instead of {entry.size_bytes}"]
            if hashlib.file_digest(opened, "sha256").hexdigest() != entry.sha256:
                return [f"{file.name} has been changed: its SHA-256 differs from the manifest's"]
    except FileNotFoundError:
        return [f"{file.name} is missing"]
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        return [f"{file.name} cannot be read: {error}"]
    return []
