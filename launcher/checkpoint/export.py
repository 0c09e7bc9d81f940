"""Exports the weights of a run to one safetensors file with the keys of the model's state_dict.

Owns the conversion from a checkpoint. Needs neither the model nor its recipe. Changes nothing in the run,
which may still be training.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from launcher.checkpoint.catalog import best_intact, newest_intact
from launcher.checkpoint.run_state import MonitoredMetric
from launcher.checkpoint.storage import load
from launcher.checkpoint.tensors import write_tensors
from launcher.errors import ConfigError, StorageError
from launcher.run_dir.atomic import failing_as_storage_error, replacing
from launcher.run_dir.records import CHECKPOINTS, MODEL

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}

_writing = partial(failing_as_storage_error, advice="Choose another place.")


@dataclass(frozen=True)
class RunWeights:
    """The weights of a checkpoint under the keys of the model's state_dict, and what is known of it."""

    tensors: dict[str, Tensor]
    checkpoint: Path
    averaged: bool  # whether they are the moving average of the weights
    step: int
    metric: MonitoredMetric | None


def weights_of(run_dir: Path, best: bool = False, averaged: bool = True) -> RunWeights:
    """Load the weights of the run's newest (or `best`) intact checkpoint, `averaged` where it has an average.

    Raises StorageError where no checkpoint is intact.
    """
    checkpoint = _choose(run_dir / CHECKPOINTS, best)
    snapshot = load(checkpoint)
    tensors = {**snapshot.engine.weights, **snapshot.engine.buffers}
    average = snapshot.average if averaged else None
    if average is not None:
        tensors |= {**average.weights, **average.buffers}
    named = {key: tensors[name] for key, name in snapshot.names.items()}
    return RunWeights(named, checkpoint, average is not None, snapshot.progress.step, snapshot.metric)


def export(
    run_dir: Path, file: Path, dtype: str = "fp32", best: bool = False, averaged: bool = True
) -> RunWeights:
    """Write the weights of the run's newest (or `best`) intact checkpoint to `file`, replacing it.

    `averaged`: of a run with a moving average of its weights take that, with which it was evaluated.

    Floating-point tensors become `dtype`, one of DTYPES, others stay as they are.
    `model.load_state_dict(load_file(file))` loads the result. Raises ConfigError for invalid arguments,
    StorageError where no checkpoint is intact or `file` cannot be written.
    """
    _refuse_paths(run_dir, file)
    found = weights_of(run_dir, best, averaged)
    metadata = {"format": "pt", "checkpoint": found.checkpoint.name, "dtype": dtype}
    if found.averaged:
        metadata["weights"] = "ema"
    exported = {key: _narrowed(key, tensor, DTYPES[dtype]) for key, tensor in found.tensors.items()}
    with _writing(f"the weights cannot be written to {file}"), replacing(file) as temporary:
        write_tensors(temporary, exported, metadata)
    return found


def with_model_folder(run_dir: Path, folder: Path) -> None:
    """Copy what the run has for predicting with its weights into `folder`, which is made.

    Raises as `export`.
    """
    weights = folder / "model.safetensors"
    _refuse_paths(run_dir, weights)
    files = [file for file in (run_dir / MODEL).glob("*.*") if file.is_file() and not file.is_symlink()]
    for file in files:
        if not weights.exists() and (folder / file.name).exists():
            raise ConfigError(f"{folder / file.name} is there, and not from an export. Give another folder.")
    with _writing(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(file, folder / file.name)


def _refuse_paths(run_dir: Path, file: Path) -> None:
    """Raise ConfigError for what is no run, and for a file that no export has written."""
    if not run_dir.is_dir():
        raise ConfigError(f"export {run_dir}: there is no such directory. Give the directory of a run.")
    if not file.exists():
        return
    with suppress(SafetensorError, OSError), safe_open(file, "pt") as opened:
        if "checkpoint" in (opened.metadata() or {}):
            return
    raise ConfigError(f"{file} is there, and not from an export. Give another name, or remove it.")


def _choose(directory: Path, best: bool) -> Path:
    found = newest_intact(directory, rename_damaged=False)
    path = best_intact(directory) if best else found.path
    if path is None:
        what = " of a best evaluation" if best else ""
        raise StorageError(
            f"{directory} holds no intact checkpoint{what}.{found.damaged_text} A run writes one every "
            "checkpoint.every_s seconds or checkpoint.every_steps steps, at its end, and after each "
            "evaluation that is the best so far."
        )
    return path


def _narrowed(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    narrow = tensor.to(dtype)
    if not torch.equal(narrow.isfinite(), tensor.isfinite()):
        raise ConfigError(
            f"{key} holds values up to {tensor.abs().max().item():g}, beyond the largest that "
            f"{dtype} has ({torch.finfo(dtype).max:g}). Export it as fp32."
        )
    return narrow
