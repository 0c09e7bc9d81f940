"""Digests of a run's weights, and the check that all ranks still hold the same bits.

Owns the comparison of the ranks' replicas: the loss scale and its counters, weights, masters, their average
and optimizer states. Compares integers (sums of bit patterns), so that no NaN and no rounding can hide a
difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.distributed.collectives import all_gather_str, gather
from launcher.distributed.env import RANK0, WorkerEnv
from launcher.engine import ExponentialMovingAverage, Stepper
from launcher.engine.async_work import all_reduce
from launcher.engine.names import named_buffers, named_parameters
from launcher.engine.precision.op_lists import widen
from launcher.errors import ReplicaError, listed

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
SHOWN = 5  # names in an error; more would bury the rest


def check_replicas(stepper: Stepper, average: ExponentialMovingAverage | None = None) -> None:
    """Raise ReplicaError, on all ranks, if any replica differs. A collective: all ranks call it.

    Buffers may differ: BatchNorm statistics are those of each rank's own samples, until an evaluation.
    """
    if stepper.group is None:
        return
    own = _checksums_of(stepper, average, by_parameter=False)[1]
    extremes = torch.cat([own, -own])
    all_reduce(extremes, stepper.group, dist.ReduceOp.MAX)
    largest, negated = torch.split(extremes, len(own))
    # Every rank sees the same extremes, so all of them continue here, or none does.
    if bool((largest != -negated).any()):
        _refuse_difference(*_checksums_of(stepper, average, by_parameter=True), stepper.group)


def _checksums_of(
    stepper: Stepper, average: ExponentialMovingAverage | None, by_parameter: bool
) -> tuple[list[str], Tensor]:
    """Names and sums of what must be equal. Of each parameter they are hundreds of operations on a GPU."""
    replicas = stepper.replicas(by_parameter)
    if average is not None:
        replicas |= average.replicas(by_parameter)
    return list(replicas), checksums(replicas)


def checksums(tensors: Mapping[str, Tensor]) -> Tensor:
    """int64 [tensors]: a sum of each tensor's bit patterns, modulo 2**64. Any one changed bit changes it.

    No hash: a sum is one kernel on the device, and a hash would copy all weights to the host at each check.
    """
    sums = [each.view(INTEGERS[each.element_size()]).sum(dtype=torch.int64) for each in tensors.values()]
    return torch.stack(sums)


def _refuse_difference(names: list[str], own: Tensor, group: dist.ProcessGroup) -> None:
    """Raise ReplicaError with the ranks that differ from the majority, and in what. A collective.

    Padding may differ, which is in no parameter.
    """
    table = torch.stack(gather(own, group)).cpu()  # [rank, tensor]
    usual = table.mode(dim=0).values
    odd = table != usual
    ranks = odd.any(dim=1).nonzero().flatten().tolist()
    if not ranks:
        return
    tensors = [names[index] for index in odd.any(dim=0).nonzero().flatten().tolist()]
    raise ReplicaError(
        f"the ranks no longer hold the same bits: rank(s) {', '.join(map(str, ranks))} differ from the "
        f"others in {len(tensors)} of {len(names)} tensors ({listed(tensors, SHOWN)}). With two ranks "
        "either may be the wrong one. Nothing computed since the last check can be trusted: look "
        "for a faulty device or for code that changes weights or the learning rate on one rank only, and "
        "start again."
    )


def weights_sha256(stepper: Stepper, env: WorkerEnv) -> str:
    """Digest of fp32 masters, frozen parameters and buffers in name order, little-endian bytes.

    A collective: all ranks get that of rank 0, where alone sharded masters are gathered.
    """
    weights = _frozen(stepper) | stepper.named_masters(RANK0)
    return _digest(weights | named_buffers(stepper.model), env)


def ema_sha256(stepper: Stepper, average: ExponentialMovingAverage, env: WorkerEnv) -> str:
    """Digest of averaged and frozen parameters, likewise. Without buffers, of which each rank has its own."""
    return _digest({**_frozen(stepper), **average.state(RANK0).weights}, env)


def _frozen(stepper: Stepper) -> dict[str, Tensor]:
    named = named_parameters(stepper.model).items()
    return {name: widen(p) for name, p in named if not p.requires_grad}


def _digest(tensors: Mapping[str, Tensor], env: WorkerEnv) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return all_gather_str(env, digest.hexdigest())[RANK0]
