"""Recorded steps with their collectives: the bits of ordinary ones on every wire; one verdict on reads."""

from __future__ import annotations

import pytest
import torch

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, HostRead, NoMemory, Policy, Scaling, StepGraph, Stepper, Wire
from tests.engine.test_step_graph import bits
from tests.models import features, loss_sum, mlp
from tests.ranks.harness import run_ranks
from tests.recording import Again, Tape

# Two ranks on CPUs exchange fp32 sums in single messages, whose end the stand-in does not await;
# devices that record, and three ranks, exchange them all to all.
WIRES = (2, (Wire(bucket_bytes=64), Wire(shard=True))), (3, (Wire(sum="fp32"),))


def trained(env: WorkerEnv, wire: Wire, recorder: Tape) -> list[bytes]:

    stepper = Stepper(
        mlp(),
        SGD(0.1, 0.9),
        Policy.fp16(),
        env.group,
        wire=wire,
        scaling=Scaling(init=2**24, growth_interval=3),
        learning_rates=[0.1, 0.05, 0.02],
        capturable=True,
    )
    x, classes = features(8, 99)

    def passes() -> None:
        with stepper.forward():
            loss = loss_sum(stepper.model(x), classes)
        stepper.backward(loss, len(classes))

    graph = StepGraph(stepper, recorder)
    graph.record(passes)
    for step in range(5):
        for place, values in zip((x, classes), features(8, 10 * step + env.rank), strict=True):
            place.copy_(values)
        graph.replay()
    return bits(stepper.tensors())


def same_bits(env: WorkerEnv, wires: tuple[Wire, ...]) -> list[bool]:
    return [trained(env, wire, Tape()) == trained(env, wire, Again()) for wire in wires]


@pytest.mark.parametrize(("world_size", "wires"), [WIRES[0], pytest.param(*WIRES[1], marks=pytest.mark.slow)])
def test_recorded_collectives_give_the_bits_of_ordinary_steps(world_size, wires) -> None:
    assert run_ranks(world_size, same_bits, wires) == [[True] * len(wires)] * world_size


def reads_on_rank_1(env: WorkerEnv) -> tuple[str, bool]:

    stepper = Stepper(mlp(), SGD(0.1), Policy.fp32(), env.group, capturable=True)
    x, classes = features(8, env.rank)

    def passes() -> None:
        if env.rank == 1:
            float(x.sum())
        stepper.backward(loss_sum(stepper.model(x), classes), len(classes))

    before = bits(stepper.tensors())
    try:
        StepGraph(stepper, Tape()).record(passes)
    except HostRead as error:
        return str(error), bits(stepper.tensors()) == before
    return "", False


def lacks_memory_on_rank_1(env: WorkerEnv, call: int) -> tuple[str, bool]:

    stepper = Stepper(mlp(), SGD(0.1), Policy.fp32(), env.group, capturable=True)
    x, classes = features(8, env.rank)
    calls: list[int] = []

    def passes() -> None:
        calls.append(1)
        stepper.backward(loss_sum(stepper.model(x), classes), len(classes))
        if env.rank == 1 and len(calls) == call:
            raise torch.OutOfMemoryError("no room")

    graph = StepGraph(stepper, Tape())
    try:
        graph.record(passes)
    except NoMemory as error:
        graph.record(passes)
        graph.replay()
        return str(error), stepper.counters()["applied"] == 1
    return "", False


@pytest.mark.parametrize("call", [2, 4])  # the fifth is recorded: on a GPU nothing is sent then
def test_where_memory_runs_out_on_one_rank_none_records_and_all_may_try_again(call) -> None:
    assert run_ranks(2, lacks_memory_on_rank_1, call) == [
        ("memory ran out on another rank", True),
        ("no room", True),
    ]


def test_a_read_on_one_rank_is_refused_on_all() -> None:
    (other, same), (own, also_same) = run_ranks(2, reads_on_rank_1)
    assert other == "another rank waits for the device"
    assert "_local_scalar_dense" in own
    assert same
    assert also_same
