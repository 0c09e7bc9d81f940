"""Any other `torch.optim` optimizer, on fp32 masters, with skip and clip as for our own.

Owns the translation between the flat layout and the parameter lists that torch's optimizers take. It is
correct, not fast: the gradient is widened into memory of its own, and the host looks at the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from launcher.engine.layout import Layout, Segment
from launcher.engine.update import Scalars

_REFUSED = {
    "LBFGS": "it evaluates the loss several times per step, and a step here is one reduced gradient",
    "SparseAdam": "it takes sparse gradients, and gradients travel in dense buckets",
}


@dataclass(frozen=True)
class TorchOptimizer:
    """A class from `torch.optim` with its options, `lr` among the fields.

    Raises ValueError for optimizers that cannot work on reduced gradients (LBFGS, SparseAdam).
    """

    kind: type[torch.optim.Optimizer]
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reason = _REFUSED.get(self.kind.__name__)
        if reason is not None:
            raise ValueError(f"{self.kind.__name__} cannot be used here: {reason}. Use SGD, AdamW or Adam.")


class AdaptedUpdater:
    """Runs a `TorchOptimizer` over a layout; the counterpart of `update.Updater`."""

    def __init__(self, layout: Layout, optimizer: TorchOptimizer) -> None:
        self._segments = layout.segments
        for segment in self._segments:
            if segment.master is None:
                raise ValueError(
                    f"{optimizer.kind.__name__} needs fp32 masters, and this policy has none. "
                    "Use SGD or AdamW, or a policy with masters."
                )
        self._masters: dict[str, nn.Parameter] = {
            name: nn.Parameter(master) for name, master in layout.masters().items()
        }
        self._optimizer = optimizer.kind(
            self._masters.values(),
            lr=optimizer.lr,  # type: ignore[call-arg]  # every torch.optim optimizer takes one
            **optimizer.options,
        )

    def step(self, scalars: Scalars) -> None:
        """Apply one update, or touch nothing where `scalars.skip` is true. Waits for the device."""
        if bool(scalars.skip):
            return
        for segment in self._segments:
            self._widen_gradients(segment, scalars.multiplier)
        for group in self._optimizer.param_groups:
            group["lr"] = float(scalars.lr)
        self._optimizer.step()
        for master in self._masters.values():
            master.grad = None
        for segment in self._segments:
            if segment.half and segment.master is not None:
                segment.weight.copy_(segment.master)

    def named_states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's tensors by state name, then parameter name; empty before the first update."""
        states: dict[str, dict[str, Tensor]] = {}
        for name, master in self._masters.items():
            for state, value in self._optimizer.state[master].items():
                states.setdefault(state, {})[name] = value
        return states

    def tensors(self) -> list[Tensor]:
        """All tensors held here."""
        return [tensor for of_state in self.named_states().values() for tensor in of_state.values()]

    def _widen_gradients(self, segment: Segment, multiplier: Tensor) -> None:
        gradient = segment.grad.float().mul_(multiplier)
        for slot in segment.slots:
            self._masters[slot.name].grad = slot.view(gradient)
