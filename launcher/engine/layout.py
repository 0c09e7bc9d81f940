"""One flat layout shared by weights, wire gradients, masters and optimizer states.

Owns where each trainable parameter lies in the flat buffers and makes the model's parameters views of
them. Matrices (two or more dimensions) and vectors form two segments, because half policies keep vectors
in fp32. Offsets follow the reverse order of registration, about the order in which autograd finishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from launcher.engine.policy import Policy

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALIGNMENT = 32  # elements: 64 bytes in half precision, one cache line


@dataclass(frozen=True)
class Slot:
    """One parameter's place: `numel` elements from `offset` in each flat buffer of its segment."""

    name: str
    index: int  # position in the order of all slots of a layout
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    numel: int

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat buffer, in the parameter's shape and memory format."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    def flat(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat buffer as it lies in memory, [numel]."""
        return flat[self.offset : self.offset + self.numel]


@dataclass
class Segment:
    """The parameters of one kind. Buffers are flat, `numel` elements long, padding included.

    `weight` is what the model computes with; `master` is fp32 and the same tensor as `weight` where the
    weights are fp32, None where a policy has no masters; `grad` is in the dtype of the wire.
    """

    name: str
    slots: list[Slot]
    weight: Tensor
    master: Tensor | None
    grad: Tensor

    @property
    def numel(self) -> int:
        return self.weight.numel()

    @property
    def half(self) -> bool:
        """Whether the model's weights are a rounded copy rather than the masters themselves."""
        return self.weight.dtype != torch.float32


class Layout:
    """The flat form of a model's trainable parameters. Building it moves the parameters into it.

    Raises ValueError for what cannot be trained here: no trainable parameter, parameters on two devices,
    a dtype other than fp32, fp16, bf16.
    """

    def __init__(self, model: nn.Module, policy: Policy, wire: torch.dtype | None = None) -> None:
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        _refuse_untrainable(model, trainable)
        self.parameters: dict[str, nn.Parameter] = dict(reversed(trainable))
        self.device = trainable[0][1].device
        matrices = [n for n, p in self.parameters.items() if p.ndim >= 2]
        vectors = [n for n, p in self.parameters.items() if p.ndim < 2]
        self.segments: list[Segment] = []
        for name, members, weight, grad in (
            ("matrices", matrices, policy.weights, wire or policy.wire),
            ("vectors", vectors, torch.float32, torch.float32),
        ):
            if members:
                masters = policy.masters or weight == torch.float32
                self.segments.append(self._move(name, members, weight, grad, masters))
        _round_frozen(model, policy)

    def _move(
        self, name: str, members: list[str], weight: torch.dtype, grad: torch.dtype, masters: bool
    ) -> Segment:
        """Lay the named parameters out, copy their values in, and make them views of the result."""
        first = sum(len(segment.slots) for segment in self.segments)
        slots, end = [], 0
        for index, member in enumerate(members, first):
            p = self.parameters[member]
            slots.append(Slot(member, index, p.shape, _dense_stride(p), end, p.numel()))
            end += -(-p.numel() // ALIGNMENT) * ALIGNMENT
        exact = torch.zeros(end, dtype=torch.float32, device=self.device)
        for slot in slots:
            slot.view(exact).copy_(self.parameters[slot.name].detach())
        weights = exact if weight == torch.float32 else exact.to(weight)
        for slot in slots:
            self.parameters[slot.name].grad = None  # autograd would add the first gradient to it
            self.parameters[slot.name].data = slot.view(weights)
        grads = torch.zeros(end, dtype=grad, device=self.device)
        return Segment(name, slots, weights, exact if masters else None, grads)

    @property
    def slots(self) -> Iterator[Slot]:
        """All slots, segment by segment, in the order of `Slot.index`."""
        return (slot for segment in self.segments for slot in segment.slots)

    def masters(self) -> dict[str, Tensor]:
        """fp32 values by parameter name: views of the masters, or widened weights where there are none."""
        exact = [s.weight.float() if s.master is None else s.master for s in self.segments]
        return {
            slot.name: slot.view(flat)
            for segment, flat in zip(self.segments, exact, strict=True)
            for slot in segment.slots
        }

    def gradients(self) -> dict[str, Tensor]:
        """Views of the wire gradients by parameter name; scaled, valid from step() to the next backward."""
        return {slot.name: slot.view(s.grad) for s in self.segments for slot in s.slots}

    def round_weights(self) -> None:
        """weights = RNE(masters), after the masters were set from outside."""
        for segment in self.segments:
            if segment.half and segment.master is not None:
                segment.weight.copy_(segment.master)


def _refuse_untrainable(model: nn.Module, trainable: list[tuple[str, nn.Parameter]]) -> None:
    if not trainable:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter. At least one needs requires_grad=True."
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise ValueError(f"parameters lie on {len(devices)} devices ({devices}). Move the model to one.")
    for name, p in trainable:
        if p.dtype not in _FLOATS or p.layout != torch.strided:
            raise ValueError(
                f"parameter {name} is {p.dtype}, {p.layout}. Trainable parameters are dense and "
                "float32, float16 or bfloat16: convert it, or freeze it with requires_grad_(False)."
            )


def _dense_stride(p: Tensor) -> tuple[int, ...]:
    """Strides without gaps that keep the parameter's order of dimensions (so channels_last survives)."""
    return torch.empty_like(p, device="meta").stride()


def _round_frozen(model: nn.Module, policy: Policy) -> None:
    """Frozen parameters take part in half arithmetic like trainable ones."""
    for p in model.parameters():
        if not p.requires_grad and p.dtype in _FLOATS:
            p.data = p.data.to(policy.weights if p.ndim >= 2 else torch.float32)
