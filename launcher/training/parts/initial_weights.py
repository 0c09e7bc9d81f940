"""Starts a new run from the weights of a safetensors file: `model.weights=FILE`.

Owns the comparison of the file with the model, and what is reported and recorded of it. Rank 0 reads the file
into its model; building the Stepper then broadcasts its values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from launcher.checkpoint.weights_file import FLOATS, read, sha256_of
from launcher.config.schema import Config, ModelConfig
from launcher.distributed.collectives import exchange_texts
from launcher.distributed.env import LEADER, WorkerEnv
from launcher.engine.flat.names import named_parameters, plain_name
from launcher.errors import ConfigError, listed
from launcher.run_dir.result import Result
from launcher.training.run import Run


class InitialWeights:
    """Reports and records the weights that were `loaded`, None where the config names no file."""

    def __init__(self, run: Run, loaded: Loaded | None) -> None:
        self._run = run
        self._loaded = loaded
        self._started_from: tuple[str, str] | None = None  # model.weights, and the SHA-256 that the file had

    def state(self) -> dict[str, Any]:
        return {"started_from": self._started_from}

    def load_state(self, values: dict[str, Any]) -> None:
        if (saved := values["started_from"]) is not None:
            self._started_from = tuple(saved)

    def check(self, resumed: bool) -> None:
        """Report what the run starts from. All ranks call it.

        `resumed`: from a checkpoint, whose weights have replaced those of the file. Otherwise raises
        ConfigError, on all ranks, for a file that cannot be used.
        """
        loaded, model = self._loaded, self._run.config.model
        if loaded is not None and resumed:
            self._run.telemetry.decision("weights", f"of the checkpoint, not of model.weights={loaded.file}")
        elif loaded is not None:
            if loaded.error:
                raise ConfigError(loaded.error)
            self._started_from = (loaded.file, loaded.sha256)
            self._report(loaded)
        if self._started_from is not None and self._started_from[0] == model.weights:
            self._run.record(model=replace(model, weights_sha256=self._started_from[1]))

    def add_to(self, result: Result) -> Result:
        if self._started_from is None:
            return result
        file, digest = self._started_from
        return replace(result, started_from={"file": file, "sha256": digest})

    def _report(self, loaded: Loaded) -> None:
        telemetry, model = self._run.telemetry, self._run.stepper.model
        fields = asdict(loaded)
        del fields["error"]
        telemetry.decision("weights", loaded.sentence, **fields | {"loaded": len(loaded.loaded)})
        frozen = [name for name, p in named_parameters(model).items() if not p.requires_grad]
        random = {*loaded.missing, *(text.partition(" ")[0] for text in loaded.misfits)}
        if idle := [name for name in frozen if name in random]:
            telemetry.warn(
                f"{listed(idle, SHOWN)} {'is' if len(idle) == 1 else 'are'} frozen and not in "
                f"model.weights={loaded.file}: they keep the random values that the recipe built. Do not "
                "freeze them, or give a file that has them."
            )


SHOWN = 3  # names in an error
SHOWN_IN_DECISION = 6
COUNTER = "num_batches_tracked"  # of a BatchNorm; files older than it lack it, as torch accepts


@dataclass(frozen=True)
class Loaded:
    """What of a file a model took. Names are keys of the model's state_dict, or of the file.

    `error` is the text of the failure, empty where the model has the values.
    """

    file: str
    sha256: str = ""
    loaded: Sequence[str] = ()
    missing: Sequence[str] = ()  # in the file: they keep the values that the recipe built
    unexpected: Sequence[str] = ()  # in the file only
    misfits: Sequence[str] = ()  # of another shape there: name and both shapes
    error: str = ""

    @property
    def sentence(self) -> str:
        """The decision, for people."""
        total = len(self.loaded) + len(self.missing) + len(self.misfits)
        text = f"{len(self.loaded)} of {total} tensors from {self.file} (sha256 {self.sha256[:12]})"
        if kept := (*self.misfits, *self.missing):
            text += f"; as the recipe built them: {listed(kept, SHOWN_IN_DECISION)}"
        if self.unexpected:
            text += f"; not in this model: {listed(self.unexpected, SHOWN_IN_DECISION)}"
        return text

    @property
    def misfit(self) -> str:
        """The error where the file must not be used."""
        parts = [
            f"{len(names)} {what}: {listed(names, SHOWN)}"
            for names, what in (
                (self.missing, "of the model's tensors are not in the file"),
                (self.unexpected, "in the file are not in the model"),
                (self.misfits, "have another shape"),
            )
            if names
        ]
        advice = "No tensor fits by name and shape: it is of another model."
        if self.loaded:
            advice = "model.weights_strict=false loads those that fit and keeps the others as they are built."
        return f"it does not fit the model. {'; '.join(parts)}. {advice}"


def load_weights(config: Config, model: nn.Module, env: WorkerEnv) -> Loaded | None:
    """Load the file of `model.weights` into rank 0's `model`; None where none is given. A collective.

    Never raises for the file: a run that resumes has no use for it. `Loaded.error` is the same on all ranks.
    """
    wish = config.model
    if wish.weights is None:
        return None
    own = asdict(_load(wish, model)) if env.is_leader else {}
    return Loaded(**json.loads(exchange_texts(env, json.dumps(own))[LEADER]))


def _load(wish: ModelConfig, model: nn.Module) -> Loaded:
    assert wish.weights is not None
    file = Path(wish.weights)
    try:
        digest = sha256_of(file, wish.weights_sha256)
        return _assign(model, read(file), file, digest, wish.weights_strict)
    except ConfigError as error:
        return Loaded(wish.weights, error=f"model.weights={wish.weights}: {error}")


def _assign(model: nn.Module, tensors: Mapping[str, Tensor], file: Path, digest: str, strict: bool) -> Loaded:
    """Copy what fits. Raises ConfigError, before anything is copied, where the file must not be used."""
    own = _named(model)
    shared = [name for name in own if name in tensors]
    for name in shared:
        _refuse_kind(name, own[name], tensors[name])
    fitting = [name for name in shared if tensors[name].shape == own[name].shape]
    _refuse_untied(own, tensors, fitting)
    given = {id(own[name]) for name in fitting}  # a tied tensor is given under one of its names
    mismatched = {id(own[name]) for name in shared} - given
    missing = [
        name
        for name, tensor in own.items()
        if id(tensor) not in given | mismatched and name.rpartition(".")[2] != COUNTER
    ]
    misfits = [
        f"{name} ({list(tensors[name].shape)} in the file, {list(own[name].shape)} in the model)"
        for name in shared
        if id(own[name]) in mismatched
    ]
    unexpected = [name for name in tensors if name not in own]
    found = Loaded(str(file), digest, fitting, missing, unexpected, misfits)
    if not fitting or (strict and (missing or misfits or unexpected)):
        raise ConfigError(found.misfit)
    with torch.no_grad():
        for name in fitting:
            own[name].copy_(tensors[name])
    return found


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their keys in the state_dict; a tied one under each.

    Lazy ones are left out: building the Stepper refuses them.
    """
    state = model.state_dict(keep_vars=True)
    return {
        plain_name(key): value
        for key, value in state.items()
        if isinstance(value, Tensor) and not is_lazy(value)
    }


def _refuse_kind(name: str, own: Tensor, given: Tensor) -> None:
    """Floating-point values for floating-point tensors, whole numbers for the others."""
    kinds = FLOATS if own.dtype in FLOATS else (own.dtype,)
    if given.dtype not in kinds:
        words = [str(dtype).removeprefix("torch.") for dtype in (given.dtype, *kinds)]
        raise ConfigError(f"{name} is {words[0]} in the file; the model needs {' or '.join(words[1:])}.")


def _refuse_untied(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], fitting: list[str]) -> None:
    """Raise for a tensor that is tied in the model and has several values in the file."""
    first: dict[int, str] = {}
    for name in fitting:
        other = first.setdefault(id(own[name]), name)
        if not torch.equal(tensors[other], tensors[name]):
            raise ConfigError(
                f"{other} and {name} are one tensor in the model, and differ in the file. It is of a model "
                "that does not tie them."
            )
