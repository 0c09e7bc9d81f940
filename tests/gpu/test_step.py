"""On a GPU: no step waits for the device, a captured step gives the same bits, accuracy is the usual one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.engine import SGD, AdamW, Policy, Stepper, TorchOptimizer
from launcher.recipe import load_recipe
from tests.configs import composed
from tests.gpu.steps import batch_of, forward_backward, state_on_host, stepper_of, synchronize
from tests.models import conv_net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # the compiler's own, at import
]


def no_synchronisation(device: torch.device) -> contextlib.AbstractContextManager[None]:
    return _errors_on_synchronisation() if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def _errors_on_synchronisation() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch says whenever it is set that this mode is a prototype, and warnings are errors here.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["fp32", "amp_fp16", "fp16", "pure_fp16"])
def test_no_step_waits_for_the_device(device, name) -> None:
    stepper = stepper_of(device, Policy.named(name))
    batches = [batch_of(device, step) for step in range(6)]
    for x, classes in batches[:2]:  # compiles, chooses algorithms
        forward_backward(stepper, x, classes)
        stepper.step().read()
    synchronize(device)
    with no_synchronisation(device):
        results = []
        for x, classes in batches[2:]:
            forward_backward(stepper, x, classes)
            results.append(stepper.step())
    assert [result.read().applied_steps + result.read().skipped_steps for result in results] == [3, 4, 5, 6]


def accuracy_after(
    device: torch.device, train_step, model: nn.Module, forward, seed: int, epochs: int = 6
) -> float:
    """Accuracy on the held-out digits; `train_step(x, classes)` does one update."""
    recipe = load_recipe(composed())
    images, labels = (recipe.train.columns[name].to(device) for name in ("image", "label"))
    generator = torch.Generator().manual_seed(seed)
    assert recipe.eval_transform is not None
    for _ in range(epochs):
        for indices in torch.randperm(len(labels), generator=generator).split(64):
            batch = {"image": images[indices.to(device)], "label": labels[indices.to(device)]}
            train_step(recipe.eval_transform(batch)["image"], batch["label"])
    model.eval()
    held_out = recipe.eval_transform({name: c.to(device) for name, c in recipe.validation.columns.items()})
    with torch.no_grad(), forward():
        predicted = model(held_out["image"]).argmax(dim=1)
    return (predicted == held_out["label"]).float().mean().item()


def fresh_model(device: torch.device, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return load_recipe(composed()).build_model().to(device)


def ours(device: torch.device, seed: int) -> float:
    model = fresh_model(device, seed)
    stepper = Stepper(model, SGD(0.05, 0.9, True, 5e-4), Policy.fp16(), reference_count=64)

    def step(x: Tensor, classes: Tensor) -> None:
        forward_backward(stepper, x, classes)
        stepper.step()

    return accuracy_after(device, step, model, stepper.forward, seed)


def with_grad_scaler(
    device: torch.device,
    model: nn.Module,
    forward: Callable[[], contextlib.AbstractContextManager[None]],
    seed: int,
) -> float:
    optimizer = torch.optim.SGD(  # not fused: torch 2.13 has no fused SGD for the tensors of replicate
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    scaler = torch.amp.GradScaler(device.type)

    def step(x: Tensor, classes: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with forward():
            loss = F.cross_entropy(model(x).float(), classes)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return accuracy_after(device, step, model, forward, seed)


def autocast(device: torch.device, seed: int) -> float:
    def forward() -> contextlib.AbstractContextManager[None]:
        return torch.autocast(device.type, dtype=torch.float16)

    return with_grad_scaler(device, fresh_model(device, seed), forward, seed)


def replicated(device: torch.device, seed: int) -> float:
    """Norms apart: they take fp16 inputs with fp32 weights, but no fp16 weights beside fp32 statistics."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = fresh_model(device, seed)
    for module in list(model.modules()):
        if isinstance(module, nn.BatchNorm2d):
            replicate(module, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    replicate(model, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))
    return with_grad_scaler(device, model, contextlib.nullcontext, seed)


@pytest.mark.parametrize("theirs", [autocast, replicated])
@pytest.mark.usefixtures("group_of_one")
def test_accuracy_is_that_of_torch_with_grad_scaler(gpu, theirs) -> None:
    seeds = range(3)
    mean_ours = sum(ours(gpu, seed) for seed in seeds) / len(seeds)
    mean_theirs = sum(theirs(gpu, seed) for seed in seeds) / len(seeds)
    assert abs(mean_ours - mean_theirs) < 0.01
    assert mean_ours > 0.95


def test_the_comparison_of_states_sees_a_difference(device) -> None:
    one, other = stepper_of(device, Policy.fp16()), stepper_of(device, Policy.fp16())
    assert state_on_host(one) == state_on_host(other)
    state = other.state().clone()
    state.weights["0.weight"][0] += 1e-3
    other.load(state)
    assert state_on_host(one) != state_on_host(other)


@pytest.mark.filterwarnings("ignore:RNN module weights")  # not in cuDNN's order: it copies them at each call
@pytest.mark.parametrize("name", ["amp_fp16", "fp16", "bf16"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_learn(device, kind, name) -> None:
    """cuDNN wants all parameters of such a layer in one dtype."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": kind(8, 32, num_layers=2, batch_first=True), "head": nn.Linear(32, 3)})
    stepper = Stepper(model.to(device), AdamW(0.01), Policy.named(name), reference_count=64)
    x, classes = torch.randn(64, 5, 8, device=device), torch.randint(3, (64,), device=device)
    losses = []
    for _ in range(30):
        with stepper.forward():
            logits = model["head"](model["rnn"](x)[0][:, -1]).float()
        stepper.backward(F.cross_entropy(logits, classes, reduction="sum"), len(classes))
        losses.append(stepper.step().read().loss)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_an_adapted_optimizer_goes_on_from_a_state_on_the_host(device, kind) -> None:
    """As a checkpoint gives it. torch keeps its count of steps there, and all else on the device."""
    digests = []
    for resumes in (False, True):
        torch.manual_seed(0)
        steppers = [
            Stepper(conv_net().to(device), TorchOptimizer(kind, 0.01), Policy.fp16(), reference_count=64)
            for _ in range(2)
        ]
        stepper = steppers[0]
        for step in range(6):
            if step == 3 and resumes:
                state = stepper.state().clone()
                for tensors in (state.weights, state.optimizer, state.buffers):
                    tensors |= {key: value.cpu() for key, value in tensors.items()}
                stepper = steppers[1]
                stepper.load(state)
            forward_backward(stepper, *batch_of(device, step))
            stepper.step()
        digests.append(state_on_host(stepper))
    assert digests[0] == digests[1]
