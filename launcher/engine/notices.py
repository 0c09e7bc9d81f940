"""Warnings, each issued once, about a training loop that runs but probably not as intended."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from launcher.engine.errors import EngineWarning, listed

GRADIENT_STEPS = 10  # enough for layers that start at zero, whose neighbours have no gradient at first
SHOWN = 5  # parameters that a warning names

NO_SAMPLES = (
    "a step had no samples on any rank: it is skipped, and its loss is nan. Call stepper.backward(loss_sum, "
    "count) before stepper.step(), with the number of samples as count."
)
NO_GRADIENTS = (
    "{silent} of {total} parameters {had} in the first {steps}: {names}. "
    "Weight decay still changes them. If the loss should depend on them, check that the forward pass uses "
    "them, that nothing detaches it (.detach(), .data, torch.no_grad()){more}. Otherwise freeze them with "
    "requires_grad_(False) before building the Stepper, unless later steps use them."
)
NOTHING_ARRIVED = {"had": "received no gradient", "steps": "applied step", "more": ""}
ONLY_ZEROS = {
    "had": "had only zero gradients",
    "steps": f"{GRADIENT_STEPS} applied steps",
    "more": ", and under fp16 that the loss scale is not too small",
}

ALONE = (
    "{variable}={size}, but no process group is initialised: this process trains alone, and the others each "
    "train a model of their own. Call torch.distributed.init_process_group() before building the Stepper. To "
    "train alone on purpose, then pass a group of one: "
    "new_group([get_rank()], use_local_synchronization=True)."
)
# Set by torchrun, by Open MPI, by MPICH and Intel MPI, by srun. SLURM_NTASKS is also set outside of srun.
WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def warn_if_alone(stacklevel: int) -> None:
    """Warn where a launcher started several processes and no process group is initialised."""
    if dist.is_available() and dist.is_initialized():
        return
    for variable in WORLD_SIZES:
        size = os.environ.get(variable, "")
        if size.isdecimal() and int(size) > 1:
            warnings.warn(ALONE.format(variable=variable, size=size), EngineWarning, stacklevel + 1)
            return


class Notices:
    """Warnings of one Stepper, each issued once. `parameters` names its non-empty parameters.

    `unused` names those for which the backward passes of this rank's first step had no gradient.
    """

    def __init__(self, parameters: Collection[str], unused: Callable[[], Collection[str]]) -> None:
        self._given: set[str] = set()
        self._unused = unused
        self._total = len(parameters)
        self._silent = set(parameters)  # only zero gradients in the applied steps read so far
        self._steps = 0

    def warn(self, text: str, stacklevel: int) -> None:
        """Warn once per text. `stacklevel` counts from the caller, as in warnings.warn."""
        if text not in self._given:
            self._given.add(text)
            warnings.warn(text, EngineWarning, stacklevel=stacklevel + 1)

    def gradients(self, names: Sequence[str], sums: Tensor, stacklevel: int) -> None:
        """Record the sums of squares, [parameters] on the host, of an applied step's gradients."""
        if not self._silent or self._steps == GRADIENT_STEPS:
            return
        self._steps += 1
        self._silent -= {names[index] for index in sums.nonzero().flatten().tolist()}
        if self._steps == 1:
            # Layers beside one that starts at zero have a gradient, of zeros; what has none is said at once.
            unused = self._silent.intersection(self._unused())
            self._name(names, unused, NOTHING_ARRIVED, stacklevel + 1)
            self._silent -= unused
        elif self._steps == GRADIENT_STEPS:
            self._name(names, self._silent, ONLY_ZEROS, stacklevel + 1)

    def _name(
        self, names: Sequence[str], silent: Collection[str], words: Mapping[str, str], stacklevel: int
    ) -> None:
        if silent:
            shown = listed([name for name in names if name in silent], SHOWN)
            text = NO_GRADIENTS.format(silent=len(silent), total=self._total, names=shown, **words)
            self.warn(text, stacklevel + 1)
