"""Warnings, each issued once, about a training loop that runs but probably not as intended."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence

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


def warn_if_alone(stacklevel: int) -> None:
    """Warn where torchrun, srun or mpirun started several processes and no process group is initialised."""
    sizes = {name: os.environ.get(name, "1") for name in SIZES}
    name = next((name for name in SIZES if sizes[name] != "1"), None)
    if name is not None and not dist.is_initialized():
        warnings.warn(ALONE.format(name=name, size=sizes[name]), EngineWarning, stacklevel + 1)


def level_outside() -> int:
    """The `stacklevel` with which the caller's warning names the line that called the engine."""
    level, frame = 1, sys._getframe(1)
    ours = ("launcher.engine", "torch.utils._contextlib")  # the latter calls what no_grad() decorates
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(ours):
        level, frame = level + 1, frame.f_back
    return level


class StepWarnings:
    """Warnings of one Stepper, each issued once, with `num_parameters` that are not empty.

    `unused` names those for which the backward passes of this rank's first step had no gradient.
    """

    def __init__(self, num_parameters: int, unused: Callable[[], Collection[str]]) -> None:
        self._given: set[str] = set()
        self._num_parameters, self._unused = num_parameters, unused
        self._has_applied = False

    def warn(self, text: str, stacklevel: int) -> None:
        """Warn once per text. `stacklevel` counts from the caller, as in warnings.warn."""
        if text not in self._given:
            self._given.add(text)
            warnings.warn(text, EngineWarning, stacklevel=stacklevel + 1)

    def gradients(self, names: Sequence[str], sums: Tensor, stacklevel: int) -> None:
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
            text = NO_GRADIENTS.format(
                silent=len(silent), total=self._num_parameters, names=listed(silent, SHOWN)
            )
            self.warn(text, stacklevel + 1)
