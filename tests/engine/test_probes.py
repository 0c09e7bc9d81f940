"""Backward passes beside Stepper.backward(): theirs is p.grad, as in torch, and no step sees them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.engine import SGD, DDPOptions, Policy, Scaling, Stepper
from tests.engine.observe import train
from tests.models import Planted, features, loss_sum, mlp

FP16 = {"policy": Policy.fp16(), "scaling": Scaling("static", 1), "reference_count": 1}


def probe(model: nn.Module, gradient: float) -> None:
    """A backward pass of the user's own."""
    model(gradient, gradient).backward()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("clear", [True, False])
def test_a_probe_anywhere_in_a_step_changes_nothing_and_keeps_its_gradient(
    clear, micro_batches, overlap
) -> None:
    model = Planted()
    stepper = Stepper(model, SGD(1.0), micro_batches=micro_batches, ddp=DDPOptions(overlap=overlap), **FP16)
    probes = 0

    def look() -> None:
        nonlocal probes
        probe(model, 200.0)
        probes += 1
        if clear:
            model.zero_grad()
            probes = 0

    for _ in range(2):
        look()
        for _ in range(micro_batches):
            with stepper.forward():
                loss = model(1.0, 1.0)
            look()
            stepper.backward(loss, 1)
            look()
        assert not stepper.step().read().skipped
        look()
    for master in stepper.named_masters().values():
        assert torch.equal(master, torch.full_like(master, -2.0))
    for p in model.parameters():
        assert (p.grad is None) if clear else torch.equal(p.grad, torch.full_like(p, 200.0 * probes))


def test_the_tensors_in_grad_stay_the_same_objects() -> None:
    stepper = Stepper(Planted(), SGD(1.0), **FP16)
    probe(stepper.model, 3.0)
    before = [p.grad for p in stepper.model.parameters()]
    stepper.backward(stepper.model(1.0, 1.0), 1)
    stepper.step()
    assert all(p.grad is grad for p, grad in zip(stepper.model.parameters(), before, strict=True))


def test_autograd_grad_stays_out_of_a_step() -> None:
    model = Planted()
    stepper = Stepper(model, SGD(1.0), micro_batches=2, **FP16)
    for _ in range(2):
        (found,) = torch.autograd.grad(model(7.0, 7.0), [model.matrix])
        assert torch.equal(found, torch.full_like(found, 7.0))
        stepper.backward(model(1.0, 1.0), 1)
    stepper.step()
    assert torch.equal(stepper.named_masters()["matrix"], torch.full((2, 3), -1.0))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_probe_through_a_checkpointed_layer_stays_out_as_well(micro_batches, use_reentrant) -> None:
    model = Planted()
    stepper = Stepper(model, SGD(1.0), micro_batches=micro_batches, **FP16)
    one = torch.ones((), requires_grad=True)

    def loss(gradient: float) -> Tensor:
        return checkpoint(lambda x: model(gradient * x, gradient * x), one, use_reentrant=use_reentrant)

    for _ in range(micro_batches):
        loss(5.0).backward()
        stepper.backward(loss(1.0), 1)
    assert not stepper.step().read().skipped
    assert torch.equal(stepper.named_masters()["matrix"], torch.full((2, 3), -1.0))
    assert torch.equal(model.matrix.grad, torch.full_like(model.matrix, 5.0 * micro_batches))


def test_dry_passes_neither_add_to_grad_nor_take_it() -> None:
    model = Planted()
    stepper = Stepper(model, SGD(1.0), Policy.fp16(), scaling=Scaling(init=16), reference_count=1)
    probe(model, 3.0)
    before = [p.grad for p in model.parameters()]
    scale = stepper.scale.value().item()
    for name, gradient in stepper.dry_backward(model(1.0, 1.0)).items():
        assert torch.equal(gradient.float(), torch.full_like(gradient, scale, dtype=torch.float32)), name
    for p, grad in zip(model.parameters(), before, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, torch.full_like(grad, 3.0))


def networks() -> list[nn.Module]:
    """A discriminator and a generator."""
    torch.manual_seed(3)
    return [mlp(1), nn.Sequential(nn.Linear(8, 8), nn.Tanh())]


def adversarial_loss(pair: list[nn.Module], number: int, seed: int) -> Tensor:
    """Of 4 samples. The generator's leads back through the discriminator, and the other way round."""
    discriminator, generator = pair
    x, classes = features(4, seed)
    logits = discriminator(generator(x))
    return loss_sum(logits, classes) if number == 0 else -loss_sum(logits, classes)


EVENTS = [(kind, number) for kind in ("backward", "step") for number in (0, 1)]
ORDERS = [
    order
    for order in itertools.permutations(EVENTS)
    if all(order.index(("backward", number)) < order.index(("step", number)) for number in (0, 1))
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(f"{k}{n}" for k, n in order))
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_networks_that_train_each_other_do_so_in_any_order(micro_batches, order) -> None:
    ours, theirs = networks(), networks()
    steppers = [
        Stepper(network, SGD(0.1), Policy.fp32(), micro_batches=micro_batches, ddp=DDPOptions(bucket_bytes=1))
        for network in ours
    ]
    for step in range(3):
        gradients: dict[int, list[Tensor]] = {}
        for kind, number in order:
            parameters = list(theirs[number].parameters())
            if kind == "backward":
                seeds = [10 * step + part for part in range(micro_batches)]
                for seed in seeds:
                    steppers[number].backward(adversarial_loss(ours, number, seed), 4)
                loss = torch.stack([adversarial_loss(theirs, number, seed) for seed in seeds]).sum()
                gradients[number] = list(torch.autograd.grad(loss / (4 * micro_batches), parameters))
            else:
                assert not steppers[number].step().read().skipped
                with torch.no_grad():
                    for p, gradient in zip(parameters, gradients[number], strict=True):
                        p.sub_(0.1 * gradient)
    for network, expected in zip(ours, theirs, strict=True):
        for p, q in zip(network.parameters(), expected.parameters(), strict=True):
            assert torch.allclose(p, q, atol=1e-6)


def test_hooks_of_others_on_the_parameters_stay_and_see_the_gradients() -> None:
    model = mlp()
    seen: list[tuple[str, bool]] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad is not None)))
    for _ in range(2):  # the second takes over from the first
        stepper = Stepper(model, SGD(0.1), Policy.fp32())
    assert train(stepper, *features(4, 0)).applied_steps == 1
    assert sorted(seen) == sorted((name, True) for name, _ in model.named_parameters())
