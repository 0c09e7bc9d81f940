"""The applied gradient is the mean over all samples, however they are spread over ranks and micro-batches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, DDPOptions, Policy, Scaling, Stepper
from tests.engine.observe import state_digest, train, weights_are_rounded_masters
from tests.models import Odd, Planted, conv_net, features, loss_sum, mlp
from tests.ranks.harness import run_ranks

# Sizes of micro-batches by rank, for three steps; each rank is empty once, and some have fewer than others.
SHARES = (([3, 2], [], [4]), ([], [1], [2, 6]), ([2, 2], [5, 1], []))


def step_on_shares(stepper: Stepper, shares: list[int], start: int, x: Tensor, classes: Tensor) -> Any:
    """One step of one rank: micro-batches of these sizes from `start` on; a count may be a tensor, too."""
    for number, size in enumerate(shares):
        part = slice(start, start + size)
        with stepper.forward():
            loss = loss_sum(stepper.model(x[part]), classes[part])
        stepper.backward(loss, torch.tensor(size) if number else size)
        start += size
    return stepper.step().read()


def unequal_shares(env: WorkerEnv, policy: Policy) -> dict[str, Any]:
    """Three steps on all ranks, and the same three steps in this process alone with the whole batches."""
    options = {"scaling": Scaling(init=1024), "clip_norm": 1.0}
    many = Stepper(mlp(), SGD(0.5, momentum=0.9), policy, env.group, micro_batches=2, **options)
    group_of_one = dist.new_group([env.rank], use_local_synchronization=True)
    alone = Stepper(mlp(), SGD(0.5, momentum=0.9), policy, group_of_one, **options)
    reports, errors = [], []
    for step, shares in enumerate(SHARES):
        sizes = [sum(share) for share in shares]
        x, classes = features(sum(sizes), seed=step)
        report = step_on_shares(many, shares[env.rank], sum(sizes[: env.rank]), x, classes)
        reports.append((report, step_on_shares(alone, [len(x)], 0, x, classes)))
        masters = zip(many.named_masters().values(), alone.named_masters().values(), strict=True)
        errors.append(max((a - b).abs().max().item() for a, b in masters))
    return {"reports": reports, "errors": errors, "digest": state_digest(many)}


@pytest.mark.sampled(every=3, first=1)
@pytest.mark.parametrize(
    ("policy", "tolerance"), [(Policy.fp32(), 1e-6), (Policy.fp16(), 2e-3), (Policy.bf16(), 2e-2)]
)
def test_unequal_and_empty_shares_give_the_gradient_of_the_whole_batch(policy, tolerance) -> None:
    results = run_ranks(3, unequal_shares, policy)
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        assert max(result["errors"]) < tolerance
        for (many, alone), shares in zip(result["reports"], SHARES, strict=True):
            assert not many.skipped
            assert many.count == alone.count == sum(map(sum, shares))
            assert many.loss == pytest.approx(alone.loss, rel=tolerance)
            assert many.grad_norm == pytest.approx(alone.grad_norm, rel=10 * tolerance)


def nobody_has_samples(env: WorkerEnv) -> tuple[bool, bool, int]:
    """A step without a sample anywhere, as the first one and later."""
    stepper = Stepper(mlp(), SGD(0.1), group=env.group, scaling=Scaling(init=256))
    before = state_digest(stepper)
    first = stepper.step().read()
    unchanged = state_digest(stepper) == before
    later = train(stepper, *features(2, env.rank))
    return first.skipped and unchanged, later.skipped, later.applied_steps


def test_a_step_without_samples_changes_nothing() -> None:
    assert run_ranks(2, nobody_has_samples) == [(True, False, 1)] * 2


def odd_parameters(env: WorkerEnv, policy: Policy, overlap: bool) -> dict[str, Any]:
    """The odd model, each rank in another branch, against its gradient by plain autograd in one process."""
    warnings.filterwarnings("ignore", ".* parameters received no gradient")
    options = {"scaling": Scaling(init=256), "ddp": DDPOptions(bucket_bytes=128, overlap=overlap)}
    model = Odd(seed=env.rank)  # rank 0's values are taken, those of frozen parameters as well
    stepper = Stepper(model, SGD(0.1, momentum=0.9), policy, env.group, reference_count=4, **options)
    plain = Odd(seed=0)
    for p in plain.parameters():
        p.data = p.data.float()
    trainable = [p for p in plain.parameters() if p.requires_grad]
    reference = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
    problems = []
    for step in range(5):
        batches = [features(2 + rank, 10 * step + rank) for rank in range(env.world_size)]
        used = [(step + rank) % 2 if rank < 2 else 0 for rank in range(env.world_size)]
        x, classes = batches[env.rank]
        with stepper.forward():
            loss = loss_sum(model(x, used[env.rank]), classes)
        stepper.backward(loss, len(x))
        report = stepper.step().read()
        total = torch.zeros(())
        for (x, classes), branch in zip(batches, used, strict=True):
            total = total + loss_sum(plain(x, branch), classes)
        reference.zero_grad(set_to_none=False)
        (total / sum(len(x) for x, _ in batches)).backward()
        for p in trainable:  # an unused parameter has a gradient of zero here, so momentum moves it alike
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        reference.step()
        if report.skipped or not weights_are_rounded_masters(stepper):
            problems.append(f"step {step}: skipped={report.skipped}")
    masters, wanted = stepper.named_masters(), dict(plain.named_parameters())
    return {
        "problems": problems,
        "error": max((masters[n] - wanted[n]).abs().max().item() for n in masters if masters[n].numel()),
        "names": set(masters) == {n for n, p in wanted.items() if p.requires_grad},
        "moved": not torch.equal(masters["branches.1.weight"], Odd(seed=0).branches[1].weight),
        "frozen": torch.equal(model.frozen.weight, Odd(seed=0).frozen.weight.to(policy.weights)),
        "tied": model.tied.weight is model.first.weight,
        "channels_last": model.conv.weight.is_contiguous(memory_format=torch.channels_last),
        "strides": model.transposed.stride() == (1, 12),
        "digest": state_digest(stepper),
    }


ODD_CASES = [(Policy.fp32(), True, 1e-5), (Policy.fp32(), False, 1e-5), (Policy.fp16(), True, 1e-2)]
ODD_CASES += [(Policy.amp_fp16(), True, 1e-2)]


def odd_cases(env: WorkerEnv) -> list[dict[str, Any]]:
    return [odd_parameters(env, policy, overlap) for policy, overlap, _ in ODD_CASES]


def test_odd_parameters_on_three_ranks() -> None:
    by_rank = run_ranks(3, odd_cases)
    for case, (policy, _, tolerance) in enumerate(ODD_CASES):
        results = [ranks_results[case] for ranks_results in by_rank]
        assert len({result["digest"] for result in results}) == 1, policy.name
        for result in results:
            assert result["problems"] == [], policy.name
            assert result["error"] < tolerance, policy.name
            assert all(
                result[key] for key in ("names", "moved", "frozen", "tied", "channels_last", "strides")
            )


def against_ddp(env: WorkerEnv) -> tuple[float, float]:
    """Largest difference of weights after 100 steps, and how far training went; BatchNorm included."""
    ours, theirs = conv_net(), conv_net()
    stepper = Stepper(ours, SGD(0.05, momentum=0.9, weight_decay=1e-4), Policy.fp32(), env.group)
    # BatchNorm's statistics stay each rank's own, as with us.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers`")  # which torch 2.11 knows by no other name
        ddp = DistributedDataParallel(theirs, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for step in range(100):
        x, classes = features(4, 2 * step + env.rank, (3, 8, 8))
        train(stepper, x, classes)
        optimizer.zero_grad()
        (loss_sum(ddp(x), classes) / 4).backward()
        optimizer.step()
    pairs = list(zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    start = conv_net().state_dict().values()
    moved = max((a - b).abs().max().item() for a, b in zip(ours.state_dict().values(), start, strict=True))
    return max((a.float() - b.float()).abs().max().item() for a, b in pairs), moved


def test_fp32_training_equals_distributed_data_parallel() -> None:
    for difference, moved in run_ranks(2, against_ddp):
        assert difference < 2e-4
        assert moved > 0.1


def clipped(env: WorkerEnv, policy: Policy) -> dict[str, Any]:
    """Norm and clipped gradient of one step beside those of torch on fp32 copies of all ranks' gradients."""
    found = {}
    for clip_norm in (0.5, 1e6):
        options = {"scaling": Scaling(init=256), "clip_norm": clip_norm}
        stepper = Stepper(Planted(13, 7, 5), SGD(1.0), policy, env.group, **options)
        generators = [torch.Generator().manual_seed(rank) for rank in range(env.world_size)]
        matrices = [torch.randn(13, 7, generator=g) for g in generators]
        vectors = [torch.randn(5, generator=g) for g in generators]
        with stepper.forward():
            loss = stepper.model(matrices[env.rank], vectors[env.rank])
        stepper.backward(loss, 1)
        report = stepper.step().read()
        copies = [nn.Parameter(torch.zeros(13, 7)), nn.Parameter(torch.zeros(5))]
        copies[0].grad = torch.stack(matrices).mean(0)
        copies[1].grad = torch.stack(vectors).mean(0)
        norm = torch.nn.utils.clip_grad_norm_(copies, clip_norm)
        masters = stepper.named_masters()
        pairs = zip((masters["matrix"], masters["vector"]), copies, strict=True)
        error = max((master + copy.grad).abs().max().item() for master, copy in pairs)
        found[clip_norm] = (report.grad_norm, norm.item(), error)
    return found


@pytest.mark.parametrize(("policy", "tolerance"), [(Policy.fp32(), 1e-6), (Policy.fp16(), 1e-3)])
def test_clipping_equals_clip_grad_norm_on_fp32_copies(policy, tolerance) -> None:
    for found in run_ranks(2, clipped, policy):
        for norm, expected, error in found.values():
            assert norm == pytest.approx(expected, rel=tolerance)
            assert error < 2 * tolerance


def different_models(env: WorkerEnv) -> list[str]:
    """What each difference between rank 1 and the others raises, on this rank."""

    def reordered() -> nn.Module:
        return nn.ModuleDict({"b": nn.Linear(2, 2), "a": nn.Linear(2, 2)})

    def plain() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    def frozen() -> nn.Module:
        model = plain()
        model["a"].requires_grad_(False)
        return model

    def conv(memory_format: torch.memory_format, size: int = 3) -> nn.Module:
        return nn.Conv2d(2, 2, size).to(memory_format=memory_format)

    cases = [
        (nn.ReLU, plain),
        (lambda: plain().requires_grad_(False), plain),
        (reordered, plain),
        (frozen, plain),
        (lambda: conv(torch.channels_last), lambda: conv(torch.contiguous_format)),
        (lambda: nn.BatchNorm1d(3), lambda: nn.BatchNorm1d(3, track_running_stats=False)),
    ]
    errors = []
    for odd, usual in cases:
        with pytest.raises(ValueError, match="different models or settings") as caught:
            Stepper(odd() if env.rank == 1 else usual(), SGD(0.1), group=env.group)
        errors.append(str(caught.value))
    formats = torch.contiguous_format, torch.channels_last
    Stepper(conv(formats[env.rank == 1], size=1), SGD(0.1), group=env.group)  # the same order in memory
    return errors


def test_different_models_are_refused_on_all_ranks() -> None:
    results = run_ranks(3, different_models)
    texts = (
        "number of parameters and buffers is 0, not 4",
        "parameter or buffer 1 is a.weight (2, 2), strides (2, 1), torch.float32, not trainable, not a.w",
        "parameter or buffer 1 is b.weight (2, 2)",
        "float32, not trainable, not a.weight (2, 2), strides (2, 1), torch.float32, trainable",
        "parameter or buffer 1 is weight (2, 2, 3, 3), strides (18, 1, 6, 2)",
        "number of parameters and buffers is 5, not 2",
    )
    for errors in results:
        assert errors == results[0]
        for error, text in zip(errors, texts, strict=True):
            assert "Rank(s) 1 differ from rank 0: on rank 1 " in error
            assert text in error
