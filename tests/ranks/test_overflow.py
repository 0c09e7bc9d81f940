"""One value that is not finite, anywhere, on any rank: all ranks skip alike and nothing else changes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, DDPOptions, Policy, Scaling, Stepper, StepReport
from tests.engine.observe import state_digest, train, weights_are_rounded_masters
from tests.models import conv_net, features, loss_sum
from tests.ranks.harness import run_ranks

Place = tuple[int, str, int, float]  # rank, parameter, element, value


def train_planted(env: WorkerEnv, stepper: Stepper, place: Place, seed: int) -> StepReport:
    """One step in which one rank's gradient of one parameter has one element replaced."""
    rank, name, element, value = place

    def plant(gradient: Tensor) -> Tensor:
        changed = gradient.clone(memory_format=torch.contiguous_format)
        changed.view(-1)[element] = value
        return changed

    hook = stepper.layout.parameters[name].register_hook(plant) if env.rank == rank else None
    try:
        return train(stepper, *features(4, seed + env.rank, (3, 8, 8)))
    finally:
        if hook is not None:
            hook.remove()


def first_middle_last(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def places(stepper: Stepper, world_size: int) -> list[Place]:
    """First, middle, last element of first, middle, last parameter, and each bucket's first parameter."""
    names = list(stepper.layout.parameters)
    thorough = {names[position] for position in first_middle_last(len(names))}
    in_buckets = {bucket.params[0].name for bucket in stepper.reducer.buckets}
    return [
        (rank, name, element, value)
        for rank in range(world_size)
        for name in sorted(thorough | in_buckets)
        for element in first_middle_last(stepper.layout.parameters[name].numel())
        for value in (float("inf"), float("-inf"), float("nan"))
        if name in thorough or (element == 0 and value != value)
    ]


def plant_everywhere(env: WorkerEnv, policy: Policy, optimizer: SGD | AdamW, overlap: bool) -> list[str]:
    """Problems found, on this rank; no places left untried."""
    model = conv_net()
    scaling = Scaling(init=2**10, growth_interval=1)  # every step moves it: an overflow down, a clean one up
    ddp = DDPOptions(bucket_bytes=64, overlap=overlap)
    stepper = Stepper(model, optimizer, policy, env.group, scaling=scaling, ddp=ddp, reference_count=4)
    assert len(stepper.reducer.buckets) >= 5
    train(stepper, *features(4, env.rank, (3, 8, 8)))
    problems = []
    tried = places(stepper, env.world_size)
    for number, place in enumerate(tried):
        before, applied = state_digest(stepper), int(stepper.scale.state.applied_steps)
        report = train_planted(env, stepper, place, seed=100 * number)
        exponent = stepper.counters()["exponent"]
        expected = (True, (place[0],), (place[1],), applied, 0)
        seen = (
            report.skipped,
            report.culprit_ranks,
            report.culprit_parameters,
            report.applied_steps,
            report.bad_losses,
        )
        if seen != expected:
            problems.append(f"{place}: {seen}")
        if state_digest(stepper) != before:
            problems.append(f"{place}: the state changed")
        if 2.0**exponent != report.scale / 2:
            problems.append(f"{place}: scale {report.scale} became 2^{exponent}")
        clean = train(stepper, *features(4, number + env.rank, (3, 8, 8)))
        if clean.skipped or state_digest(stepper) == before or not weights_are_rounded_masters(stepper):
            problems.append(f"{place}: the clean step after it was not applied")
    return problems if tried else ["nothing was tried"]


@pytest.mark.parametrize(
    ("world_size", "policy", "optimizer", "overlap"),
    [
        (2, Policy.fp16(), AdamW(1e-3), True),
        pytest.param(3, Policy.amp_fp16(), SGD(1e-2, momentum=0.9), False, marks=pytest.mark.slow),
    ],
    ids=["2 ranks fp16", "3 ranks amp_fp16"],
)
def test_all_ranks_skip_alike_and_name_the_culprit(world_size, policy, optimizer, overlap) -> None:
    assert run_ranks(world_size, plant_everywhere, policy, optimizer, overlap) == [[]] * world_size


def plant_in_large_buckets(env: WorkerEnv) -> tuple[list[str], int]:
    """Wires and places that were not attributed, and how many were tried.

    The last element of each parameter of buckets that hold several, with padding between them.
    """
    problems, tried = [], 0
    for ddp in (DDPOptions(), DDPOptions(shard_optimizer=True)):
        stepper = Stepper(
            conv_net(), SGD(1e-2), Policy.fp16(), env.group, scaling=Scaling("static", 1), ddp=ddp
        )
        assert [len(bucket.params) for bucket in stepper.reducer.buckets] == [3, 5]
        assert all(bucket.bucket_range.gaps() for bucket in stepper.reducer.buckets)
        for rank in range(env.world_size):
            for name, parameter in stepper.layout.parameters.items():
                place = (rank, name, parameter.numel() - 1, torch.nan)
                report = train_planted(env, stepper, place, seed=tried)
                tried += 1
                if (report.culprit_ranks, report.culprit_parameters) != ((rank,), (name,)):
                    problems.append(f"{ddp}: {place}: {report}")
    return problems, tried


def test_a_culprit_is_named_at_every_position_of_a_bucket() -> None:
    assert run_ranks(2, plant_in_large_buckets) == [([], 2 * 2 * 8)] * 2


def random_skips(env: WorkerEnv, steps: int) -> tuple[list[str], str, int, int]:
    """Problems, the digest of all state and counters at the end, skipped and applied steps."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    scaling = Scaling(init=2**12, growth_interval=7, hysteresis=2)
    stepper = Stepper(model, AdamW(1e-2), Policy.fp16(), env.group, scaling=scaling, reference_count=2)
    chance = torch.Generator().manual_seed(env.rank)  # each rank overflows when it likes
    poison = {"now": False}
    warnings.filterwarnings("ignore", ".*: hooks on these parameters")
    stepper.layout.parameters["weight"].register_hook(lambda g: g / 0 if poison["now"] else g)
    problems = []
    for step in range(steps):
        poison["now"] = torch.rand((), generator=chance).item() < 0.1
        report = train(stepper, *features(2, 10 * step + env.rank))
        if poison["now"] and not report.skipped:
            problems.append(f"step {step} was not skipped")
        if not weights_are_rounded_masters(stepper):
            problems.append(f"after step {step} weights are not the rounded masters")
    return problems, state_digest(stepper, counters=True), report.skipped_steps, report.applied_steps


@pytest.mark.parametrize("world_size", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_masters_are_bit_equal_after_500_steps_with_random_skips(world_size: int) -> None:
    results = run_ranks(world_size, random_skips, 500)
    assert len({digest for _, digest, _, _ in results}) == 1
    for problems, _, skipped, applied in results:
        assert problems == []
        assert skipped > 20
        assert applied > 200
        assert skipped + applied == 500


def bad_losses(env: WorkerEnv) -> dict[str, object]:
    """A loss of NaN on rank 1 only, in the second of two micro-batches, twice in a row; then a clean step."""
    stepper = Stepper(
        conv_net(), SGD(1e-2, momentum=0.9), group=env.group, micro_batches=2, scaling=Scaling(init=256)
    )
    before = state_digest(stepper)
    reports = []
    for step in range(3):
        for micro_batch in range(2):
            x, classes = features(3, step + env.rank, (3, 8, 8))
            with stepper.forward():
                loss = loss_sum(stepper.model(x), classes)
            bad = step < 2 and micro_batch == 1 and env.rank == 1
            stepper.backward(loss * float("nan") if bad else loss, 3)
        reports.append(stepper.step().read())
        if step == 1:
            unchanged = state_digest(stepper) == before
    return {"reports": reports, "unchanged": unchanged}


def test_a_loss_that_is_nan_skips_without_lowering_the_scale() -> None:
    results = run_ranks(2, bad_losses)
    for result in results:
        first, second, third = result["reports"]
        assert result["unchanged"]
        assert [r.skipped for r in (first, second, third)] == [True, True, False]
        assert [r.scale for r in (first, second, third)] == [256, 256, 256]
        assert [r.bad_loss_steps for r in (first, second, third)] == [1, 2, 0]
        assert [r.bad_losses for r in (first, second, third)] == [1, 1, 0]
        assert first.culprit_ranks == (1,)
        assert third.applied_steps == 1


def statistics_of_steps(env: WorkerEnv) -> list[bool]:
    """Whether BatchNorm's buffers are bit-equal before and after: a skipped step, a clean one, and a skipped
    one that follows an averaging over the ranks (as before an evaluation)."""
    stepper = Stepper(conv_net(), SGD(1e-2), group=env.group, reference_count=4, scaling=Scaling(init=256))
    norm = stepper.model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    equal = []
    for overflows, averaged in ((True, False), (False, False), (True, True)):
        if averaged:
            stepper.buffers.average()
        before = [b.clone() for b in norm.buffers()]
        x, classes = features(4, env.rank, (3, 8, 8))
        if overflows and env.rank == 0:
            x[0] = float("inf")  # reaches the statistics of rank 0 only
        train(stepper, x, classes)
        equal.append(all(torch.equal(a, b) for a, b in zip(before, norm.buffers(), strict=True)))
    return equal


def test_batch_norm_statistics_survive_a_skipped_step_on_all_ranks() -> None:
    assert run_ranks(2, statistics_of_steps) == [[True, False, True]] * 2
