"""What a loop that was ported from torch.amp may have kept, and would train wrongly with.

Owns four checks: loss.backward() in place of stepper.backward(), a GradScaler in front of it, clip_grad_norm_
before step(), and a forward pass outside `stepper.forward()`. None reads from a device.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection

import torch
from torch import Tensor, nn

import launcher.engine.async_work as async_work
from launcher.engine.checks.step_warnings import StepWarnings, caller
from launcher.engine.errors import UnusableError
from launcher.engine.precision.op_lists import HALF

NO_BACKWARD = (
    "step() was called without backward(), and parameters hold gradients in p.grad, which step() does not "
    "read. If they come from this network's loss, call stepper.backward(loss_sum, count) instead of "
    "loss.backward(). If they come from another network's backward pass (a generator's through its "
    "discriminator), call model.zero_grad() before step(), or skip step() on all ranks."
)
SCALED = (
    "the loss was multiplied by a GradScaler. The Stepper has a loss scale itself, and does not undo this "
    "one: remove scaler.scale(), unscale_(), step() and update()."
)
NO_CLIPPING = (
    "{name}() is called beside stepper.step(), and clips nothing there: between backward() and step() p.grad "
    "is None. Give the Stepper clip_norm=..., which clips the mean gradient of all ranks."
)
OUTSIDE = (
    "The weights of this model are {dtype}, because a Stepper trains it: call it, and copies of it, within "
    "`with stepper.forward():`, under torch.no_grad() for an evaluation or for sampling."
)


class PortedLoop:
    """Looks at the first step of a Stepper for calls of torch.amp, and at each for a missing backward()."""

    def __init__(
        self,
        parameters: Collection[nn.Parameter],
        group: async_work.Group,
        clips: bool,
        warnings: StepWarnings,
    ) -> None:
        self._parameters, self._alone, self._clips = parameters, group is None, clips
        self._warnings = warnings
        self._has_stepped = False

    def check_backward(self, loss_sum: Tensor) -> None:
        """Raise UnusableError for a loss that torch's GradScaler has multiplied by its scale."""
        if not self._has_stepped and _is_scaled(loss_sum):
            raise UnusableError(SCALED)

    def check_step(self, has_backward: bool) -> None:
        """Warn of a step() without backward(), and of a loop that clips gradients itself.

        Raises UnusableError if p.grad holds gradients and no backward() came before: loss.backward() was
        called instead. With a group that is a warning, because this rank may have no samples in this step,
        and the others are in the step's collectives.
        """
        first, self._has_stepped = not self._has_stepped, True
        if not has_backward and any(p.grad is not None for p in self._parameters):
            if self._alone:
                raise UnusableError(NO_BACKWARD)
            self._warnings.warn(NO_BACKWARD)
        if first and not self._clips:
            names = caller()[0].f_code.co_names  # what the function that calls step() calls besides
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                if name in names:
                    self._warnings.warn(NO_CLIPPING.format(name=name))


def _is_scaled(loss_sum: Tensor) -> bool:
    """Whether the last thing that was done to the loss is a GradScaler's product."""
    factor = getattr(loss_sum.grad_fn, "_saved_other", None)
    if not isinstance(factor, Tensor) or factor.ndim or factor.requires_grad:
        return False
    # Which tensor it is shows without reading it. A look at all objects takes some 50 ms, once.
    scalers = (each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler))
    scales = [scaler._scale for scaler in scalers]
    return any(scale is not None and scale.data_ptr() == factor.data_ptr() for scale in scales)


def note_calls_outside(model: nn.Module) -> None:
    """Add to errors of half weights that are called outside a forward() context what they are called in."""
    halves = any(p.dtype in HALF for p in model.parameters())
    if halves and _note not in model._forward_hooks.values():
        # A function: a model is copied and pickled with its hooks, and a copy is called outside as well.
        model.register_forward_hook(_note, always_call=True)


def _note(module: nn.Module, inputs: object, output: object) -> None:
    """Called after each forward pass; after an error torch calls it while that is being handled."""
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError) and not torch._C._is_any_autocast_enabled():
        dtypes = {p.dtype for p in module.parameters() if p.dtype in HALF}
        if (dtypes and "dtype" in str(error)) or "scalar type" in str(error) or "Half" in str(error):
            error.add_note(OUTSIDE.format(dtype=", ".join(map(str, dtypes))))
