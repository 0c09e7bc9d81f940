"""One step on one rank: accumulation, passes of unusual form, refusals, and no question to the host."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.engine import SGD, AdamW, DDPOptions, EngineWarning, Policy, Scaling, Stepper, UnusableError
from launcher.engine.grads import reducer
from launcher.engine.grads.collectives import default_predivide_factor
from tests.engine.observe import state_digest, train, weights_are_rounded_masters
from tests.meta_device import META, MetaDevice
from tests.models import Planted, conv_net, features, loss_sum, mlp


def planted(stepper: Stepper, gradients: list[float | Tensor], count: int = 1):
    """One step whose micro-batches, each of `count` samples, have these gradients."""
    for gradient in gradients:
        with stepper.forward():
            loss = stepper.model(gradient, gradient if isinstance(gradient, float) else 0.0)
        stepper.backward(loss, count)
    return stepper.step().read()


def test_accumulation_cannot_overflow_where_the_mean_fits() -> None:
    """40000 is the scaled mean; partial sums reach 100000, and 4 x 40000 never exist in fp16."""
    options = {"scaling": Scaling("static", 8), "micro_batches": 4}
    for reference_count in (4, None):  # given, or taken from the first step: 4 micro-batches of 1 sample
        stepper = Stepper(Planted(), SGD(1.0), Policy.fp16(), reference_count=reference_count, **options)
        report = planted(stepper, [5000.0] * 4)
        assert not report.skipped
        assert torch.equal(stepper.named_masters()["matrix"], torch.full((2, 3), -5000.0))
    # 4 x 60000/4 x 2 in the first two: their sum is 60000 twice over before the others take it away.
    stepper = Stepper(Planted(), SGD(1.0), Policy.fp16(), reference_count=1, **options)
    report = planted(stepper, [7500.0, 7500.0, -7500.0, -5000.0])
    assert not report.skipped
    assert torch.equal(stepper.named_masters()["matrix"], torch.full((2, 3), -625.0))


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), spare=st.integers(0, 2))
def test_micro_batches_equal_the_whole_batch_bit_for_bit_where_sums_are_exact(sizes, spare) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    samples = torch.randint(-8, 8, (sum(sizes), 2, 3), generator=generator).float()
    for policy in (Policy.fp32(), Policy.fp16()):
        masters = []
        for shares in (sizes, [sum(sizes)]):
            stepper = Stepper(
                Planted(), SGD(1.0), policy, micro_batches=len(shares) + spare, scaling=Scaling(init=16)
            )
            start = 0
            for size in shares:
                with stepper.forward():
                    loss = stepper.model(samples[start : start + size].sum(0), 0.0)
                stepper.backward(loss, size)
                start += size
            assert not stepper.step().read().skipped
            masters.append(stepper.named_masters()["matrix"].clone())
        assert torch.equal(*masters)


def test_a_sticky_inf_in_an_early_micro_batch_skips_the_step() -> None:
    stepper = Stepper(Planted(), SGD(1.0), Policy.fp16(), micro_batches=3, reference_count=1)
    before = state_digest(stepper)
    report = planted(stepper, [float("inf"), 1.0, float("-inf")])
    assert report.skipped
    assert report.culprit_ranks == (0,)
    assert set(report.culprit_parameters) == {"matrix", "vector"}
    assert state_digest(stepper) == before


def test_statistics_of_all_micro_batches_are_rolled_back() -> None:
    stepper = Stepper(conv_net(), SGD(0.1), micro_batches=2, reference_count=8)
    train(stepper, *features(4, 0, (3, 8, 8)))
    before = [b.clone() for b in stepper.model.buffers()]
    for factor in (1.0, float("inf")):
        x, classes = features(4, 1, (3, 8, 8))
        with stepper.forward():
            loss = loss_sum(stepper.model(x), classes)
        stepper.backward(loss * factor, 4)
    assert stepper.step().read().skipped
    assert all(torch.equal(a, b) for a, b in zip(before, stepper.model.buffers(), strict=True))


class Twice(nn.Module):
    """A layer run under activation checkpointing `times` times in one forward pass."""

    def __init__(self, times: int, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.times, self.use_reentrant = times, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self._run(x)
        return self.head(x)

    def _run(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return torch.tanh(self.layer(x))
        return checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=self.use_reentrant)


def gradients_of(model: nn.Module, policy: Policy, **options: object) -> dict[str, Tensor]:
    stepper = Stepper(model, SGD(0.0), policy, scaling=Scaling(init=64), reference_count=4, **options)
    x, classes = features(4, 0)
    assert not train(stepper, x.requires_grad_(), classes).skipped
    return {name: g.clone() for name, g in stepper.layout.gradients().items()}


@pytest.mark.parametrize("policy", [Policy.fp32(), Policy.fp16(), Policy.amp_fp16()], ids=lambda p: p.name)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("large", "times", "options"),
    [
        (False, 3, {}),
        (False, 3, {"micro_batches": 2}),
        (True, 1, {}),
        (True, 1, {"ddp": DDPOptions(overlap=False)}),
        (True, 3, {"ddp": DDPOptions(overlap=False)}),
        (True, 3, {"ddp": DDPOptions(overlap=False), "micro_batches": 2}),
    ],
)
def test_checkpointed_layers_have_the_gradients_of_plain_ones(
    large, times, options, use_reentrant, policy, monkeypatch
) -> None:
    if large:
        monkeypatch.setattr(reducer, "NO_HOOKS_BELOW_BYTES", 0)
    plain = gradients_of(Twice(times, None), policy)
    again = gradients_of(Twice(times, use_reentrant), policy, **options)
    tolerance = 1e-6 if policy.weights == torch.float32 and policy.gradient_dtype == torch.float32 else 4e-3
    for name, gradient in plain.items():
        largest = gradient.abs().max().item()
        assert torch.allclose(again[name].float(), gradient.float(), atol=tolerance * largest), name


def test_a_gradient_that_arrives_after_its_bucket_left_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr(reducer, "NO_HOOKS_BELOW_BYTES", 0)
    stepper = Stepper(
        Twice(2, True), SGD(0.1), Policy.fp32(), reference_count=4, ddp=DDPOptions(bucket_bytes=1)
    )
    x, classes = features(4, 0)
    with pytest.raises(UnusableError, match=r"layer\.(weight|bias) received a gradient twice.*overlap=False"):
        train(stepper, x.requires_grad_(), classes)


class StemLast(Twice):
    """Its first layer is registered last, so the bucket that is sent first is complete last."""

    def __init__(self, times: int, use_reentrant: bool | None) -> None:
        super().__init__(times, use_reentrant)
        self.stem = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


@pytest.mark.parametrize("policy", [Policy.fp32(), Policy.fp16()], ids=lambda p: p.name)
def test_a_second_gradient_that_arrives_while_its_bucket_waits_is_added(policy, monkeypatch) -> None:
    monkeypatch.setattr(reducer, "NO_HOOKS_BELOW_BYTES", 0)
    plain = gradients_of(StemLast(2, None), policy, ddp=DDPOptions(overlap=False))
    again = gradients_of(StemLast(2, True), policy, ddp=DDPOptions(bucket_bytes=1))
    for name, gradient in plain.items():
        largest = gradient.abs().max().item()
        assert torch.allclose(again[name].float(), gradient.float(), atol=4e-3 * largest), name


def test_two_forward_passes_before_one_backward_give_the_sum() -> None:
    x, classes = features(8, 0)
    together, apart = (Stepper(mlp(), SGD(1.0), Policy.fp32()) for _ in range(2))
    train(together, x, classes)
    with apart.forward():
        first = loss_sum(apart.model(x[:3]), classes[:3])
    with apart.forward():
        second = loss_sum(apart.model(x[3:]), classes[3:])
    apart.backward(first + second, 8)
    apart.step()
    for a, b in zip(together.named_masters().values(), apart.named_masters().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_no_count_of_a_micro_batch_is_read_by_the_host() -> None:
    """Wherever it comes from."""
    with MetaDevice() as device:
        stepper = Stepper(conv_net().to(META), AdamW(0.1), emulate=True, micro_batches=3, reference_count=4)
        device.reads.clear()
        for count in (4, torch.tensor(4), torch.tensor(4, device=META)):
            with stepper.forward():
                logits = stepper.model(torch.empty(4, 3, 8, 8, device=META))
            stepper.backward(logits.float().square().sum(), count)
        stepper.step()
        assert device.reads == []


def test_more_backward_calls_than_micro_batches_are_refused() -> None:
    stepper = Stepper(mlp(), SGD(0.1), scaling=Scaling(init=64))
    with stepper.forward():
        losses = [loss_sum(stepper.model(x), y) for x, y in (features(4, 0), features(4, 1))]
    stepper.backward(losses[0], 4)
    with pytest.raises(RuntimeError, match=r"more than 1 times.*micro_batches=2"):
        stepper.backward(losses[1], 4)
    assert stepper.step().read().applied_steps == 1


@pytest.mark.parametrize("policy", ["fp32", "amp_fp16", "fp16", "pure_fp16", "bf16", "amp_bf16"])
@pytest.mark.parametrize("emulate", [True, False])
def test_every_policy_learns(policy, emulate) -> None:
    x, classes = features(32, 0)
    stepper = Stepper(mlp(), SGD(0.3, momentum=0.9), Policy.named(policy), emulate=emulate)
    losses = [train(stepper, x, classes).loss for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    assert policy == "pure_fp16" or weights_are_rounded_masters(stepper)


def test_a_dropped_stepper_leaves_its_model_usable() -> None:
    model = mlp()
    Stepper(model, SGD(0.1), Policy.fp32())
    loss_sum(model(features(4, 0)[0]), features(4, 0)[1]).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("world_size", "divisor"), [(1, 1), (8, 1), (9, 4), (16, 4), (17, 8), (64, 8), (65, 16), (1024, 32)]
)
def test_default_predivisor(world_size, divisor) -> None:
    assert default_predivide_factor(world_size) == divisor


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("policy", [Policy.fp32(), Policy.fp16(), Policy.amp_fp16()], ids=lambda p: p.name)
@pytest.mark.parametrize(("build", "shape"), [(mlp, (8,)), (conv_net, (3, 8, 8))])
def test_a_compiled_model_trains_as_the_plain_one(build, shape, policy) -> None:
    """Skipped steps included. Convolutions add in another order, which turns a rounding here and there."""
    scaling = Scaling(init=2**22) if policy.arithmetic == torch.float16 else None
    models = build(), build()
    steppers = [Stepper(model, SGD(0.01), policy, scaling=scaling, emulate=True) for model in models]
    compiled = torch.compile(models[0], options={"emulate_precision_casts": True})
    histories = []
    for stepper, forward in zip(steppers, (compiled, models[1]), strict=True):
        history = []
        for step in range(8):
            x, classes = features(16, step, shape)
            buffers = [buffer.clone() for buffer in stepper.model.buffers()]
            with stepper.forward():
                loss = loss_sum(forward(x), classes)
            stepper.backward(loss, 16)
            report = stepper.step().read()
            kept = [torch.equal(*pair) for pair in zip(buffers, stepper.model.buffers(), strict=True)]
            assert not report.skipped or all(kept)
            assert report.skipped or not any(kept)
            history.append((report.scale, report.skipped))
        histories.append(history)
    assert histories[0] == histories[1]
    assert {skipped for _, skipped in history} == ({False, True} if scaling else {False})
    for a, b in zip(*(s.named_masters().values() for s in steppers), strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    for a, b in zip(*(model.buffers() for model in models), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clip_norm": -1.0}, "clip_norm=-1.0: it must be a finite number above 0"),
        ({"learning_rates": []}, "it must hold at least one rate"),
        ({"learning_rates": [0.1, -0.1]}, "of at least 0"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"reference_count": 0}, "reference_count=0: it must be a power of two"),
        ({"reference_count": 6}, "reference_count=6: it must be a power of two"),
        (
            {"optimizer": torch.optim.Adam([nn.Parameter(torch.zeros(1))])},
            r"TorchOptimizer\(torch.optim.Adam",
        ),
    ],
    ids=str,
)
def test_settings_that_would_train_wrongly_without_a_word_are_refused(options, text) -> None:
    with pytest.raises(UnusableError, match=text):
        Stepper(**{"model": Planted(), "optimizer": SGD(0.1)} | options)


def test_a_misspelt_way_of_scaling_is_refused() -> None:
    with pytest.raises(UnusableError, match="mode='dynmic': it must be one of dynamic, static, none"):
        Scaling(mode="dynmic")


def test_a_loss_of_something_else_than_the_model_is_warned_of() -> None:
    stepper = Stepper(Planted(), SGD(0.1))
    stepper.backward(torch.ones((), requires_grad=True) * 2, 1)
    with pytest.warns(EngineWarning, match="2 of 2 parameters received no gradient"):
        stepper.step().read()


def test_an_empty_first_step_does_not_settle_the_reference_count() -> None:
    stepper = Stepper(Planted(), SGD(0.1), scaling=Scaling("static", 1))
    assert stepper.step().read().skipped
    assert stepper.state().reference_count is None
    stepper.backward(stepper.model(64.0, 64.0), 64)
    stepper.step()
    assert stepper.state().reference_count == 64
    assert torch.equal(stepper.layout.gradients()["matrix"].float(), torch.ones(2, 3))


@pytest.mark.parametrize("kind", ["weights", "buffers", "optimizer"])
def test_a_state_of_another_shape_is_refused_not_stretched(kind) -> None:
    stepper = Stepper(conv_net(), AdamW(0.1))
    state = stepper.state().clone()
    tensors = getattr(state, kind)
    name = next(name for name, value in tensors.items() if value.ndim == 1 and len(value) > 1)
    tensors[name] = tensors[name][:1]
    before = state_digest(stepper)
    with pytest.raises(ValueError, match=r"the state does not fit: .*has shape \(1,\)"):
        stepper.load(state)
    assert state_digest(stepper) == before
