"""What one rank holds of a training run: weights, masters, optimizer states, buffers, the loss scale.

Owns what is saved, loaded, compared between ranks and counted in bytes. Only `load` changes values; the order
of events in a step belongs to the Stepper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from launcher.engine.grads.zero1 import Zero1
from launcher.engine.limits import a_reference_count
from launcher.engine.names import named_buffers, named_parameters
from launcher.engine.optim.torch_optimizer import TorchUpdater
from launcher.engine.optim.update import Updater
from launcher.engine.params.flat_params import Layout
from launcher.engine.params.module_buffers import Buffers
from launcher.engine.precision.loss_scale import LossScale, ScaleStart
from launcher.engine.precision.op_lists import widen
from launcher.engine.precision.outliers import OutlierStatistics
from launcher.engine.state import EngineState, check_model_state, check_names


@dataclass(eq=False)
class RankState:
    """One rank's copy of the model and its training state, parts of which may be sharded."""

    model: nn.Module
    layout: Layout
    buffers: Buffers
    zero1: Zero1
    updater: Updater | TorchUpdater
    scale: LossScale
    outliers: OutlierStatistics | None

    def masters(self, rank: int | None = None) -> dict[str, Tensor]:
        """fp32 values of the trainable parameters by name, as `Zero1.gather_full`."""
        return self.zero1.gather_full(self.zero1.masters(), rank)

    def state(self, reference_count: int | None, rank: int | None = None) -> EngineState:
        """Everything needed to resume bit for bit, views where possible. Waits for the device.

        A collective where the optimizer is sharded: `rank` is that of `Zero1.gather_full`.
        """
        collect = partial(self.zero1.gather_full, rank=rank)
        named = named_parameters(self.model).items()
        frozen = {name: widen(p.detach()) for name, p in named if not p.requires_grad}
        return EngineState(
            weights=frozen | self.masters(rank),
            optimizer=self.updater.named_states(collect),
            buffers=named_buffers(self.model),
            counters=self.scale.counters(),
            reference_count=reference_count,
            scale_mode=self.scale.scaling.mode,
            outliers=None if self.outliers is None else self.outliers.state(),
        )

    @torch.no_grad()  # values of a Parameter would make the masters results of autograd
    def load(self, state: EngineState) -> ScaleStart:
        """Restore `state`. Raises ValueError, before anything is changed, for the state of another model.

        A collective where the optimizer is sharded, or another rank sends the state.
        """
        check_model_state(self.model, state)
        check_names("counters of the loss scale", set(LossScale.FIELDS), set(state.counters))
        if state.reference_count is not None:
            a_reference_count.require("the state's reference_count", state.reference_count)
        load_states = self.updater.prepare_load(
            self.zero1, state.optimizer, state.counters["applied_steps"] > 0
        )
        load_states()
        self.zero1.load_masters(state.weights)
        for name, p in named_parameters(self.model).items():
            if not p.requires_grad:
                p.data.copy_(state.weights[name])
        for name, buffer in named_buffers(self.model).items():
            buffer.copy_(state.buffers[name])
        # Else a skipped step would return to the buffers from before the load.
        self.buffers.snapshot()
        if self.outliers is not None and state.outliers is not None:
            self.outliers.load(state.outliers)
        return self.scale.restore(state.counters, state.scale_mode)

    def comparable(self, reference_count: int | None, by_parameter: bool) -> dict[str, Tensor]:
        """The tensors that `Stepper.replicas` returns, without the learning rate."""
        numbers = {"reference count": reference_count or 0}
        numbers |= {f"loss scale ({name})": value for name, value in self.scale.counters().items()}
        found = {name: torch.tensor([each], device=self.layout.device) for name, each in numbers.items()}
        found |= {} if self.outliers is None else self.outliers.tensors()
        for flat_buffer in self.layout.flat_buffers:
            # What all ranks hold: a flat buffer whose optimizer is sharded is no shard, and has no master.
            kinds = {"weight": flat_buffer.weight}
            if flat_buffer.half and flat_buffer.master is not None:
                kinds["master"] = flat_buffer.master
            for shard, states in zip(self.zero1.shards, self.updater.states, strict=True):
                if shard is flat_buffer:
                    kinds |= {f"optimizer state {number}": state for number, state in enumerate(states)}
            for kind, flat in kinds.items():
                found |= flat_buffer.named(kind, flat, by_parameter)
        return found

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of all that is kept between steps. Frozen parameters are weights."""
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        by_kind = {
            "weights": [*(flat_buffer.weight for flat_buffer in self.layout.flat_buffers), *frozen],
            "masters": [p.master for p in self.zero1.shards if p.half and p.master is not None],
            "gradients": [flat_buffer.grad for flat_buffer in self.layout.flat_buffers],
            "states": self.updater.tensors(),
            "buffers": self.buffers.tensors(),
        }
        return {kind: size_bytes(tensors) for kind, tensors in by_kind.items()}


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
