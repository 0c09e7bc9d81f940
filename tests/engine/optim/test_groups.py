"""Parameter groups against torch.optim with the same groups; what a pattern finds; what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from launcher.engine import (
    SGD,
    AdamW,
    DDPOptions,
    ParameterGroup,
    Policy,
    Stepper,
    TorchOptimizer,
    UnusableError,
)
from launcher.engine.optim.update import DEVICE_CHUNK, StepScalars, Updater
from tests.engine.observe import state_digest, train, weights_are_rounded_masters
from tests.engine.optim.test_update import FORMS, Memory, stepper_of
from tests.meta_device import META, MetaDevice
from tests.models import Odd

LR = 0.05
SGD_OPTIONS = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
GROUPS = (
    ParameterGroup("head.*", lr_scale=3.0),
    ParameterGroup(["*.bias", "norm.*"], weight_decay=0.0),
    ParameterGroup("body.0.*", lr_scale=0.25, weight_decay=0.3),
)
GROUP_OF = {  # by hand
    "stem.weight": None,
    "stem.bias": 1,
    "norm.weight": 1,
    "norm.bias": 1,
    "body.0.weight": 2,
    "body.0.bias": 1,
    "body.1.weight": None,
    "body.1.bias": 1,
    "head.weight": 0,
    "head.bias": 0,
}


class Grouped(nn.Module):
    """Of sizes divisible by 32: fused kernels round the elements behind the last vector in another way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.body = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.norm(self.stem(x)))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 32, generator=generator), torch.randint(32, (16,), generator=generator)


def in_torch(kind: type, model: nn.Module, options: dict) -> torch.optim.Optimizer:
    """torch's optimizer with the same groups, one for each parameter; `scale` is the rate's."""
    param_groups = []
    for name, p in model.named_parameters():
        number = GROUP_OF[name]
        group = ParameterGroup("*") if number is None else GROUPS[number]
        own = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
        param_groups.append({"params": [p], "scale": group.lr_scale} | own)
    return kind(param_groups, lr=LR, **options)


CASES = {
    "sgd": (SGD(LR, **SGD_OPTIONS), torch.optim.SGD, SGD_OPTIONS | {"fused": True}),
    "adamw": (AdamW(LR, weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
    "adam of torch": (
        TorchOptimizer(torch.optim.Adam, LR, weight_decay=0.1),
        torch.optim.Adam,
        {"weight_decay": 0.1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_groups_give_the_bits_of_torch_with_the_same_groups(name) -> None:
    """In fp32, from the same gradients, with another rate in each step."""
    ours, kind, options = CASES[name]
    rates = [LR / (1 + step) for step in range(15)]
    model, twin = Grouped(), Grouped()
    stepper = Stepper(model, ours, Policy.fp32(), groups=GROUPS, reference_count=16, learning_rates=rates)
    theirs = in_torch(kind, twin, options)
    for step, rate in enumerate(rates):
        train(stepper, *batch(step))
        for parameter, group in zip(twin.named_parameters(), theirs.param_groups, strict=True):
            group["lr"] = rate * group["scale"]
            parameter[1].grad = stepper.reduced_gradients()[parameter[0]].clone()
        theirs.step()
    masters = stepper.named_masters()
    for parameter_name, p in twin.named_parameters():
        assert torch.equal(masters[parameter_name], p), parameter_name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_all_forms_of_the_update_know_the_groups(name, form) -> None:
    """Within rounding of the plain one; weights are rounded masters, and a skipped step writes nothing."""
    steppers = [
        stepper_of(
            each, Grouped(), CASES[name][0], Policy.fp16(), groups=GROUPS, ddp=DDPOptions(bucket_bytes=4096)
        )
        for each in (form, "plain")
    ]
    for step in range(5):
        for stepper in steppers:
            train(stepper, *batch(step))
    ours, plain = (stepper.named_masters() for stepper in steppers)
    for parameter, value in plain.items():
        assert torch.allclose(ours[parameter], value, rtol=1e-4, atol=1e-5), parameter
    assert weights_are_rounded_masters(steppers[0])
    before = state_digest(steppers[0])
    assert train(steppers[0], batch(9)[0] * torch.inf, batch(9)[1]).skipped
    assert state_digest(steppers[0]) == before


def test_groups_change_neither_the_buckets_nor_their_order() -> None:
    """Only where a parameter lies within one; each then has a stretch for each set of rates at most."""
    own = [ParameterGroup(["body.0.*", "norm.bias"], 0.5)]  # within the buckets others lie before and behind
    plain, grouped = (
        Stepper(Grouped(), SGD(LR), ddp=DDPOptions(bucket_bytes=24576), groups=groups) for groups in ((), own)
    )
    for ours, theirs in zip(plain.layout.flat_buffers, grouped.layout.flat_buffers, strict=True):
        assert [(run.start, run.end) for run in ours.bucket_ranges] == [
            (run.start, run.end) for run in theirs.bucket_ranges
        ]
        for one, other in zip(ours.bucket_ranges, theirs.bucket_ranges, strict=True):
            assert {param.name for param in one.params} == {param.name for param in other.params}
            indices = [grouped.layout.grouping.index[param.name] for param in other.params]
            assert indices == sorted(indices)
    assert len(plain.layout.flat_buffers[0].bucket_ranges) > 1
    assert plain.updater._lr_scales == [1.0]
    vectors = grouped.layout.group_slices(
        flat_buffer := grouped.layout.flat_buffers[1], slice(0, flat_buffer.numel)
    )
    assert sum(map(len, vectors.values())) == 2


def test_the_clip_norm_is_that_of_all_groups_together() -> None:
    """The step of a group is its rate times the gradient, clipped by the norm of all of it."""
    groups = [ParameterGroup("head.*", lr_scale=3.0)]
    stepper = Stepper(Grouped(), SGD(LR), Policy.fp32(), clip_norm=0.01, groups=groups, reference_count=16)
    before = {name: value.clone() for name, value in stepper.named_masters().items()}
    report = train(stepper, *batch(0))
    gradients, masters = stepper.reduced_gradients(), stepper.named_masters()
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    for name, value in masters.items():
        scale = LR * 0.01 / norm * (3.0 if name.startswith("head.") else 1.0)
        assert torch.allclose(before[name] - value, scale * gradients[name], atol=1e-7), name


@pytest.mark.parametrize("name", CASES)
def test_a_state_loads_under_other_groups(name) -> None:
    """What one without groups has saved, one with groups resumes from, and the reverse, bit for bit."""
    optimizer = CASES[name][0]

    def stepper(groups: tuple[ParameterGroup, ...], bucket_bytes: int) -> Stepper:
        ddp = DDPOptions(bucket_bytes=bucket_bytes)
        return Stepper(Grouped(), optimizer, ddp=ddp, groups=groups, reference_count=16)

    plain = stepper((), 8192)
    train(plain, *batch(0))
    grouped = stepper(GROUPS, 4096)
    grouped.load(plain.state().clone())
    again = stepper((), 8192)
    again.load(grouped.state().clone())
    assert state_digest(again, counters=True) == state_digest(plain, counters=True)

    whole, parts = stepper(GROUPS, 8192), stepper(GROUPS, 8192)
    whole.load(plain.state().clone())
    parts.load(plain.state().clone())
    for step in range(1, 5):
        train(whole, *batch(step))
        train(parts, *batch(step))
        state, parts = parts.state().clone(), stepper(GROUPS, 4096 if step < 4 else 8192)
        parts.load(state)
    assert state_digest(whole, counters=True) == state_digest(parts, counters=True)


def test_a_frozen_group_is_left_alone() -> None:
    """As if it had been frozen before: no place in the flat memory, no state, its values in the state."""
    model, before = Grouped(), dict(Grouped().named_parameters())
    stepper = Stepper(model, AdamW(LR), Policy.fp32(), groups=[ParameterGroup("body.*", frozen=True)])
    train(stepper, *batch(0))
    state = stepper.state()
    for name, p in model.named_parameters():
        frozen = name.startswith("body.")
        assert p.requires_grad == (not frozen)
        assert torch.equal(p, before[name]) == frozen
        assert (f"exp_avg/{name}" in state.optimizer) == (not frozen)
        assert name in state.weights
    assert stepper.updater._lr_scales == [1.0]


@pytest.mark.filterwarnings("ignore:.* parameters received no gradient")
def test_odd_parameters_are_updated_in_their_groups() -> None:
    """Tied, empty, frozen, of mixed dtypes: a tied one is found by its second name too."""
    x, classes = torch.randn(8, 8), torch.randint(3, (8,))
    groups = [ParameterGroup("tied.weight", lr_scale=0.0, weight_decay=0.0), ParameterGroup("brain", 2.0)]
    stepper = Stepper(Odd(), SGD(LR, weight_decay=0.1), Policy.fp32(), groups=groups, reference_count=8)
    plain = Stepper(Odd(), SGD(LR, weight_decay=0.1), Policy.fp32(), reference_count=8)
    before = {name: value.clone() for name, value in plain.named_masters().items()}
    for each in (stepper, plain):
        train(each, x, classes)
    ours, theirs = stepper.named_masters(), plain.named_masters()
    for name, value in theirs.items():
        if name == "first.weight":
            assert torch.equal(ours[name], before[name])
        elif name == "brain":
            assert torch.allclose(ours[name] - before[name], 2 * (value - before[name]), atol=1e-6)
        else:
            assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("optimizer", [SGD(0.1, 0.9, True, 5e-4), AdamW(0.1)], ids=["sgd", "adamw"])
def test_on_a_gpu_groups_cost_calls_and_no_reads(optimizer) -> None:
    """Of 50 M parameters in 4 groups: host and device never wait, the operations are those of the batches."""
    with META:
        model = nn.Sequential(nn.Linear(5_000, 10_000), nn.LayerNorm(10_000))
    groups = [ParameterGroup("0.bias", 0.5), ParameterGroup("1.weight", 0.1), ParameterGroup("1.*", 1.0, 0.0)]
    with MetaDevice() as device:
        stepper = Stepper(model, optimizer, Policy.fp16(), reference_count=1, emulate=True, groups=groups)
        options, group_slices = stepper.layout.grouping.options, stepper.zero1.group_slices()
        updater = Updater(stepper.zero1.shards, optimizer, options, group_slices)
        scalar = torch.zeros((), device=META)
        device.reads.clear()
        device.uploads.clear()
        with Memory() as memory:
            updater.step(StepScalars(scalar, scalar.double(), scalar.double(), scalar.bool()))
        assert device.reads == device.uploads == []
    num_batches = -(-50_030_000 // DEVICE_CHUNK) + 3
    assert memory.operations <= 6 * num_batches + 3 * 4 + 4


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        (
            [ParameterGroup("*.bais")],
            r"groups\[0\]: the pattern '\*.bais' matches none of the 10 parameter names. Nearest: .*\.bias",
        ),
        (
            [ParameterGroup("head.*"), ParameterGroup(["stem.*", "haed.*"])],
            r"groups\[1\]: the pattern 'haed\.\*' matches none .* Nearest: head",
        ),
        (
            [ParameterGroup("head.*"), ParameterGroup("head.bias")],
            r"groups\[1\] \(head.bias\) is left without a parameter: all 1 .* belong to groups\[0\]",
        ),
        (
            [ParameterGroup("*", frozen=True)],
            r"Grouped has no trainable parameter: parameter groups freeze 10",
        ),
    ],
)
def test_groups_that_match_nothing_are_refused_and_the_model_is_untouched(groups, error) -> None:
    model = Grouped()
    before = {name: (p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    with pytest.raises(UnusableError, match=error):
        Stepper(model, SGD(LR), groups=groups)
    assert {name: (p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"match": "*", "lr_scale": -1.0}, "lr_scale=-1.0: it must be a finite number of at least 0"),
        ({"match": "*", "lr_scale": float("nan")}, "lr_scale=nan"),
        ({"match": "*", "weight_decay": "no"}, "weight_decay='no'"),
        ({"match": "*", "frozen": 1}, "frozen=1: it must be True or False"),
    ],
)
def test_what_no_group_can_be_is_refused(arguments, error) -> None:
    with pytest.raises(UnusableError, match=f"ParameterGroup {error}"):
        ParameterGroup(**arguments)


def test_a_torch_optimizer_without_weight_decay_refuses_a_group_that_sets_one() -> None:
    with pytest.raises(UnusableError, match="Rprop has no weight_decay, and a parameter group sets one"):
        Stepper(Grouped(), TorchOptimizer(torch.optim.Rprop, LR), groups=[ParameterGroup("*.bias", 1.0, 0.0)])
