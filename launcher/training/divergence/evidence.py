"""What a rank found in the batch that ended a run: as text, ordered by position in the pass, on all ranks.

Owns the texts, and the message of fixed size in which the ranks exchange them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.data.tensors import Batch
from launcher.distributed.collectives import gather
from launcher.engine.diagnostics.nonfinite import BackwardDiagnosis, Diagnosis, ModuleFinding
from launcher.errors import listed

MESSAGE_BYTES = 1024  # per rank, fixed: a collective needs equal sizes
ORDER_BYTES = 8
NOTHING = 2 ** (8 * ORDER_BYTES) - 1  # the order of a rank that found nothing: after all others
AFTER_FORWARD = 2**31  # the position of what appears only in the loss or the backward pass
MAX_SAMPLES = 8
MAX_NAMES = 5
MAX_RANKS = 4


@dataclass(frozen=True)
class Evidence:
    """What one rank found; the smallest `order` came first in the pass."""

    order: int
    text: str


@dataclass(frozen=True)
class Overflow:
    """The module in which a batch left the finite numbers, by name, and a text about it."""

    module: str
    text: str


def evidence_of(
    diagnosis: Diagnosis,
    loss_finite: bool,
    back: BackwardDiagnosis | None,
    number: int,
    batch: Batch,
    indices: Sequence[int],
) -> Evidence:
    """The evidence in micro-batch `number`, which holds the training samples `indices`."""
    finding = diagnosis.finding
    columns = {name: rows for name, column in batch.items() if (rows := nonfinite_rows(column))}
    if finding is None and loss_finite and not columns:
        seen = back is not None and (back.module is not None or bool(back.parameters))
        parts = [samples_text((), indices), finite_text(diagnosis), backward_text(back)]
        return Evidence((number << 32) + AFTER_FORWARD if seen else NOTHING, "; ".join(parts))
    suspects = sorted({row for rows in columns.values() for row in rows})
    if not suspects and finding is not None and finding.num_rows == len(indices) != len(finding.rows):
        suspects = list(finding.rows)
    parts = [samples_text([indices[row] for row in suspects], indices)]
    parts += [f"not finite in the batch itself: {name}" for name in columns]
    if finding is not None:
        parts.append(module_text(finding))
    elif not loss_finite:
        parts.append("every module's output was finite, the loss was not")
    if diagnosis.parameters:
        parts.append(f"weights not finite: {listed(diagnosis.parameters, MAX_NAMES)}")
    position = 0 if columns else finding.position if finding is not None else AFTER_FORWARD
    # By micro-batch first, then by position in its pass, which is below 2^32.
    return Evidence((number << 32) + position, "; ".join(parts))


def finite_text(diagnosis: Diagnosis) -> str:
    if diagnosis.largest is None:
        return "the forward pass is finite"
    name, size = diagnosis.largest
    return f"the forward pass is finite, its largest value {size:.3g} from {_called(name)}"


def backward_text(back: BackwardDiagnosis | None) -> str:
    """Where the gradient left the range of the arithmetic, or how close it came."""
    if back is None:
        return "what is not finite arises in the backward pass"
    if back.module is not None:
        name, kind, value = back.module
        parts = [f"first gradient that was not finite: at the output of {_called(name)} ({kind}), {value}"]
    elif back.parameters:
        names = listed(back.parameters, MAX_NAMES)
        parts = [f"gradients not finite: {names}, though those at all outputs were"]
    else:
        parts = ["all gradients are finite: it is their sum over micro-batches and ranks that is not"]
    if back.largest is not None:
        name, size = back.largest
        before = "before it " if back.module else ""
        parts.append(f"the largest {before}{size:.3g} at the output of {_called(name)}")
    return ", ".join(parts)


def module_text(finding: ModuleFinding) -> str:
    name = _called(finding.name)
    text = f"first module whose output was not finite: {name} ({finding.type}), {finding.kind}"
    if not finding.inputs_finite:
        return f"{text}, which was given values that are not finite"
    if finding.input_range is None:
        return text
    low, high = finding.input_range
    return f"{text}, from inputs between {low:.4g} and {high:.4g}"


def samples_text(suspects: Sequence[int], indices: Sequence[int]) -> str:
    """The samples at fault if they can be distinguished, else all of the micro-batch."""
    chosen = suspects or indices
    numbers = listed(chosen, MAX_SAMPLES)
    if suspects:
        return f"training sample {numbers} (of {len(indices)} in the micro-batch)"
    return f"micro-batch of {len(indices)} training samples {numbers}"


def told_by_rank(found: Sequence[Evidence], suspected_ranks: Sequence[int]) -> str:
    """A line per rank that found something, the earliest first; if none did, the suspected ranks."""
    chosen = [rank for rank, evidence in enumerate(found) if evidence.order < NOTHING]
    chosen = sorted(chosen, key=lambda rank: found[rank].order) or list(suspected_ranks) or [0]
    lines = [f"  rank {rank}: {found[rank].text}" for rank in chosen[:MAX_RANKS]]
    if len(chosen) > MAX_RANKS:
        lines.append(f"  and {len(chosen) - MAX_RANKS} more ranks")
    return "\n".join(["The batch of that step, run again:", *lines])


def exchange(own: Evidence, group: dist.ProcessGroup | None, device: torch.device) -> list[Evidence]:
    """What each rank found, in rank order, on all ranks. A collective."""
    return [unpack(each.cpu()) for each in gather(pack(own).to(device), group)]


def pack(evidence: Evidence) -> Tensor:
    """uint8 [MESSAGE_BYTES]: the order, then the text as far as it fits, then zeros."""
    text = evidence.text.encode(errors="backslashreplace")[: MESSAGE_BYTES - ORDER_BYTES]
    content = evidence.order.to_bytes(ORDER_BYTES, "big") + text
    return torch.tensor(list(content.ljust(MESSAGE_BYTES, b"\0")), dtype=torch.uint8)


def unpack(message: Tensor) -> Evidence:
    content = bytes(message.tolist())
    text = content[ORDER_BYTES:].rstrip(b"\0").decode(errors="ignore")  # the cut may split a letter
    return Evidence(int.from_bytes(content[:ORDER_BYTES], "big"), text)


def nonfinite_rows(column: Tensor) -> list[int]:
    """The samples of a floating-point column that hold inf or nan."""
    if not column.is_floating_point() or not column.numel():
        return []
    return (~column.isfinite().reshape(len(column), -1).all(1)).nonzero().flatten().tolist()


def master_text(master: Tensor, weight: torch.dtype) -> str:
    """A text about a master whose weight, of this dtype, is not finite."""
    if bool(master.isfinite().all()):
        return f"master {float(master.abs().max()):.3g}, beyond the {torch.finfo(weight).max:.4g} of {weight}"
    return "master nan" if bool(master.isnan().any()) else "master inf"


def _called(module: str) -> str:
    """A module by its name in named_modules()."""
    return module or "the model itself"
