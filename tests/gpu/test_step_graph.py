"""On a GPU: a step recorded in a CUDA graph gives the bits of an ordinary one, in the engine and in runs."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from launcher.checkpoint.host_memory import HostMemory
from launcher.checkpoint.snapshot import Identity, Origin, Progress, Surroundings, stage
from launcher.distributed.env import WorkerEnv
from launcher.engine import HostRead, NoMemory, Policy, StepGraph, Stepper
from launcher.engine.recorder import Recorder
from tests.configs import composed
from tests.gpu.conftest import on_cpu
from tests.gpu.steps import batch_of, forward_backward, state_on_host, stepper_of, synchronize
from tests.gpu.test_runs import CONVOLUTIONS, launched
from tests.gpu.test_step import no_synchronisation
from tests.recording import Tape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # the compiler's own, at import
]
STEPS = 20


def recorder() -> Recorder | None:
    return Tape() if on_cpu() else None


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["fp32", "amp_fp16", "fp16", "pure_fp16", "bf16"])
@pytest.mark.usefixtures("same_bits")
def test_replays_give_the_bits_of_ordinary_steps(device, name, compiled) -> None:
    """Overflows at the start, dropout, a smaller step now and then, a report that is read one step late."""
    if compiled and on_cpu():
        pytest.skip("the stand-in records torch's operations, not a compiler's")
    found = []
    for records in (True, False):
        torch.manual_seed(0)
        stepper = stepper_of(device, Policy.named(name), capturable=True, compiled=compiled)
        x, classes = batch_of(device, 99)

        def passes(stepper: Stepper = stepper, x: torch.Tensor = x, classes: torch.Tensor = classes) -> None:
            forward_backward(stepper, F.dropout(x, 0.1), classes)

        graph = StepGraph(stepper, recorder())
        if records:
            graph.record(passes)
        results = []
        for step in range(STEPS):
            small = step % 7 == 6
            new_x, new_classes = batch_of(device, step, 8 if small else 64)
            if small:
                forward_backward(stepper, F.dropout(new_x, 0.1), new_classes)
                results.append(stepper.step())
                continue
            x.copy_(new_x)
            classes.copy_(new_classes)
            if records:
                results.append(graph.replay())
            else:
                passes()
                results.append(stepper.step())
        reports = [result.read() for result in results]
        found.append((state_on_host(stepper), [(r.loss, r.scale, r.skipped, r.lr) for r in reports]))
        graph.release()
    assert str(found[0]) == str(found[1])
    if name in ("amp_fp16", "fp16"):
        assert any(report[2] for report in found[0][1]), "no step was skipped"


def test_no_replay_waits_for_the_device(device) -> None:
    stepper = stepper_of(device, Policy.fp16(), capturable=True)
    x, classes = batch_of(device, 0)
    graph = StepGraph(stepper, recorder())
    graph.record(lambda: forward_backward(stepper, x, classes))
    graph.replay().read()
    synchronize(device)
    with no_synchronisation(device):
        results = [graph.replay() for _ in range(3)]
    assert [result.read().applied_steps + result.read().skipped_steps for result in results] == [2, 3, 4]


@pytest.mark.usefixtures("same_bits")
def test_two_sizes_are_recorded_in_the_memory_of_the_larger(device) -> None:
    """Their replays alternate and give the bits of ordinary steps."""
    found = []
    for records in (True, False):
        torch.manual_seed(0)
        stepper = stepper_of(device, Policy.fp16(), capturable=True)
        inputs = [batch_of(device, 99, size) for size in (64, 40)]
        works = [partial(forward_backward, stepper, *each) for each in inputs]
        graph = StepGraph(stepper, recorder())
        if records:
            graph.record(works[0])
            alone = 0 if on_cpu() else torch.cuda.memory_reserved()
            graph.release()
            graph.record(*works)
            if not on_cpu():
                assert torch.cuda.memory_reserved() < 1.3 * alone
        for step in range(8):
            for place, values in zip(
                inputs[step % 2], batch_of(device, step, (64, 40)[step % 2]), strict=True
            ):
                place.copy_(values)
            if records:
                graph.replay(step % 2)
            else:
                works[step % 2]()
                stepper.step()
        found.append(state_on_host(stepper))
        graph.release()
    assert str(found[0]) == str(found[1])


@pytest.mark.parametrize("call", [2, 5])  # a rehearsal; the capture
def test_where_memory_runs_out_the_device_can_be_used_as_before(device, call) -> None:
    stepper = stepper_of(device, Policy.fp16(), capturable=True)
    x, classes = batch_of(device, 0)
    calls: list[int] = []

    def lacking() -> None:
        calls.append(1)
        forward_backward(stepper, x, classes)
        if len(calls) == call:
            if on_cpu():
                raise torch.OutOfMemoryError
            torch.empty(1 << 50, dtype=torch.uint8, device=device)

    graph = StepGraph(stepper, recorder())
    with pytest.raises(NoMemory):
        graph.record(lacking)
    forward_backward(stepper, x, classes)
    stepper.step().read()
    graph.record(lacking)
    graph.replay().read()
    synchronize(device)
    graph.release()


def test_a_read_is_refused_before_the_capture_and_leaves_the_device_usable(device) -> None:
    stepper = stepper_of(device, Policy.fp16(), capturable=True)
    x, classes = batch_of(device, 0)

    def reading() -> None:
        forward_backward(stepper, x, classes)
        x.sum().item()

    before = state_on_host(stepper)
    graph = StepGraph(stepper, recorder())
    with pytest.raises(HostRead):
        graph.record(reading)
    assert state_on_host(stepper) == before
    graph.record(lambda: forward_backward(stepper, x, classes))
    graph.replay().read()


def test_a_run_with_recorded_steps_ends_with_the_bits_of_one_without(gpu, tmp_path) -> None:
    """64 samples in batches of 24, so the last step of an epoch is smaller; evaluations and checkpoints."""
    (tmp_path / "mine.py").write_text(CONVOLUTIONS)
    words = ["recipe.uses=convolutions", "recipes.path=mine.py", "data.batch_size=24", "train.epochs=4"]
    digests = []
    for recorded in ("true", "false"):
        options = [f"train.cuda_graph={recorded}", f"run.dir={recorded}", "checkpoint.every_steps=5"]
        done = launched(tmp_path, *words, "train.deterministic=true", *options)
        assert done.returncode == 0, done.stderr
        assert ("cuda graph each step of 24 samples" in done.stdout) == (recorded == "true")
        digests.append(json.loads((tmp_path / recorded / "result.json").read_text())["weights_sha256"])
    assert digests[0] == digests[1]


def test_a_run_whose_loss_reads_is_refused_with_its_line(gpu, tmp_path) -> None:
    reading = CONVOLUTIONS.replace(
        "    return cross_entropy(", "    batch['x'].sum().item()\n    return cross_entropy("
    )
    (tmp_path / "mine.py").write_text(reading)
    words = ["recipe.uses=convolutions", "recipes.path=mine.py", "data.batch_size=16", "train.max_steps=2"]
    done = launched(tmp_path, *words, "train.cuda_graph=true", "run.dir=run")
    assert done.returncode == 2, done.stderr
    assert re.search(r"waits for the device at .*mine\.py:\d+, in loss", done.stderr), done.stderr
    done = launched(tmp_path, *words, "train.cuda_graph=auto", "run.dir=other")
    assert done.returncode == 0, done.stderr
    assert "cuda graph none: its loss or transform waits" in done.stdout


def test_a_snapshot_is_of_its_step_while_replays_go_on(device) -> None:
    """A replay waits for the copies as a whole."""
    env, memory = WorkerEnv(0, 1, 0, 1, device, None), HostMemory()
    stepper = stepper_of(device, Policy.fp16(), capturable=True)
    x, classes = batch_of(device, 0)
    graph = StepGraph(stepper, recorder())
    graph.record(lambda: forward_backward(stepper, x, classes))
    identity = Identity.of(composed(), stepper.model, 100)
    for _ in range(6):
        graph.replay()
    for _ in range(2):
        expected = state_on_host(stepper)
        staged = stage(
            stepper, env, identity, Origin(1, "none"), Progress(0, 6, 6), None, Surroundings(), memory
        )
        assert staged is not None
        for _ in range(4):
            graph.replay()
        engine = staged().engine
        tensors = [*engine.weights.values(), *engine.optimizer.values(), *engine.buffers.values()]
        assert [tensor.double().flatten().tolist() for tensor in tensors] == expected


def test_recorded_collectives_of_nccl_end_with_their_group(gpu, group_of_one) -> None:
    """A graph that holds the communicator's kernels must be dropped before the group is destroyed."""
    stepper = stepper_of(gpu, Policy.fp16(), group=group_of_one)
    x, classes = batch_of(gpu, 0)
    graph = StepGraph(stepper)
    try:
        graph.record(lambda: forward_backward(stepper, x, classes))
        graph.replay().read()
    finally:
        graph.release()
