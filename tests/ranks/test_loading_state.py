"""A Stepper that loads a state ends with the bits of an uninterrupted run."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.distributed.collectives import broadcast_tensors
from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, DDPOptions, Policy, Scaling, Stepper, TorchOptimizer
from launcher.engine.state import EngineState
from tests.engine.observe import flat_tensors, state_digest, train
from tests.models import conv_net
from tests.ranks.harness import run_ranks

STEPS = 12
OVERFLOWS = {2, 3, 7}  # steps with an inf in rank 0's input gradient: the scale moves, the step is skipped
OPTIMIZERS = {
    "sgd": SGD(0.1, 0.9, True, 1e-3),
    "adamw": AdamW(0.01),
    "adam of torch": TorchOptimizer(torch.optim.Adam, 0.01),
}
SCALING = Scaling(growth_interval=3, hysteresis=2, init=1024)  # moves often, so that its counters matter


def stepper_of(env: WorkerEnv, optimizer, policy: Policy, ddp: DDPOptions | None = None) -> Stepper:
    rates = [0.1 / (1 + step) for step in range(STEPS)]
    return Stepper(
        conv_net(seed=env.rank),
        optimizer,
        policy,
        env.group,
        scaling=SCALING if policy.arithmetic == torch.float16 else None,
        ddp=ddp,
        learning_rates=rates,
        reference_count=4,
    )


def run(env: WorkerEnv, stepper: Stepper, start: int, stop: int) -> None:
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(100 * step + env.rank)
        x = torch.randn(4, 3, 8, 8, generator=generator)
        hook = None
        if step in OVERFLOWS and env.rank == 0:
            hook = stepper.model[0].weight.register_hook(lambda g: torch.full_like(g, float("inf")))
        train(stepper, x, torch.randint(3, (4,), generator=generator))
        if hook is not None:
            hook.remove()


def resume_everywhere(
    env: WorkerEnv, optimizer, policy: Policy, ddp: DDPOptions | None
) -> tuple[str, list[str]]:
    """The digest of the undisturbed run, and those of runs stopped after each number of steps."""

    def stopped(stop: int) -> EngineState:
        stepper = stepper_of(env, optimizer, policy, ddp)
        run(env, stepper, 0, stop)
        return stepper.state().clone()

    def undisturbed() -> str:
        stepper = stepper_of(env, optimizer, policy, ddp)
        run(env, stepper, 0, STEPS)
        return state_digest(stepper, counters=True)

    def resumed(start: int) -> str:
        state = stopped(start)
        stepper = stepper_of(env, optimizer, policy, ddp)  # alone in its group: two that live do not overlap
        stepper.load(state)
        run(env, stepper, start, STEPS)
        return state_digest(stepper, counters=True)

    return undisturbed(), [resumed(start) for start in range(STEPS)]


SLOW = pytest.mark.slow
FP16, FP32 = Policy.fp16(), Policy.fp32()


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("adamw", FP16),
        *(pytest.param(name, FP16, marks=SLOW) for name in OPTIMIZERS if name != "adamw"),
        *(pytest.param(name, FP32, marks=SLOW) for name in OPTIMIZERS),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_resume_at_every_step_equals_the_undisturbed_run(name, policy) -> None:
    for undisturbed, resumed in run_ranks(2, resume_everywhere, OPTIMIZERS[name], policy, None):
        assert resumed == [undisturbed] * STEPS


@pytest.mark.slow
def test_resume_with_a_sharded_optimizer() -> None:
    ddp = DDPOptions(shard_optimizer=True)
    for undisturbed, resumed in run_ranks(2, resume_everywhere, AdamW(0.01), Policy.fp16(), ddp):
        assert resumed == [undisturbed] * STEPS


LEFT_OUT: dict[str, Callable[[EngineState, EngineState], EngineState]] = {
    "weights": lambda old, new: replace(old, weights=new.weights),
    "optimizer": lambda old, new: replace(old, optimizer=new.optimizer),
    "buffers": lambda old, new: replace(old, buffers=new.buffers),
    **{
        name: lambda old, new, name=name: replace(old, counters={**old.counters, name: new.counters[name]})
        for name in ("exponent", "growth_tracker", "hysteresis_tracker", "applied_steps", "skipped_steps")
    },
}


@pytest.mark.parametrize("part", LEFT_OUT)
def test_leaving_any_part_out_is_noticed(part) -> None:
    """With that part as in a fresh stepper, the resumed run ends elsewhere."""
    stop = (
        3 if part == "hysteresis_tracker" else 5
    )  # between two overflows, or in the middle of a count of clean steps
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    digests = []
    for change in (lambda old, new: old, LEFT_OUT[part]):
        first = stepper_of(env, AdamW(0.01), Policy.fp16())
        run(env, first, 0, stop)
        second = stepper_of(env, AdamW(0.01), Policy.fp16())
        second.load(change(first.state().clone(), second.state().clone()))
        run(env, second, stop, STEPS)
        digests.append(state_digest(second, counters=True))
    assert digests[0] != digests[1]


def save_on_ranks(env: WorkerEnv, ddp: DDPOptions | None) -> EngineState:
    stepper = stepper_of(env, AdamW(0.01), Policy.fp16(), ddp)
    run(env, stepper, 0, 5)
    return stepper.state().clone()


def load_on_ranks(env: WorkerEnv, ddp: DDPOptions | None, state: EngineState) -> bool:
    stepper = stepper_of(env, AdamW(0.01), Policy.fp16(), ddp)
    stepper.load(state)
    again = stepper.state()
    kinds = (
        (again.weights, state.weights),
        (again.optimizer, state.optimizer),
        (again.buffers, state.buffers),
    )
    equal = all(torch.equal(mine[name], theirs[name]) for mine, theirs in kinds for name in theirs)
    return equal and again.counters == state.counters and all(len(a) == len(b) for a, b in kinds)


@pytest.mark.parametrize(
    ("before", "after", "sharded"),
    [
        (2, 3, (True, False)),
        *(
            pytest.param(before, after, sharded, marks=SLOW)
            for before, after in [(2, 3), (3, 1), (1, 4)]
            for sharded in [(True, False), (False, True)]
            if (before, sharded) != (2, (True, False))
        ),
    ],
)
def test_a_state_fits_another_number_of_ranks_and_another_wire(before, after, sharded) -> None:
    old, new = (DDPOptions(shard_optimizer=shard) for shard in sharded)
    (state, *_) = run_ranks(before, save_on_ranks, old)
    assert all(run_ranks(after, load_on_ranks, new, state))


def save_to_file(env: WorkerEnv, ddp: DDPOptions | None, folder: Path) -> None:
    stepper = stepper_of(env, AdamW(0.01), Policy.fp16(), ddp)
    run(env, stepper, 0, 5)
    values = stepper.state_dict()  # a collective where it is sharded
    if env.rank == 0:
        torch.save(values, folder / "state.pt")


def load_from_file(env: WorkerEnv, ddp: DDPOptions | None, folder: Path) -> bool:
    """Whether the state that is loaded is what the file holds."""
    saved = torch.load(folder / "state.pt", weights_only=True)
    stepper = stepper_of(env, AdamW(0.01), Policy.fp16(), ddp)
    stepper.load_state_dict(saved)
    again, kept = flat_tensors(stepper.state()), flat_tensors(EngineState(**saved))
    return again.keys() == kept.keys() and all(torch.equal(again[key], kept[key]) for key in kept)


@pytest.mark.parametrize(
    ("before", "after", "sharded"),
    [
        pytest.param(2, 3, (True, True), marks=SLOW),
        pytest.param(2, 2, (True, False), marks=SLOW),
        (1, 2, (False, True)),
    ],
)
def test_files_of_an_own_loop_fit_another_number_of_ranks(tmp_path: Path, before, after, sharded) -> None:
    run_ranks(before, save_to_file, DDPOptions(shard_optimizer=sharded[0]), tmp_path)
    assert all(run_ranks(after, load_from_file, DDPOptions(shard_optimizer=sharded[1]), tmp_path))


def test_the_state_of_another_model_is_refused_before_anything_changes() -> None:
    stepper = Stepper(conv_net(), AdamW(0.01))
    other = Stepper(torch.nn.Linear(3, 3), AdamW(0.01)).state()
    before = state_digest(stepper)
    with pytest.raises(
        ValueError, match=r"of the weights, 8 are missing .* 2 are not known here \(bias, weight\)"
    ):
        stepper.load(other)
    with pytest.raises(ValueError, match="of the optimizer states"):
        stepper.load(replace(Stepper(conv_net(), SGD(0.1, 0.9)).state()))
    assert state_digest(stepper) == before


TENSOR_BYTES = 40 << 20  # above 32 MiB the C library returns what is freed to the system at once


def memory_to_load(env: WorkerEnv, sharded: bool) -> tuple[int, list[float]]:
    """How far the memory of this rank grows while it takes the state of rank 0, and what it has then."""
    layers = [torch.nn.Linear(2048, TENSOR_BYTES // 4 // 2048, bias=False) for _ in range(4)]
    ddp = DDPOptions(shard_optimizer=sharded)
    stepper = Stepper(torch.nn.Sequential(*layers), SGD(0.1, 0.9), Policy.named("fp32"), env.group, ddp=ddp)
    forms = stepper.zero1.forms
    states = [f"{state}/{name}" for state in stepper.updater.optimizer.states for name in forms]
    sent = {}
    for part, names in {"weights": [*forms], "optimizer": states}.items():
        values = enumerate(names) if env.is_rank0 else ()
        own = {name: torch.full(forms[name.rpartition("/")[2]][0], float(value)) for value, name in values}
        sent[part] = broadcast_tensors(env, own)
    for tensor in stepper.updater.tensors():
        tensor.fill_(-1)  # memory that was never written to is no memory yet
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stepper.load(EngineState(**sent, buffers={}, counters=stepper.counters()))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    state = stepper.state()
    return grown * 1024, [float(each.mean()) for each in (*state.weights.values(), *state.optimizer.values())]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_takes_the_state_of_rank_0_tensor_by_tensor(sharded: bool) -> None:
    """8 tensors of 40 MiB, of which no rank has more than one at a time beside its own state."""
    (_, there), (grown, here) = run_ranks(2, memory_to_load, sharded)
    assert there == here == [*range(4), *range(4)]
    gathered = 4 if sharded else 0  # Gloo keeps the weights that it has gathered for a second
    assert grown < (4 + gathered) * TENSOR_BYTES
