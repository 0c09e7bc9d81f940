"""One rank of the benchmark of links: trains a network of 4.2 M parameters on all sides of the comparison.

Started by links.py within a network namespace. Counts bytes and collectives without a limit of the link, and
times steps under limits that each rank sets on its own interface. Rank 0 writes what all ranks have found.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.distributed.collectives import all_gather_str
from launcher.distributed.env import WorkerEnv
from launcher.engine import DDPOptions
from launcher.os.allocator import tune_malloc
from launcher.os.lifetime import die_with_parent
from scripts.bench.baselines import Batch, Setup, Step, ddp, ddp_with_hook, refuse_disagreement
from scripts.bench.interleaved import Times, interleave
from scripts.bench.network import bytes_sent, limit_own_link
from scripts.bench.ours import ours, stepper_for

HALF = torch.float16
SETUP = Setup("sgd", half=False, init_scale=2**10)
UNSCALED = replace(SETUP, scaled=False)
BARE_HOOK = "ddp + hook without GradScaler"
TUNED_MB = (1, 2, 4)  # buckets of DistributedDataParallel besides its default of 25
# By side, the wire of ours. All but the first run the launcher's default policy, fp16 emulated.
OURS = {
    "ours, fp32 arithmetic": DDPOptions(gradient_dtype=HALF),
    "ours": DDPOptions(),
    "ours, shard": DDPOptions(shard_optimizer=True),
}
# By side of ours: the policy of the same step without a wire.
ARITHMETIC = {"ours, fp32 arithmetic": "fp32", "ours": "fp16"}
BUCKETS_MB = (0.25, 0.5, 1, 2, 4, 8, 16)  # of ours, beside the size that it chooses
AUTO = "from the model's size"
CHECKED_STEPS, TOLERANCE = 10, 0.01


class Residual(nn.Module):
    """Without residuals so deep a network overshoots, and losses could not be compared."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.add(inputs, F.relu(self.linear(inputs)), alpha=0.25)


@dataclass(frozen=True)
class Plan:
    """What the ranks do. Without rates they count bytes and collectives, with rates they time steps.

    `buckets`: they time ours with buckets of several sizes, and not the peers.
    """

    layers: int = 16
    width: int = 512
    batch: int = 256
    mbits: tuple[int, ...] = ()
    repeats: int = 8
    buckets: bool = False
    steps: int = 4  # over which bytes are counted

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def over(self, mbits: Sequence[int], repeats: int) -> Plan:
        return replace(self, mbits=tuple(mbits), repeats=repeats)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model().parameters())

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        layers = (Residual(self.width) for _ in range(self.layers))
        return nn.Sequential(*layers, nn.Linear(self.width, 10))

    def batch_of(self, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(rank)
        inputs = torch.randn(self.batch, self.width, generator=generator)
        return inputs, torch.randint(10, (self.batch,), generator=generator)


def steps_of_ours(model: nn.Module) -> dict[str, Step]:
    """By side, each with a model of its own."""
    found = {}
    for name, options in OURS.items():
        policy = "fp32" if options.gradient_dtype is HALF else "fp16"
        emulate = None if policy == "fp32" else True
        found[name] = ours(copy.deepcopy(model), SETUP, policy, ddp=options, emulate=emulate)
    return found


def peers_of(model: nn.Module, tuned_mb: tuple[int, ...]) -> dict[str, Step]:
    """DistributedDataParallel in fp32 as it comes, with the hook and the GradScaler that fp16 needs, and with
    the hook alone, whose small gradients become zero and whose overflows are applied.
    """
    kinds = [
        ("ddp", ddp, UNSCALED),
        ("ddp + hook", ddp_with_hook, SETUP),
        (BARE_HOOK, ddp_with_hook, UNSCALED),
    ]
    found = {}
    for name, build, setup in kinds:
        found[name] = build(copy.deepcopy(model), setup)
        for bucket_mb in tuned_mb:
            tuned = replace(setup, bucket_mb=bucket_mb)
            found[f"{name}, {bucket_mb} MB"] = build(copy.deepcopy(model), tuned)
    return found


class Alone:
    """A step that sends nothing, in three timed parts."""

    def __init__(self) -> None:
        self.parts: list[tuple[float, float, float]] = []  # seconds of forward, backward, update

    def step(self, batch: Batch) -> None:
        inputs, labels = batch
        marks = [time.perf_counter()]
        loss = self._forward(inputs, labels)
        marks.append(time.perf_counter())
        self._backward(loss, len(labels))
        marks.append(time.perf_counter())
        self._update()
        marks.append(time.perf_counter())
        self.parts.append((marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]))

    def _forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError

    def _backward(self, loss: Tensor, count: int) -> None:
        raise NotImplementedError

    def _update(self) -> None:
        raise NotImplementedError


class OursAlone(Alone):
    """Our step as a rank of several whose messages go nowhere, which `plan` measures."""

    def __init__(self, model: nn.Module, policy: str, group: dist.ProcessGroup) -> None:
        super().__init__()
        name = next(name for name, kind in ARITHMETIC.items() if kind == policy)
        emulate = None if policy == "fp32" else True
        self._stepper = stepper_for(model, SETUP, policy, group=group, emulate=emulate, ddp=OURS[name])

    def _forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        with self._stepper.forward():
            return F.cross_entropy(self._stepper.model(inputs).float(), labels, reduction="sum")

    def _backward(self, loss: Tensor, count: int) -> None:
        self._stepper.backward(loss, count)

    def _update(self) -> None:
        self._stepper.step()


class TorchAlone(Alone):
    """The least that one rank does: forward, backward and fused optimizer of torch, in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model, self._optimizer = model, UNSCALED.fused(model)

    def _forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        return F.cross_entropy(self._model(inputs), labels)

    def _backward(self, loss: Tensor, count: int) -> None:
        loss.backward()

    def _update(self) -> None:
        self._optimizer.step()


def checked(sides: Mapping[str, Step], batch: Batch) -> dict[str, list[float]]:
    """The losses of the first steps, which must be the same on all sides within the precision."""
    losses = {name: [float(step(batch)) for _ in range(CHECKED_STEPS)] for name, step in sides.items()}
    refuse_disagreement(losses, TOLERANCE)
    return losses


class BeyondBuckets(TorchDispatchMode):
    """Counts the collectives of a step that send neither gradients nor weights: only theirs are fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.count += any(tensor.dtype == torch.float64 for tensor in tensors_in(args))
        return func(*args, **(kwargs or {}))


def tensors_in(arguments: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def count(plan: Plan, batch: Batch) -> dict[str, Any]:
    """Bytes that this rank's interface sends per parameter and step, by side, and collectives of ours."""
    model = plan.model()
    own = steps_of_ours(model)
    sides = own | peers_of(model, ())
    checked(sides, batch)
    sent, collectives = {}, {}
    for name, step in sides.items():
        dist.barrier()
        before = bytes_sent()
        for _ in range(plan.steps):
            step(batch)
        dist.barrier()  # some 100 bytes
        sent[name] = (bytes_sent() - before) / plan.steps / plan.num_parameters
    for name, step in own.items():
        with BeyondBuckets() as beyond:
            step(batch)
        collectives[name] = beyond.count
    return {"bytes_per_parameter": sent, "collectives_beyond": collectives}


def timed(plan: Plan, batch: Batch) -> dict[str, Any]:
    """Seconds of steps by rate and side, of the parts of steps alone by rate, and of ours without a limit."""
    model = plan.model()
    nowhere = dist.new_group([*range(dist.get_world_size())], backend="fake")
    assert isinstance(nowhere, dist.ProcessGroup)
    alone: dict[str, Alone] = {
        kind: OursAlone(copy.deepcopy(model), kind, nowhere) for kind in ARITHMETIC.values()
    }
    alone["torch"] = TorchAlone(copy.deepcopy(model))
    sides = steps_of_ours(model) | peers_of(model, TUNED_MB)
    losses = checked(sides, batch)
    calls: dict[str, Callable[[], object]] = {name: partial(step, batch) for name, step in sides.items()}
    calls |= {f"alone, {name}": partial(each.step, batch) for name, each in alone.items()}
    # All sides, so that they have taken equally many steps when their losses are compared.
    unlimited = interleave(calls, plan.repeats, warm_up=1, before=dist.barrier)
    buckets = stepper_for(copy.deepcopy(model), SETUP, emulate=True).num_buckets
    found: dict[str, Any] = {}
    for mbit in plan.mbits:
        dist.barrier()
        limit_own_link(mbit)
        times: Times = interleave(calls, plan.repeats, warm_up=1, before=dist.barrier)
        parts = {name: each.parts[-plan.repeats :] for name, each in alone.items()}
        found[str(mbit)] = {"times": times, "alone": parts, "unlimited": unlimited, "num_buckets": buckets}
    limit_own_link(None)
    ends = {name: [*losses[name], float(step(batch))] for name, step in sides.items()}
    refuse_disagreement(ends, TOLERANCE)
    return found


def timed_buckets(plan: Plan, batch: Batch) -> dict[str, Any]:
    """Seconds of steps by rate and size of the buckets."""
    model = plan.model()
    sides: dict[str, Step] = {}
    for mb in BUCKETS_MB:
        ddp = DDPOptions(bucket_bytes=int(mb * 2**20))
        sides[f"{mb} MB"] = ours(copy.deepcopy(model), SETUP, ddp=ddp, emulate=True)
    sides[AUTO] = ours(copy.deepcopy(model), SETUP, emulate=True)
    checked(sides, batch)
    calls = {name: partial(step, batch) for name, step in sides.items()}
    found: dict[str, Any] = {}
    for mbit in plan.mbits:
        dist.barrier()
        limit_own_link(mbit)
        found[str(mbit)] = {"times": interleave(calls, plan.repeats, warm_up=1, before=dist.barrier)}
    limit_own_link(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=json.loads)
    parser.add_argument("result", type=Path, help="where rank 0 writes what the ranks have found")
    arguments = parser.parse_args()
    plan = Plan(**{**arguments.plan, "mbits": tuple(arguments.plan["mbits"])})
    die_with_parent(os.getppid())  # not to keep the namespaces of a killed parent
    torch.set_num_threads(1)
    tune_malloc()
    dist.init_process_group("gloo")
    try:
        batch = plan.batch_of(dist.get_rank())
        measure = timed_buckets if plan.buckets else timed if plan.mbits else count
        own = measure(plan, batch)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        env = WorkerEnv(rank, world_size, rank, world_size, torch.device("cpu"), dist.group.WORLD)
        by_rank = [json.loads(text) for text in all_gather_str(env, json.dumps(own))]
        if rank == 0:
            arguments.result.write_text(json.dumps(by_rank))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
