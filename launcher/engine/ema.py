"""The exponential moving average of a Stepper's weights, flat beside the masters.

Owns the averages, the pass that moves them after a step, and their temporary use in the model. Knows nothing
of files and configs. A skipped step changes no average. Where the optimizer is sharded, each rank has the
averages of its own shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import launcher.engine.limits as limits
from launcher.engine.names import named_buffers
from launcher.engine.state import check_forms, check_names, forms_of
from launcher.engine.stepper import Stepper

CHUNK = 1 << 24  # elements on a device: 64 MB for each of two results, less than the activations free by then


@dataclass(frozen=True)
class AverageState:
    """An ExponentialMovingAverage by name: fp32 weights, the running statistics of this rank, and a counter.

    `applied` is the number of applied steps at the latest pass.
    """

    weights: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    counters: dict[str, int]


class ExponentialMovingAverage:
    """Averages the weights of a Stepper over its applied steps: w_ema = d * w_ema + (1 - d) * w.

        average = ExponentialMovingAverage(stepper, decay=0.999)
        for step in range(1, steps + 1):
            ...
            stepper.step()
            average.update(step)
        average.flush()                   # the steps since the last pass, too
        with average.in_model():
            evaluate(model)

    `decay` is per applied step; after t of them d = min(decay, (1 + t) / (10 + t)), so that the average soon
    leaves the initial weights. A pass is made after the steps whose number is a multiple of `every_steps`,
    with d of the last applied step to the power of the applied steps since the pass before. Running
    statistics (of BatchNorm) are averaged alike, each rank's for itself; other buffers keep their present
    values. Averages are fp32 and start as the present weights.

    After Stepper.load() the averages are still those of the steps before it: load() those that were saved
    with the state, or restart(). Without either, they continue with the steps after the load.
    """

    def __init__(self, stepper: Stepper, decay: float, every_steps: int = 1) -> None:
        limits.share.require("ExponentialMovingAverage decay", decay)
        limits.at_least_one.require("ExponentialMovingAverage every_steps", every_steps)
        self._stepper = stepper
        self._decay, self._every_steps = decay, every_steps
        self._weights = [values.clone() for values in stepper.own_masters()]
        self._statistics = [flat.clone() for flat in stepper.buffers.statistics]
        self._applied = stepper.scale.state.applied_steps  # at the latest pass
        self._loads = stepper.scale.loads

    def restart(self) -> None:
        """Forget all steps: the averages are the present weights and statistics."""
        for average, values in self._pairs():
            average.copy_(values)
        self._applied, self._loads = self._stepper.scale.state.applied_steps, self._stepper.scale.loads

    def update(self, step: int) -> None:
        """Make a pass if the step that has just been made, number `step`, is one after which there is one."""
        if step % self._every_steps == 0:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Make a pass now, for the steps since the latest; change nothing if none of them was applied.

        Before an evaluation, or the end. Averages depend on when passes are made: make them at the same steps
        where the same bits are wanted.
        """
        self._follow_loads()
        applied = self._stepper.scale.state.applied_steps  # a number, or 0-dim where the device decides
        unchanged = applied == self._applied
        if unchanged is True:
            return
        # The ramp of TensorFlow's ExponentialMovingAverage with num_updates.
        ramp = (1 + applied) / (10 + applied)
        decay = ramp.clamp(max=self._decay) if isinstance(ramp, Tensor) else min(ramp, self._decay)
        weight = 1 - decay ** (applied - self._applied)
        for average, values in self._pairs():
            _blend(average, values, weight, unchanged)
        self._applied = applied

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Context in which the model has the averages; BatchNorm statistics are their mean over the ranks.

        A collective at its start. Afterwards weights and buffers have the bits that they had before, also
        where the context raises. Within it the Stepper neither trains nor saves nor loads.
        """
        flat_buffers, buffers = self._stepper.layout.flat_buffers, self._stepper.buffers
        with self._stepper.weights_swapped():
            # On the host: where the optimizer is sharded, memory of the device is short.
            flats = [*(flat_buffer.weight for flat_buffer in flat_buffers), *buffers.flat]
            kept = [(flat, flat.to("cpu", copy=True)) for flat in flats]
            held = [*(shard.weight for shard in self._stepper.zero1.shards), *buffers.statistics]
            try:
                for flat, average in zip(held, self.tensors(), strict=True):
                    flat.copy_(average)
                self._stepper.zero1.gather_weights()
                self._stepper.average_buffers()
                yield
            finally:  # without a collective, because one rank may be alone here
                for flat, values in kept:
                    flat.copy_(values)
                # average_buffers() has remembered the averages as the values to return to after a skipped
                # step.
                buffers.snapshot()

    def state(self, rank: int | None = None) -> AverageState:
        """The averages by name, views where possible. A collective where sharded. Waits for the device.

        `rank` is that of `Stepper.state`.
        """
        self._follow_loads()
        weights = self._stepper.zero1.gather_full(self._weights, rank)
        return AverageState(weights, self._named_statistics(), {"applied": int(self._applied)})

    @torch.no_grad()
    def load(self, state: AverageState) -> None:
        """Continue from `state`, once the Stepper has the state of the same step.

        Raises ValueError, before anything is changed, for the averages of another model or of a later step.
        """
        zero1, buffers = self._stepper.zero1, self._named_statistics()
        check_forms("averaged weights", zero1.forms, state.weights)
        check_forms("averaged buffers", forms_of(buffers), state.buffers)
        check_names("counters of the average", {"applied"}, set(state.counters))
        scale = self._stepper.scale
        applied, present = state.counters["applied"], int(scale.state.applied_steps)
        if applied > present:
            raise ValueError(
                f"the state does not fit: it is of {applied} applied steps, and the Stepper has {present}. "
                "First load the Stepper's state of the same step."
            )
        zero1.scatter(state.weights, self._weights)
        for name, buffer in buffers.items():
            buffer.copy_(state.buffers[name])
        self._applied, self._loads = scale.placed(applied), scale.loads

    def replicas(self, by_parameter: bool = True) -> dict[str, Tensor]:
        """Flat averages that must hold the same bits on all ranks; none of sharded ones.

        `by_parameter` as of `Stepper.replicas`.
        """
        return {
            name: flat
            for flat_buffer in self._stepper.layout.flat_buffers
            for shard, average in zip(self._stepper.zero1.shards, self._weights, strict=True)
            if shard is flat_buffer
            for name, flat in flat_buffer.named("average", average, by_parameter).items()
        }

    def tensors(self) -> list[Tensor]:
        """The memory of the averages."""
        return [*self._weights, *self._statistics]

    def _follow_loads(self) -> None:
        """Forget the steps since the latest pass if the Stepper has loaded a state: they are rolled back.

        Its count of applied steps may be any other now, and the exponent of a decay is a difference of two.
        """
        scale = self._stepper.scale
        if self._loads != scale.loads:
            self._applied, self._loads = scale.placed(scale.loaded), scale.loads

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The pairs of an average and what it averages, flat."""
        yield from zip(self._weights, self._stepper.own_masters(), strict=True)
        yield from zip(self._statistics, self._stepper.buffers.statistics, strict=True)

    def _named_statistics(self) -> dict[str, Tensor]:
        """Averages of the running statistics by name, as views."""
        # The model's buffers are views of the flat ones: their address says of which.
        flats = zip(self._stepper.buffers.statistics, self._statistics, strict=True)
        averages = {flat.untyped_storage().data_ptr(): average for flat, average in flats}
        return {
            name: averages[place].as_strided(buffer.shape, buffer.stride(), buffer.storage_offset())
            for name, buffer in named_buffers(self._stepper.model).items()
            if buffer.numel() and (place := buffer.untyped_storage().data_ptr()) in averages
        }


def _blend(average: Tensor, values: Tensor, weight: Tensor | float, unchanged: Tensor) -> None:
    """Move `average` towards `values`. `unchanged`, where the device decides, forbids writing."""
    if not isinstance(weight, Tensor):
        average.lerp_(values, weight)
        return
    # Not by a weight of 0, which would make a NaN of a value that is inf.
    for old, new in zip(torch.split(average, CHUNK), torch.split(values, CHUNK), strict=True):
        torch.where(unchanged, old, old.lerp(new, weight.to(old.dtype)), out=old)
