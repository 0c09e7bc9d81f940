"""SGD and AdamW against torch.optim in fp64; what a skipped step leaves alone; what masters are for."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, is_tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.engine import SGD, AdamW, Policy, Scaling, Stepper
from launcher.engine.optim.optimizers import Optimizer
from launcher.engine.optim.update import CHUNK, DEVICE_CHUNK, StepScalars, _Batch
from launcher.engine.params.flat_buffers import Shard
from tests.engine.observe import deciding_on_device, state_digest, weights_are_rounded_masters
from tests.meta_device import META, MetaDevice
from tests.models import Planted

FORMS = ["plain", "as on a GPU"]
TOLERANCE = 8e-6  # relative; torch.optim.AdamW itself in fp32 is 4e-6 away from its fp64 form here
TORCH = {
    "plain": (SGD(0.1), torch.optim.SGD, {"lr": 0.1}),
    "momentum": (
        SGD(0.05, momentum=0.9, weight_decay=0.01),
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    ),
    "nesterov": (
        SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "adamw": (AdamW(0.01), torch.optim.AdamW, {"lr": 0.01}),
    "adamw, all options": (
        AdamW(0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
        torch.optim.AdamW,
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    ),
}


def stepper_of(form: str, *arguments, **options) -> Stepper:
    with deciding_on_device("GPU" in form):
        return Stepper(*arguments, reference_count=1, **options)


def planted_step(stepper: Stepper, matrix: Tensor | float, vector: Tensor | float = 0.0):
    """One step with these gradients."""
    with stepper.forward():
        loss = stepper.model(matrix, vector)
    stepper.backward(loss, 1)
    return stepper.step().read()


def model_of(generator: torch.Generator, rows: int) -> Planted:
    model = Planted(rows, 7, 11)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return model


def largest_error(optimizer: Optimizer, torch_class: type, options: dict, form: str, rows: int) -> float:
    """After 200 steps with drifting gradients: difference to torch.optim in fp64, relative."""
    generator = torch.Generator().manual_seed(0)
    model = model_of(generator, rows)
    exact = [nn.Parameter(p.detach().double()) for p in (model.matrix, model.vector)]
    reference = torch_class(exact, **options)
    stepper = stepper_of(form, model, optimizer, Policy.fp32())
    for step in range(200):
        matrix = torch.randn(rows, 7, generator=generator) + 0.01 * step
        vector = torch.randn(11, generator=generator) * 1e-3
        planted_step(stepper, matrix, vector)
        exact[0].grad, exact[1].grad = matrix.double(), vector.double()
        reference.step()
    masters = stepper.named_masters()
    pairs = zip((masters["matrix"], masters["vector"]), exact, strict=True)
    return max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TORCH)
def test_optimizers_equal_torch_in_fp64_over_200_steps(name, form) -> None:
    assert largest_error(*TORCH[name], form, rows=5) < TOLERANCE


def test_more_elements_than_a_chunk_are_all_updated() -> None:
    rows = CHUNK // 7 + 100
    stepper = Stepper(
        Planted(rows, 7, 11), SGD(1.0), Policy.fp16(), reference_count=1, scaling=Scaling(init=1)
    )
    matrix = torch.arange(rows * 7).reshape(rows, 7).remainder(1000).float()
    planted_step(stepper, matrix)
    assert torch.equal(stepper.named_masters()["matrix"], -matrix)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1), AdamW(0.1)])
@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.pure_fp16(), Policy.fp32()], ids=lambda p: p.name)
def test_a_skipped_step_writes_nothing_and_consumes_neither_rate_nor_bias_correction(
    policy, optimizer, form
) -> None:
    """A run with skips in between ends bit for bit where one without them does."""
    rates = [0.1, 0.2, 0.3, 0.4, 0.5]
    digests, seen_rates = [], []
    for pattern in ([1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 1]):
        generator = torch.Generator().manual_seed(0)
        model = model_of(generator, 5)
        stepper = stepper_of(
            form, model, optimizer, policy, scaling=Scaling("static", 128), learning_rates=rates
        )
        seen_rates.append([])
        for clean in pattern:
            before = state_digest(stepper)
            gradient = torch.randn(5, 7, generator=generator) if clean else torch.full((5, 7), torch.inf)
            report = planted_step(stepper, gradient)
            assert report.skipped == (not clean)
            assert (state_digest(stepper) == before) == report.skipped
            assert policy.name == "pure_fp16" or weights_are_rounded_masters(stepper)
            seen_rates[-1] += [report.lr] * clean
        assert (report.applied_steps, report.skipped_steps) == (7, len(pattern) - 7)
        digests.append(state_digest(stepper))
    assert digests[0] == digests[1]
    assert seen_rates[0] == seen_rates[1] == [*rates, 0.5, 0.5]


def test_masters_keep_updates_that_fp16_weights_alone_lose() -> None:
    """1 + 100 * 1e-4: each update is less than half a unit in the last place of fp16."""
    ends = {}
    for policy in (Policy.fp16(), Policy.pure_fp16()):
        model = Planted()
        model.matrix.data.fill_(1.0)
        stepper = Stepper(model, SGD(1e-4), policy, scaling=Scaling("static", 128), reference_count=1)
        for _ in range(100):
            planted_step(stepper, -1.0)
        ends[policy.name] = stepper.named_masters()["matrix"].mean().item()
    assert ends["pure_fp16"] == 1.0
    assert ends["fp16"] == pytest.approx(1.01, abs=1e-5)


def test_gradients_below_fp16_are_applied_because_they_are_never_written_back_unscaled() -> None:
    """2^-30 is far below the smallest fp16 number; scaled by 2^16 it travels, and fp32 takes it in."""
    stepper = Stepper(Planted(), SGD(1.0), Policy.fp16(), reference_count=1)
    report = planted_step(stepper, 2.0**-30)
    assert torch.equal(stepper.named_masters()["matrix"], torch.full((2, 3), -(2.0**-30)))
    assert report.grad_norm == pytest.approx(6**0.5 * 2.0**-30)


class Memory(TorchDispatchMode):
    """Bytes that operations allocate: those in use at a time, at most, and how many operations there were."""

    def __init__(self) -> None:
        super().__init__()
        self.in_use = self.peak = self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {
            tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if is_tensor(tensor)
        }
        self.operations += 1
        for tensor in tree_leaves(result):
            if is_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                size = tensor.untyped_storage().nbytes()
                self.in_use += size
                weakref.finalize(tensor, self.freed, size)
        self.peak = max(self.peak, self.in_use)
        return result

    def freed(self, size: int) -> None:
        self.in_use -= size


@pytest.mark.parametrize(
    ("policy", "bytes_per_element"),
    [(Policy.fp16(), 4), (Policy.amp_fp16(), 4), (Policy.fp32(), 4), (Policy.pure_fp16(), 8)],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("optimizer", [SGD(0.1, 0.9, True, 5e-4), AdamW(0.1)], ids=["sgd", "adamw"])
def test_a_plain_update_elsewhere_takes_a_chunk_of_memory_and_a_few_operations(
    optimizer, policy, bytes_per_element
) -> None:
    """Of 50 M parameters: on a GPU, where a pass per expression took 20 bytes for each of them."""
    with META:
        model = nn.Sequential(nn.Linear(5_000, 10_000), nn.LayerNorm(10_000))
    with MetaDevice() as device:
        stepper = Stepper(model, optimizer, policy, reference_count=1, emulate=True)
        scalar = torch.zeros((), device=META)
        scalars = StepScalars(scalar, scalar.double(), scalar.double(), scalar.bool())
        device.reads.clear()
        device.uploads.clear()
        with Memory() as memory:
            stepper.updater.step(scalars)
        assert device.reads == device.uploads == []
    num_batches = -(-50_030_000 // DEVICE_CHUNK)
    assert 0 < memory.peak <= bytes_per_element * DEVICE_CHUNK + 1000
    assert memory.operations <= 6 * num_batches + 4


def test_an_fp16_gradient_is_multiplied_in_fp32_where_it_is_not_widened_first() -> None:
    """The product of a GPU: 60000 * 2^4 is beyond fp16, 2^-24 * 2^-8 below it."""
    grad = torch.tensor([60000.0, -60000.0, 2.0**-24, 1.0]).half()
    for factor in (2.0**4, 2.0**-8, 1 / 3):
        batch = _Batch(SGD(0.1), 0, None, [])
        batch.add(Shard(grad, None, grad), [])
        (found,) = batch._mean_gradients(torch.tensor(factor))
        assert torch.equal(found, grad.float() * torch.tensor(factor))


def test_the_names_of_the_states_are_those_in_checkpoints() -> None:
    """And torch.optim's, whose users know them; another name would refuse every earlier checkpoint."""
    assert SGD(0.1).states == ()
    assert SGD(0.1, momentum=0.9).states == ("momentum",)
    assert AdamW(0.1).states == ("exp_avg", "exp_avg_sq")
