"""What a loop that was ported from torch.amp may have kept, and would train wrongly with.

Owns three checks: a GradScaler in front of backward(), clip_grad_norm_ before step(), and a forward pass
outside `stepper.forward()`. Each looks once, and none reads from a device.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType

import torch
from torch import Tensor, nn

from launcher.engine.errors import UnusableError
from launcher.engine.precision.op_lists import HALF

NO_CLIPPING = (
    "{name}() is called beside stepper.step(), and clips nothing there: between backward() and step() p.grad "
    "is None. Give the Stepper clip_norm=..., which clips the mean gradient of all ranks."
)
OUTSIDE = (
    "The weights of this model are {dtype}, because a Stepper trains it: call it, and copies of it, within "
    "`with stepper.forward():`, under torch.no_grad() for an evaluation or for sampling."
)


def refuse_scaler(loss_sum: Tensor) -> None:
    """Raise UnusableError for a loss that torch's GradScaler has multiplied by its scale."""
    factor = getattr(loss_sum.grad_fn, "_saved_other", None)
    if not isinstance(factor, Tensor) or factor.ndim or factor.requires_grad:
        return
    # Which tensor it is shows without reading it. A look at all objects takes some 50 ms, once.
    scalers = (each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler))
    scales = [scaler._scale for scaler in scalers]
    if any(scale is not None and scale.data_ptr() == factor.data_ptr() for scale in scales):
        raise UnusableError(
            "the loss was multiplied by a GradScaler. The Stepper has a loss scale itself, and does not undo "
            "this one: remove scaler.scale(), unscale_(), step() and update()."
        )


def clipping_beside(frame: FrameType | None) -> str:
    """A warning if the function that calls step() also names torch's clipping; empty if it does not."""
    names = () if frame is None else frame.f_code.co_names
    found = next((name for name in ("clip_grad_norm_", "clip_grad_value_") if name in names), "")
    return found and NO_CLIPPING.format(name=found)


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
