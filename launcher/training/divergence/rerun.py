"""Runs the batch of the step that ended a run again, to find the rank, samples and module at fault.

Owns that second pass. All ranks enter it at the same step, because all read the same numbers; only the random
state of the run changes. Called only after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.data.tensors import Batch, Batches
from launcher.engine import Stepper
from launcher.engine.diagnostics.nonfinite import (
    BackwardDiagnosis,
    Diagnosis,
    diagnose,
    diagnose_backward,
    nonfinite_parameters,
)
from launcher.engine.flat.names import named_parameters
from launcher.errors import described, listed
from launcher.recipe.contract import Loss
from launcher.training.divergence.evidence import (
    MAX_NAMES,
    NOTHING,
    Evidence,
    Overflow,
    evidence_of,
    exchange,
    master_text,
    module_text,
    nonfinite_rows,
    told_by_rank,
)
from launcher.training.progress import Position


class DivergenceInspector:
    """Finds what made the loss or the gradient of a step not finite."""

    def __init__(
        self,
        stepper: Stepper,
        loss: Callable[[nn.Module, Batch], Loss],
        batches: Callable[[], Batches],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._stepper = stepper
        self._loss = loss
        self._batches_of_run = batches  # which are made after this
        self._group = group

    @property
    def _batches(self) -> Batches:
        return self._batches_of_run()

    def broken_weights(self) -> str:
        """The weights that are not finite, each with its master's value; empty if all are finite.

        All ranks hold the same weights, so all get the same answer.
        """
        broken = nonfinite_parameters(self._stepper.model)
        if not broken:
            return ""
        masters, weights = self._stepper.named_masters(), named_parameters(self._stepper.model)
        told = [
            f"{name} ({master_text(masters[name], weights[name].dtype)})" if name in masters else name
            for name in broken
        ]
        return listed(told, MAX_NAMES)

    def narrowed(self, parameters: Sequence[str]) -> list[str]:
        """The parameters of modules that compute in fp32 whose gradients become fp16 all the same."""
        of_fp32 = tuple(f"{name}." for name in self._stepper.fp32_modules)
        sent, weights = self._stepper.own_gradients(), named_parameters(self._stepper.model)
        return [
            name
            for name in parameters
            if name.startswith(of_fp32) and torch.float16 in (sent[name].dtype, weights[name].dtype)
        ]

    def explain(self, epoch: int, step: int, suspected_ranks: Sequence[int], backward: bool) -> str:
        """Where step `step` (from 1) went wrong, as lines of text; the same on all ranks.

        A collective. `suspected_ranks` are those whose gradient was not finite: they are reported if neither
        pass finds anything. `backward` runs the backward pass too: the losses were finite. The weights are
        the present ones: the step did not change them, but the next one, already launched when this one is
        read, may have.
        """
        plan = self._batches.plan
        try:
            own = self._inspect(epoch, (step - 1) % plan.steps_per_epoch, backward)
        except Exception as error:  # after any error, because the other ranks wait in the exchange below
            # After what other ranks have found, but before those that found nothing, so that it is shown.
            own = Evidence(NOTHING - 1, f"the batch could not be run again: {described(error)}")
        found = exchange(own, self._group, self._stepper.device)
        return told_by_rank(found, suspected_ranks)

    def overflow(self, position: Position) -> Overflow | None:
        """The first module that made values that are not finite from finite ones, in the step just read.

        None where the batch, a weight or the loss itself was not finite. The same on all ranks: that of the
        rank which has the earliest. A collective.
        """
        try:
            own = self._first_overflow(position)
        except Exception as error:  # after any error, because the other ranks wait in the exchange below
            own = Evidence(NOTHING, described(error))
        finally:
            self._batches.take_bad()  # counted when the step was taken
        first = min(exchange(own, self._group, self._stepper.device), key=lambda found: found.order)
        module, _, text = first.text.partition("\n")
        return Overflow(module, text) if first.order < NOTHING and text else None

    def _first_overflow(self, position: Position) -> Evidence:
        """Evidence `name of the module\ntext`; without text where the cause is something else."""
        found = Evidence(NOTHING, "")
        for number, batch in enumerate(self._batches.step(position.epoch, position.step_of_epoch)):
            origin = self._run(batch)[0].origin  # of all micro-batches: collectives within modules match
            if any(map(nonfinite_rows, batch.values())):
                found = min(found, Evidence(number << 32, ""), key=lambda each: each.order)
            elif origin is not None:
                text = f"{origin.name}\n{module_text(origin)}"
                found = min(
                    found, Evidence((number << 32) + origin.position, text), key=lambda each: each.order
                )
        return found

    def _inspect(self, epoch: int, step_of_epoch: int, backward: bool) -> Evidence:
        """Run all of this rank's micro-batches again, so that collectives within modules match."""
        micro_batches = self._batches.step(epoch, step_of_epoch)
        found: list[Evidence] = []
        by_batch = zip(micro_batches, self._batches.latest_indices(), strict=True)
        for number, (batch, indices) in enumerate(by_batch):
            forward, loss_finite = self._run(batch)
            back = self._run_back(batch) if backward else None
            found.append(evidence_of(forward, loss_finite, back, number, batch, indices))
        return min(found, key=lambda evidence: evidence.order, default=Evidence(NOTHING, "no samples"))

    def _run(self, batch: Batch) -> tuple[Diagnosis, bool]:
        """One micro-batch through the model, in training mode, uncompiled; and whether its loss is finite."""
        losses: list[Tensor] = []

        def forward() -> None:
            with self._stepper.forward():
                losses.append(self._loss(self._stepper.model, batch).sum)

        diagnosis = diagnose(self._stepper.model, forward)
        return diagnosis, bool(losses[0].isfinite())

    def _run_back(self, batch: Batch) -> BackwardDiagnosis:
        """Run backward even if forward failed, so that collectives within modules match on all ranks."""

        def gradients() -> dict[str, Tensor]:
            with self._stepper.forward():
                loss = self._loss(self._stepper.model, batch).sum
            return self._stepper.dry_backward(loss)

        return diagnose_backward(self._stepper.model, gradients)
