"""Digests of a run's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from launcher.distributed.collectives import exchange_texts
from launcher.distributed.env import LEADER, WorkerEnv
from launcher.engine import Stepper, WeightAverage
from launcher.engine.flat.names import named_buffers, named_parameters


def weights_sha256(stepper: Stepper, env: WorkerEnv) -> str:
    """Digest of fp32 masters, frozen parameters and buffers in name order, little-endian bytes.

    A collective: all ranks get that of the leader, where alone sharded masters are gathered.
    """
    weights = _frozen(stepper) | stepper.named_masters(LEADER)
    return _digest(weights | named_buffers(stepper.model), env)


def ema_sha256(stepper: Stepper, average: WeightAverage, env: WorkerEnv) -> str:
    """Digest of averaged and frozen parameters, likewise. Without buffers, of which each rank has its own."""
    return _digest(_frozen(stepper) | average.state(LEADER).weights, env)


def _frozen(stepper: Stepper) -> dict[str, Tensor]:
    return {name: p.float() for name, p in named_parameters(stepper.model).items() if not p.requires_grad}


def _digest(tensors: Mapping[str, Tensor], env: WorkerEnv) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return exchange_texts(env, digest.hexdigest())[LEADER]
