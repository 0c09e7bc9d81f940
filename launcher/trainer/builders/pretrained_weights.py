"""Starts a new run from the weights of a safetensors file: `model.init_from=FILE`.

Owns the comparison of the file with the model, and what is reported and recorded of it. Rank 0 reads the file
into its model; building the Stepper then broadcasts its values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from launcher.checkpoint.pretrained import FLOATS, read, sha256_of
from launcher.config.schema import Config
from launcher.distributed.collectives import all_gather_str
from launcher.distributed.env import RANK0, WorkerEnv
from launcher.engine.names import plain_name
from launcher.errors import ConfigError, listed
from launcher.run_dir.records import METRICS
from launcher.telemetry.event_log import recorded
from launcher.trainer.context import TrainContext

SHOWN = 6  # names in a text
COUNTER = "num_batches_tracked"  # of a BatchNorm; files older than it lack it, as torch accepts


@dataclass(frozen=True)
class LoadReport:
    """What of a file a model took."""

    file: str
    sha256: str = ""
    text: str = ""  # for people
    error: str = ""  # of the failure; empty where the model has the values


def load_weights(config: Config, model: nn.Module, env: WorkerEnv) -> LoadReport | None:
    """Load the file of `model.init_from` into rank 0's `model`; None where none is given. A collective.

    Never raises for the file: a run that resumes has no use for it. `LoadReport.error` is equal on all ranks.
    """
    file, strict = config.model.init_from, config.model.init_from_strict
    if file is None:
        return None
    loaded = LoadReport(file)
    if env.is_rank0:
        try:
            digest = sha256_of(Path(file), config.model.init_from_sha256)
            text = _assign(model, read(Path(file)), f"{file} (sha256 {digest[:12]})", strict)
            loaded = LoadReport(file, digest, text)
        except ConfigError as error:
            loaded = LoadReport(file, error=f"model.init_from={file}: {error}")
    return LoadReport(**json.loads(all_gather_str(env, json.dumps(asdict(loaded)))[RANK0]))


def _assign(model: nn.Module, tensors: Mapping[str, Tensor], file: str, strict: bool) -> str:
    """Copy what fits. Returns what that is, and what stays as it is built, in words.

    Raises ConfigError, before anything is copied, where the file must not be used.
    """
    # Parameters and persistent buffers; a tied one under each of its keys. The Stepper refuses lazy ones.
    state = model.state_dict(keep_vars=True).items()
    own = {plain_name(key): x for key, x in state if isinstance(x, Tensor) and not is_lazy(x)}
    shared = [name for name in own if name in tensors]
    for name in shared:  # copy_ would convert quantised values without their scales
        kinds = FLOATS if own[name].dtype in FLOATS else (own[name].dtype,)
        if tensors[name].dtype not in kinds:
            given, *needed = (str(dtype).removeprefix("torch.") for dtype in (tensors[name].dtype, *kinds))
            raise ConfigError(f"{name} is {given} in the file; the model needs {' or '.join(needed)}.")
        # Of a buffer it may be meant: a mask has -inf.
        if isinstance(own[name], nn.Parameter) and not bool(tensors[name].isfinite().all()):
            raise ConfigError(f"{name} has values in the file that are not finite. Export the weights again.")
    fitting = [name for name in shared if tensors[name].shape == own[name].shape]
    first: dict[int, str] = {}  # a tied tensor may be given under one of its names, or alike under several
    for name in fitting:
        other = first.setdefault(id(own[name]), name)
        if not torch.equal(tensors[other], tensors[name]):
            raise ConfigError(
                f"{other} and {name} are one tensor in the model, and differ in the file. It is of a model "
                "that does not tie them."
            )
    random = [name for name in own if id(own[name]) not in first and not name.endswith(COUNTER)]
    shapes = {
        name: f" ({list(tensors[name].shape)} in the file, {list(own[name].shape)} in the model)"
        for name in shared
    }
    kept = listed([name + shapes.get(name, "") for name in random], SHOWN)
    unexpected = listed([name for name in tensors if name not in own], SHOWN)
    text = f"{len(fitting)} of {len(fitting) + len(random)} tensors from {file}"
    if kept:
        text += f"; kept as the recipe builds them, not in it or of another shape: {kept}"
    if unexpected:
        text += f"; not in this model: {unexpected}"
    if not fitting:
        raise ConfigError(
            f"it does not fit the model: {text}. No tensor fits by name and shape: it is of another model."
        )
    if strict and (kept or unexpected):
        raise ConfigError(
            f"it does not fit the model: {text}. model.init_from_strict=false loads those that fit and keeps "
            "the others as they are built."
        )
    with torch.no_grad():
        for name in fitting:
            own[name].copy_(tensors[name])
    return text


def report_weights(context: TrainContext, loaded: LoadReport | None, resumed: bool) -> None:
    """Report what the run starts from, and record the digest of the file. All ranks call it.

    `resumed`: from a checkpoint, whose weights have replaced those of the file. Otherwise raises ConfigError,
    on all ranks, for a file that cannot be used.
    """
    if loaded is None:
        return
    if resumed:
        text = f"of the checkpoint, not of model.init_from={loaded.file}"
        context.telemetry.decision("weights", text)
        if context.env.is_rank0 and (digest := _recorded_digest(context, loaded.file)):
            context.persist_config(model=replace(context.config.model, init_from_sha256=digest))
        return
    if loaded.error:
        raise ConfigError(loaded.error)
    context.telemetry.decision("weights", loaded.text, file=loaded.file, sha256=loaded.sha256)
    context.persist_config(model=replace(context.config.model, init_from_sha256=loaded.sha256))


def _recorded_digest(context: TrainContext, file: str) -> str | None:
    """The SHA-256 that the file had when this run started from it; None where its events have none."""
    events = recorded(Path(context.config.run.dir) / METRICS, "decision")
    digests = [str(event["sha256"]) for event in events if event.get("file") == file and "sha256" in event]
    return digests[-1] if digests else None
