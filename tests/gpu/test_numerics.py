"""On a GPU: the contract of a step, on the device's own kernels and the compiler's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from launcher.checkpoint.run_state import TrainProgress, identity_of, take_snapshot
from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, DDPOptions, Policy, Stepper
from launcher.engine.optim.update import DEVICE_CHUNK, StepScalars, Updater
from launcher.engine.params.flat_buffers import Shard
from launcher.trainer.diagnostics.exponents import count_exponents
from launcher.trainer.diagnostics.nonfinite import diagnose
from launcher.trainer.progress import StepIndex
from scripts.bench.baselines import Setup, raw
from scripts.bench.gpu_road import profiled, resnet_steps
from tests.configs import composed
from tests.engine.observe import weights_are_rounded_masters
from tests.gpu.steps import BATCH, batch_of, forward_backward, state_on_host, stepper_of
from tests.gpu.test_step import no_synchronisation
from tests.models import conv_net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # the compiler's own, at import
]


def trained(stepper: Stepper, device: torch.device, steps: int = 6) -> Stepper:
    for step in range(steps):
        forward_backward(stepper, *batch_of(device, step))
        stepper.step()
    return stepper


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_half_weights_are_the_rounded_masters(device, name) -> None:
    stepper = stepper_of(device, Policy.named(name))
    for step in range(6):
        forward_backward(stepper, *batch_of(device, step))
        stepper.step()
        assert weights_are_rounded_masters(stepper), step


@pytest.mark.parametrize("name", ["fp16", "pure_fp16", "bf16", "fp32"])
@pytest.mark.parametrize("optimizer", [SGD(0.05, 0.9, True, 5e-4), AdamW(0.01)], ids=["sgd", "adamw"])
def test_the_plain_update_of_a_device_gives_the_values_of_the_host(device, optimizer, name) -> None:
    """One update of the same buffers, and a skipped one, which leaves every bit."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(1000, generator=generator)
    grad = 60000 * torch.randn(1000, generator=generator).clamp(-1, 1)
    policy, found = Policy.named(name), []
    for place in (torch.device("cpu"), device):
        weight = master.to(policy.weights).to(place)
        own = {"fp32": weight, "pure_fp16": None}.get(name, master.to(place))
        shard = Shard(weight, own, grad.to(policy.gradient_dtype).to(place))
        updater = Updater([shard], optimizer)
        for skip in (False, True):
            updater.step(
                StepScalars(
                    torch.tensor(1 / 3, device=place),
                    torch.tensor(0.01, dtype=torch.float64, device=place),
                    torch.tensor(1.0, device=place),
                    torch.tensor(skip, device=place),
                )
            )
            exact = shard.weight if shard.master is None else shard.master
            found.append([exact.cpu(), *(state.cpu() for state in updater.tensors())])
        if shard.half and shard.master is not None:
            assert torch.equal(shard.weight, shard.master.to(shard.weight.dtype))
    for after, skipped in (found[:2], found[2:]):
        assert all(map(torch.equal, after, skipped))
    for host, there in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(host, there, rtol=1e-3 if name == "pure_fp16" else 1e-5, atol=1e-6)


def test_the_plain_update_takes_a_chunk_of_memory(gpu) -> None:
    shape = (2 * DEVICE_CHUNK + 1000,)
    shard = Shard(
        torch.zeros(shape, dtype=torch.float16, device=gpu),
        torch.zeros(shape, device=gpu),
        torch.zeros(shape, dtype=torch.float16, device=gpu),
    )
    updater = Updater([shard], AdamW(0.01))
    scalar = torch.ones((), device=gpu)
    scalars = StepScalars(
        scalar, scalar.double(), scalar.long(), torch.zeros((), dtype=torch.bool, device=gpu)
    )
    before = torch.cuda.memory_allocated(gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    updater.step(scalars)
    assert torch.cuda.max_memory_allocated(gpu) - before < 4 * DEVICE_CHUNK + 2**20


@pytest.mark.parametrize("ddp", [DDPOptions(), DDPOptions(overlap=False)], ids=str)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.usefixtures("same_bits")
def test_a_group_of_one_gives_the_bits_of_none(device, group_of_one, ddp, k) -> None:
    states = []
    for group in (None, group_of_one):
        stepper = stepper_of(device, Policy.fp16(), group=group, ddp=ddp, micro_batches=k)
        for step in range(6):
            for part in range(k):
                forward_backward(stepper, *batch_of(device, 10 * step + part, BATCH // k))
            stepper.step()
        states.append(state_on_host(stepper))
    assert states[0] == states[1]


@pytest.mark.usefixtures("same_bits")
def test_micro_batches_give_the_gradient_of_the_large_batch(device) -> None:
    """Within fp32 rounding; without BatchNorm, whose statistics are those of a micro-batch."""
    masters = []
    for k in (1, 4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)
        stepper = Stepper(model, SGD(0.1), Policy.fp32(), micro_batches=k, reference_count=BATCH)
        x, classes = batch_of(device, 0)
        for part in range(k):
            forward_backward(stepper, x.chunk(k)[part], classes.chunk(k)[part])
        stepper.step()
        masters.append(stepper.named_masters())
    for name, master in masters[0].items():
        torch.testing.assert_close(master, masters[1][name], rtol=1e-4, atol=1e-5)


def test_exponents_are_counted_as_on_a_cpu_and_nobody_waits(device) -> None:
    gradients = {
        dtype: torch.randn(1000).mul(2.0 ** torch.randint(-30, 10, (1000,))).to(dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    }
    there = {str(dtype): gradient.to(device) for dtype, gradient in gradients.items()}
    here = {str(dtype): gradient for dtype, gradient in gradients.items()}
    index = StepIndex(0, 0, 1)
    count_exponents(there).read(index, 1024.0)
    with no_synchronisation(device):
        counts = count_exponents(there)
    found, wanted = counts.read(index, 1024.0), count_exponents(here).read(index, 1024.0)
    assert (found.histogram, found.layers) == (wanted.histogram, wanted.layers)


def test_the_culprit_of_a_step_and_of_a_pass_is_named(device) -> None:
    stepper = stepper_of(device, Policy.fp16())
    x, classes = batch_of(device, 0)
    x[0] = 1e30  # finite, but not in half precision
    forward_backward(stepper, x, classes)
    report = stepper.step().read()
    assert report.skipped
    assert report.bad_losses == 1

    def run() -> None:
        with stepper.forward():
            stepper.model(x)

    finding = diagnose(stepper.model, run)
    assert finding is not None
    assert (finding.name, finding.inputs_finite) == ("0", True)


@pytest.mark.parametrize("name", ["amp_fp16", "fp16"])
def test_channels_last_is_kept_in_weights_gradients_and_activations(device, name) -> None:
    model = conv_net().to(device).to(memory_format=torch.channels_last)
    before = {key: p.stride() for key, p in model.named_parameters()}
    stepper = Stepper(model, SGD(0.1), Policy.named(name), reference_count=BATCH)
    seen = []
    model[3].register_forward_hook(lambda module, inputs, output: seen.append(output))
    x, classes = batch_of(device, 0)
    forward_backward(stepper, x.contiguous(memory_format=torch.channels_last), classes)
    stepper.step()
    assert {key: p.stride() for key, p in model.named_parameters()} == before
    gradients = stepper.layout.gradients()
    assert gradients["3.weight"].stride() == before["3.weight"]
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_a_snapshot_is_of_its_step_while_the_training_goes_on(device) -> None:
    env = WorkerEnv(0, 1, 0, 1, device, None)
    stepper = trained(stepper_of(device, Policy.fp16()), device)
    identity = identity_of(composed(), stepper.model, 100)
    for start in (10, 20):
        expected = state_on_host(stepper)
        snapshot = take_snapshot(stepper, env, identity, TrainProgress(0, 6, 6))
        assert snapshot is not None
        for step in range(start, start + 4):
            forward_backward(stepper, *batch_of(device, step))
            stepper.step()
        engine = snapshot.engine
        tensors = [*engine.weights.values(), *engine.optimizer.values(), *engine.buffers.values()]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        assert [tensor.double().flatten().tolist() for tensor in tensors] == expected


def test_the_profiler_counts_no_synchronisation(device) -> None:
    """The runtime's own calls: the debug mode of torch does not know them all."""
    _, step = resnet_steps(device)
    counts = profiled(step, device)
    assert counts["synchronisations"] == 0
    assert counts["operations"] > 100


def test_the_peak_of_memory_is_not_above_that_of_autocast(gpu) -> None:
    build = gpu_resnet()
    x, classes = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    setup = Setup(device=gpu, channels_last=True)
    batch = setup.laid_out(x.to(gpu)), classes.to(gpu)
    theirs = partial(raw(build(), setup), batch)
    peaks = [peak(theirs, gpu)]
    del theirs, batch
    torch.cuda.empty_cache()
    model = build().to(gpu).to(memory_format=torch.channels_last)
    stepper = Stepper(model, SGD(1e-3, 0.9, True, 5e-4), Policy.fp16(), reference_count=32)
    x, classes = x.to(gpu).contiguous(memory_format=torch.channels_last), classes.to(gpu)

    def step() -> None:
        forward_backward(stepper, x, classes)
        stepper.step()

    peaks.append(peak(step, gpu))
    assert peaks[1] <= peaks[0]


def gpu_resnet():
    from launcher.recipe import registry_of

    build = registry_of(None).models["resnet18"]
    return lambda: build(num_classes=10, in_channels=3, image_size=32)


def peak(step, device: torch.device) -> int:
    step()  # in the first one cuDNN tries algorithms, with memory of their own
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)
