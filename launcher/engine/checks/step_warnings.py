"""Warnings, each issued once, about a training loop that runs but probably not as intended."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from types import FrameType

import torch.distributed as dist
from torch import Tensor

from launcher.engine.errors import EngineWarning, listed

SHOWN = 5  # parameters that a warning names

NO_GRADIENTS = (
    "{silent} of {total} parameters received no gradient in the first applied step: {names}. Weight decay "
    "still changes them. Check that the forward pass uses them, and that nothing detaches it (.detach(), "
    ".data, torch.no_grad()), or freeze them before building the Stepper, unless later steps use them."
)
SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # of torchrun, srun, mpirun
ALONE = (
    "{name}={size}, but no process group is initialised: this process trains alone, and so do others. "
    "Call torch.distributed.init_process_group() before building the Stepper. To train alone on purpose, "
    "pass it a group of one: new_group([get_rank()], use_local_synchronization=True)."
)
OURS = ("launcher.engine", "torch.utils._contextlib")  # the latter calls what torch.no_grad() decorates


def caller() -> tuple[FrameType, int]:
    """The frame outside of the engine that called it, and its `stacklevel` for who calls this."""
    frame, level = sys._getframe(1), 1
    # Code that exec() runs may have no __name__.
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(OURS):
        frame, level = frame.f_back, level + 1
    return frame, level


def warn(text: str) -> None:
    """Issue an EngineWarning that names the line which called the engine."""
    warnings.warn(text, EngineWarning, stacklevel=caller()[1])


def warn_if_alone() -> None:
    """Warn where torchrun, srun or mpirun started several processes and no process group is initialised."""
    sizes = {name: os.environ.get(name, "1") for name in SIZES}
    name = next((name for name in SIZES if sizes[name] != "1"), None)
    if name is not None and not dist.is_initialized():
        warn(ALONE.format(name=name, size=sizes[name]))


class StepWarnings:
    """Warnings of one Stepper, each issued once, with `num_parameters` that are not empty.

    `unused` names those for which the backward passes of this rank's first step had no gradient.
    """

    def __init__(self, num_parameters: int, unused: Callable[[], Collection[str]]) -> None:
        self._given: set[str] = set()
        self._num_parameters, self._unused = num_parameters, unused
        self._has_applied = False

    def warn(self, text: str) -> None:
        """Warn once per text."""
        if text not in self._given:
            self._given.add(text)
            warn(text)

    def gradients(self, names: Sequence[str], sums: Tensor) -> None:
        """Name the parameters without a gradient in the first applied step that is read.

        `sums` of squares, [parameters] on the host, are of all ranks: one may use what another does not.
        """
        if self._has_applied:
            return
        self._has_applied = True
        unused = set(self._unused())
        silent = [
            name for name, total in zip(names, sums.tolist(), strict=True) if name in unused and not total
        ]
        if silent:
            shown = listed(silent, SHOWN)
            self.warn(NO_GRADIENTS.format(silent=len(silent), total=self._num_parameters, names=shown))
