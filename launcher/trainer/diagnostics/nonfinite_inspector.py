"""Runs the batch of a step whose loss or gradient was not finite again: which rank, samples and module?

Owns that second pass, and the texts about what it shows, ordered by position in the pass and equal on all
ranks. All ranks enter it at the same step, because all read the same numbers. The generators are seeded as in
the step, so that dropout masks are the same. Called only after such a step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from launcher.data.seeding import seed_compute
from launcher.data.tensors import Batch
from launcher.distributed.collectives import all_gather_str
from launcher.errors import counted, described, listed
from launcher.trainer.context import TrainContext
from launcher.trainer.diagnostics import nonfinite
from launcher.trainer.diagnostics.nonfinite import ModuleFinding
from launcher.trainer.progress import StepIndex

NOT_FOUND = 2**64 - 1  # the order of a rank that found nothing: after all others
AFTER_FORWARD = 2**31  # the position of what appears only in the loss
MAX_SAMPLES = 8
MAX_NAMES = 5
MAX_RANKS = 4


@dataclass(frozen=True, order=True)
class Finding:
    """What one rank found; the smallest `order` came first in the pass."""

    order: int
    text: str = field(compare=False)
    samples: str = field(default="", compare=False)  # those at fault, or the whole micro-batch, as text
    module: str = field(default="", compare=False)  # which made values that are not finite from finite ones


class NonFiniteInspector:
    """Finds what made the loss or the gradient of a step not finite."""

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._stepper = context.stepper

    def broken_weights(self) -> str:
        """The weights that are not finite; empty if all are. The same on all ranks, as the weights are."""
        return listed(nonfinite.nonfinite_parameters(self._stepper.model), MAX_NAMES)

    def explain(self, index: StepIndex, suspected_ranks: Sequence[int], backward: bool) -> str:
        """Where the step at `index` went wrong, as lines of text; the same on all ranks.

        A collective. `suspected_ranks` are those whose gradient was not finite: they are reported if nothing
        is found. `backward` runs the backward pass, too: the losses were finite. The weights are the present
        ones: the step did not change them, but the next one, already launched when this one is read, may
        have.
        """
        return format_by_rank(self._of_all_ranks(index, backward), suspected_ranks)

    def overflow(self, index: StepIndex, backward: bool) -> Finding | None:
        """The first module that made values that are not finite from finite ones, in the step just read.

        `backward`: the first that made such a gradient, and does not compute in fp32. None where the batch, a
        weight or the loss itself was not finite. The same on all ranks: that of the rank which has the
        earliest. A collective.
        """
        first = min(self._of_all_ranks(index, backward))
        return first if first.module else None

    def _of_all_ranks(self, index: StepIndex, backward: bool) -> list[Finding]:
        """What each rank found, in rank order, on all ranks. A collective."""
        try:
            own = self._inspect(index, backward)
        except Exception as error:  # after any error, because the other ranks wait in the exchange below
            # After what other ranks have found, but before those that found nothing, so that it is shown.
            own = Finding(NOT_FOUND - 1, f"the batch could not be run again: {described(error)}")
        texts = all_gather_str(self._context.env, json.dumps(asdict(own)))
        return [Finding(**json.loads(text)) for text in texts]

    def _inspect(self, index: StepIndex, backward: bool) -> Finding:
        """Run all of this rank's micro-batches again, so that collectives within modules match."""
        batches = self._context.batches
        micro_batches = batches.step(index.epoch, index.batch_idx)
        found: list[Finding] = []
        by_batch = zip(micro_batches, batches.latest_indices(), strict=True)
        for number, (batch, indices) in enumerate(by_batch):
            forward, loss_finite = self._run(batch, index, number)
            back = self._gradient_overflow(batch, index, number) if backward else None
            arithmetic = self._stepper.policy.arithmetic
            found.append(evidence_of(forward, loss_finite, number, batch, indices, arithmetic, back))
        return min(found, default=Finding(NOT_FOUND, "no samples"))

    def _run(self, batch: Batch, index: StepIndex, number: int) -> tuple[ModuleFinding | None, bool]:
        """One micro-batch through the model, in training mode; and whether its loss is finite."""
        self._seed(index, number)
        losses: list[Tensor] = []
        found = nonfinite.diagnose(self._stepper.model, lambda: losses.append(self._loss_sum(batch)))
        return found, bool(losses[0].isfinite())

    def _gradient_overflow(self, batch: Batch, index: StepIndex, number: int) -> Finding | None:
        """The first module at which the gradient of a micro-batch is not finite, of those not in fp32."""
        self._seed(index, number)
        stepper = self._stepper
        found = nonfinite.diagnose_backward(
            stepper.model, lambda: stepper.dry_backward(self._loss_sum(batch))
        )
        for place, module in (("input", found.origin), ("output", found.source)):
            if module is not None and module.name and module.name not in stepper.fp32_modules:
                text = (
                    f"first gradient that was not finite: at the {place} of {module.name} ({module.type}), "
                    f"{module.kind}"
                )
                return Finding((number << 32) + AFTER_FORWARD + module.position, text, module=module.name)
        return None

    def _seed(self, index: StepIndex, number: int) -> None:
        plan = self._context.batches.plan
        seed_compute(plan.seed, index.global_step, plan.rank, number, self._stepper.device)

    def _loss_sum(self, batch: Batch) -> Tensor:
        with self._stepper.forward():
            return self._context.recipe.loss(self._stepper.model, batch).sum


def evidence_of(
    finding: ModuleFinding | None,
    loss_finite: bool,
    number: int,
    batch: Batch,
    indices: Sequence[int],
    arithmetic: torch.dtype = torch.float32,
    back: Finding | None = None,
) -> Finding:
    """The evidence in micro-batch `number`, which holds the training samples `indices`.

    `finding` is what its forward pass has shown, `back` its backward pass; `arithmetic` is the dtype in which
    the model computes. By micro-batch first, then by position in its pass, which is below 2^32.
    """
    columns = {name: rows for name, column in batch.items() if (rows := nonfinite_rows(column))}
    rows = sorted({row for rows in columns.values() for row in rows})
    samples = samples_text([indices[row] for row in rows], indices)
    parts = [f"not finite in the batch itself: {name}" for name in columns]
    if loss_finite:  # what a module gave or a column has, such as the -inf of a mask, did the loss no harm
        back = back or Finding(NOT_FOUND, "what is not finite arises in the backward pass")
        parts += ["the forward pass is finite", back.text]
        return replace(back, text="; ".join(parts), samples=samples)
    parts += [beyond(name, column, arithmetic) for name, column in batch.items() if name not in columns]
    position, module = AFTER_FORWARD, ""
    if finding is None:
        parts.append("every module's output was finite, the loss was not")
    else:
        parts.append(module_text(finding))
        position = finding.position
        module = finding.name if finding.inputs_finite and not columns else ""
    position = 0 if columns else position
    return Finding((number << 32) + position, "; ".join(filter(None, parts)), samples, module)


def beyond(name: str, column: Tensor, arithmetic: torch.dtype) -> str:
    """What to do about a column whose values the arithmetic cannot hold; "" where it holds them."""
    limit = torch.finfo(arithmetic).max
    if not column.is_floating_point() or not column.numel() or (size := float(column.abs().max())) <= limit:
        return ""
    kind = str(arithmetic).removeprefix("torch.")
    return (
        f"the column {name} has values up to {size:.3g}, and {kind} ends at {limit:.5g}: normalise it first"
    )


def module_text(finding: ModuleFinding) -> str:
    name = finding.name or "the model itself"
    text = f"first module whose output was not finite: {name} ({finding.type}), {finding.kind}"
    if not finding.inputs_finite:
        return f"{text}, which was given values that are not finite"
    return f"{text}, from inputs of at most {finding.largest_input:.4g}"


def samples_text(suspects: Sequence[int], indices: Sequence[int]) -> str:
    """The samples at fault if they can be distinguished, else all of the micro-batch."""
    chosen = suspects or indices
    numbers = listed(chosen, MAX_SAMPLES)
    if suspects:
        return f"training sample {numbers} (of {len(indices)} in the micro-batch)"
    return f"micro-batch of {counted(len(indices), 'training sample')} {numbers}"


def format_by_rank(found: Sequence[Finding], suspected_ranks: Sequence[int]) -> str:
    """A line per rank that found something, the earliest first; if none did, the suspected ranks."""
    chosen = [rank for rank, evidence in enumerate(found) if evidence.order < NOT_FOUND]
    chosen = sorted(chosen, key=found.__getitem__) or list(suspected_ranks) or [0]
    texts = ["; ".join(filter(None, (each.samples, each.text))) for each in found]
    lines = [f"  rank {rank}: {texts[rank]}" for rank in chosen[:MAX_RANKS]]
    if len(chosen) > MAX_RANKS:
        lines.append(f"  and {counted(len(chosen) - MAX_RANKS, 'more rank')}")
    return "\n".join(["The batch of that step, run again:", *lines])


def nonfinite_rows(column: Tensor) -> list[int]:
    """The samples of a floating-point column that hold inf or nan."""
    if not column.is_floating_point() or not column.numel():
        return []
    return (~column.isfinite().reshape(len(column), -1).all(1)).nonzero().flatten().tolist()
