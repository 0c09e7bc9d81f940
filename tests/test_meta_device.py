"""Every part of a run on a device that is not the CPU, without one: tensors on `meta`, reads counted.

Values do not matter here. What fails is what would fail or wait on a GPU: a tensor on the wrong device, and a
read of a value within a step.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher import worker
from launcher.checkpoint.run_state import Snapshot, TrainProgress, identity_of, take_snapshot
from launcher.checkpoint.storage import load
from launcher.config.schema import Config
from launcher.data.batch_plan import BatchPlan
from launcher.distributed import process_group
from launcher.distributed.env import LaunchEnv, WorkerEnv
from launcher.engine import AdamW, DDPOptions, Policy, Stepper
from launcher.engine.limits import VOTES
from launcher.errors import DivergedError
from launcher.recipe import load_recipe
from launcher.trainer import results
from launcher.trainer.builders import build
from tests.configs import composed
from tests.meta_device import META, MetaDevice, fake_group
from tests.models import conv_net

POLICIES = ["fp32", "amp_fp16", "fp16", "pure_fp16", "bf16", "amp_bf16"]
WIRES = [None, DDPOptions(), DDPOptions(shard_optimizer=True)]


PLAN = BatchPlan(64, 32, 16, 2, 0, 0, drop_last=True)


def stepper_of(
    policy: str, group: torch.distributed.ProcessGroup | None, ddp: DDPOptions | None, k: int
) -> Stepper:
    return Stepper(
        conv_net().to(META),
        AdamW(0.01),
        Policy.named(policy),
        group,
        ddp=ddp,
        micro_batches=k,
        reference_count=8,
        clip_norm=1.0,
        emulate=True,  # torch has no autocast for this device; the operations beside it are the same
    )


def step_on(stepper: Stepper, x: Tensor, classes: Tensor, k: int = 1) -> None:
    for _ in range(k):
        with stepper.forward():
            loss = F.cross_entropy(stepper.model(x).float(), classes, reduction="sum")
        stepper.backward(loss, len(x))
    stepper.step()


def batch() -> tuple[Tensor, Tensor]:
    return torch.empty(4, 3, 8, 8, device=META), torch.empty(4, dtype=torch.int64, device=META)


def pairs() -> list[object]:
    """Every policy with every wire; by default fp16 with each wire, and each policy with shards."""
    return [
        pytest.param(
            policy,
            ddp,
            id=f"{policy}-{name}",
            marks=[] if policy == "fp16" or name == "sharded" else [pytest.mark.slow],
        )
        for policy in POLICIES
        for name, ddp in zip(("alone", "native", "sharded"), WIRES, strict=True)
    ]


@pytest.mark.parametrize(("policy", "ddp"), pairs())
def test_no_step_reads_a_value_or_waits_for_an_upload(policy, ddp) -> None:
    """For one micro-batch and for two, in backward and in step."""
    for k in (1, 2):
        alone = contextlib.nullcontext()
        with alone if ddp is None else fake_group(2) as group, MetaDevice() as device:
            stepper = stepper_of(policy, group, ddp, k)
            x, classes = batch()
            step_on(stepper, x, classes, k)
            device.reads.clear()
            device.uploads.clear()
            for _ in range(2):
                step_on(stepper, x, classes, k)
            assert device.calls > 100
            assert device.reads == device.uploads == []


def test_with_batch_norms_of_all_ranks_gradients_travel_after_the_backward_pass(tmp_path) -> None:
    """Both use one communicator, and its calls come in one order on all ranks, whatever some leave unused."""
    for sync_bn in (False, True):
        config = composed(*RUN, f"model.sync_bn={str(sync_bn).lower()}")
        with fake_group(2) as group:
            env = WorkerEnv(0, 2, 0, 2, META, group)
            assert build.build_ddp(config, env).overlap is not sync_bn
            model = build.build_model(config, load_recipe(config), env, PLAN)
            norms = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
            assert [norm.process_group for norm in norms] == [group] * 20 * sync_bn


def test_reads_and_uploads_are_seen_where_there_are_some() -> None:
    with MetaDevice({"engine/stepper.py": 1.0}) as device:
        stepper = stepper_of("fp16", None, None, 1)
        device.reads.clear()
        device.uploads.clear()
        assert stepper.loss_scale == 1.0
        torch.ones(3).to(META)
        assert [read.split(":")[0] for read in device.reads] == ["engine/stepper.py loss_scale"]
        assert len(device.uploads) == 1
        with pytest.raises(RuntimeError, match="device"):
            torch.ones(3) + torch.ones(3, device=META)


@pytest.mark.parametrize("ddp", WIRES, ids=["alone", "native", "sharded"])
@pytest.mark.parametrize("policy", ["fp32", "fp16", "pure_fp16"])
def test_nothing_of_a_snapshot_stays_on_the_device(policy, ddp) -> None:
    alone = contextlib.nullcontext()
    with alone if ddp is None else fake_group(2) as group, MetaDevice():
        stepper = stepper_of(policy, group, ddp, 1)
        env = WorkerEnv(0, 1 if group is None else 2, 0, 1, META, group)
        identity = identity_of(composed(), stepper.model, 100)
        snapshot = take_snapshot(stepper, env, identity, TrainProgress(0, 1, 8))
    assert isinstance(snapshot, Snapshot)
    found = tensors_in(snapshot)
    assert len(found) > 20
    assert {tensor.device.type for tensor in found} == {"cpu"}


def tensors_in(snapshot: Snapshot) -> list[Tensor]:
    engine = snapshot.engine
    groups = (engine.weights, engine.optimizer, engine.buffers, snapshot.rank_buffers)
    return [tensor for group in groups for tensor in group.values()]


def packed(skipped: bool, bad_losses: float, applied_steps: float, skipped_steps: float) -> list[float]:
    """The numbers of a step as `StepNumbers` packs them: 64 samples, of a mean loss of 0.5."""
    step = [0.5, 1.0, 65536.0, 0.1, 64.0, skipped, bad_losses, applied_steps, skipped_steps, 0.0, bad_losses]
    return [*step, *[0.0] * VOTES]


# What the host is given to read: a loss scale, no skip, samples; a count to divide by; finite weights.
ANSWERS: dict[str, float | list[float]] = {
    "engine/result.py unpacked": packed(False, 0.0, 1.0, 0.0),
    "evaluation/evaluate.py over_ranks": [1.0, 51.0, 51.0, 0.0, 0.0],  # a fifth of 256 samples
    "metrics/classification.py confusion_matrix": [17.0, 0.0, 0.0] * 3 + [0.0, 0.0, 0.0],
    "engine/grads/reference_count.py agree": 32.0,  # once, in the first step
    "engine/grads/reference_count.py restart": 1.0,  # that step was kept
    "training/diagnostics/nonfinite.py": 1.0,
    "engine/precision/loss_scale.py counters": [65536.0, 6.0, 1.0, 6.0, 0.0, 0.0, 0.0],
}
RUN = (
    "data=synthetic",
    "data.batch_size=32",
    "data.micro_batch_size=16",
    "precision.emulate=true",
    "telemetry.gradient_histogram_every_steps=1",
    "train.log_every_steps=2",
    "tracker=none",
)

# The data, augmentations and loss of resnet18: its 18 layers would only take their time.
SMALL = """
from launcher.data import load_images
from launcher.recipe import Recipe, cross_entropy, recipe
from tests.models import conv_net

@recipe("small_images")
def small_images(config):
    images = load_images(config.data)
    return Recipe(
        conv_net,
        images.train,
        images.validation,
        cross_entropy,
        train_transform=images.train_transform(config.data.augment),
        eval_transform=images.eval_transform(),
        classes=images.classes,
    )
"""


@pytest.mark.parametrize(
    "words",
    [
        ("precision=fp16",),
        pytest.param(
            ("precision=amp_fp16", "optim=adamw", "optim.clip_norm=1.0"),
            marks=pytest.mark.slow,
            id="amp_fp16",
        ),
    ],
    ids=" ".join,
)
def test_a_whole_run_reads_as_much_in_two_steps_as_in_four(tmp_path, monkeypatch, words) -> None:
    """Worker, loop, telemetry, evaluation, checkpoint: none looks at a value in a step."""
    monkeypatch.setattr(process_group, "_device", lambda launch: META)
    monkeypatch.setattr(results, "write_page", lambda run_dir, telemetry: None)  # from files, with no device
    seen = []
    for steps in (2, 4):
        config = run_config(tmp_path / str(steps), *words, f"train.max_steps={steps}")
        with MetaDevice(ANSWERS) as device:
            worker.run(config, LaunchEnv(), None, "job")
        (path,) = (Path(config.run.dir) / "checkpoints").iterdir()
        assert load(path).progress.step == steps
        # A report is read one step late; on a GPU the host holds it by then.
        late = (
            "engine/result.py read",
            "engine/result.py unpacked",
            "engine/checks/step_warnings.py gradients",
        )
        reads = [read for read in device.reads if not read.startswith(late)]
        seen.append((Counter(reads), Counter(device.uploads)))
    assert seen[0] == seen[1]
    assert seen[0][0].total() > 10


def test_a_run_that_diverges_is_looked_into_on_another_device(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(process_group, "_device", lambda launch: META)
    config = run_config(
        tmp_path, "precision=fp16", "precision.loss_scale.max_bad_losses=1", "train.max_steps=2"
    )
    answers = ANSWERS | {"engine/result.py unpacked": packed(True, 1.0, 0.0, 1.0)}
    with (
        MetaDevice(answers),
        pytest.raises(DivergedError, match="The batch of that step, run again") as failure,
    ):
        worker.run(config, LaunchEnv(), None, "job")
    assert "could not be run again" not in str(failure.value)


def run_config(directory: Path, *words: str) -> Config:
    """Of a small network on images, with a run directory that is there, as its claim leaves it."""
    (directory / "run").mkdir(parents=True)
    (directory / "small.py").write_text(SMALL)
    own = (f"recipes.path={directory}/small.py", "recipe.uses=small_images")
    config = composed(*RUN, *own, "data.num_classes=3", "data.num_samples=256", *words)
    return replace(config, run=replace(config.run, dir=str(directory / "run")))
