"""What a test can see of a Stepper: its whole state as bytes, and one training step in a line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import launcher.engine.build as build
from launcher.engine import EngineState, Stepper, StepReport
from tests.models import loss_sum


@contextmanager
def deciding_on_device(wanted: bool = True) -> Iterator[None]:
    """Steppers that are built within decide as on a GPU: no step reads a value on the host."""
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(build, "decides_on_host", lambda device: False)
        yield


def state_digest(stepper: Stepper, *, counters: bool = False) -> str:
    """sha256 over weights, masters, optimizer states and buffers, and the scale's counters if asked for."""
    tensors: list[Tensor] = list(stepper.model.state_dict().values())
    tensors += [flat_buffer.weight for flat_buffer in stepper.layout.flat_buffers]
    tensors += [shard.master for shard in stepper.zero1.shards if shard.master is not None]
    tensors += stepper.updater.tensors()
    numbers = stepper.counters() if counters else {"applied_steps": stepper.counters()["applied_steps"]}
    tensors += [torch.tensor([*numbers.values()])]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def flat_tensors(state: EngineState) -> dict[str, Tensor]:
    """All that a state holds, under one name each."""
    parts = {"weights": state.weights, "optimizer": state.optimizer, "buffers": state.buffers}
    found = {f"{part}/{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
    return found | {f"counters/{name}": torch.tensor(value) for name, value in state.counters.items()}


def weights_are_rounded_masters(stepper: Stepper) -> bool:
    """Whether w16 == RNE16(master), bit for bit, and the model's parameters are those weights."""
    params = {
        param.name: (param, flat_buffer)
        for flat_buffer in stepper.layout.flat_buffers
        for param in flat_buffer.params
    }
    for name, master in stepper.named_masters().items():
        param, flat_buffer = params[name]
        parameter = stepper.layout.parameters[name]
        rounded = master.to(parameter.dtype)
        if not torch.equal(rounded, parameter) or not torch.equal(param.view(flat_buffer.weight), parameter):
            return False
    return True


def train(stepper: Stepper, x: Tensor, classes: Tensor) -> StepReport:
    """One step of one micro-batch of a classifier."""
    with stepper.forward():
        loss = loss_sum(stepper.model(x), classes)
    stepper.backward(loss, len(x))
    return stepper.step().read()
