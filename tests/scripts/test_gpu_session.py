"""The session of measurements on a GPU: failures first, each part ended in time, a dry run of all of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from scripts.bench import gpu_road, gpu_session
from scripts.bench.gpu_session import SKIPPED, Part, failures_first, main, parse, parts, session
from scripts.bench.gpu_speed import BYTES_PER_PHOTOGRAPH, Bench, Task, flops_of
from tests.limits import at_most

ROOT = Path(__file__).parents[2]
MEASURED = "import json, sys; json.dump({'H': 1.5}, open(sys.argv[1], 'w')); print('H 1.5')"
LEAVES_A_CHILD = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid)"


def test_failures_come_first_and_each_part_leaves_its_trace(tmp_path, capsys) -> None:
    todo = [
        Part("measures", ("-c", MEASURED, "{json}"), 20),
        Part("nothing to do", ("-c", f"raise SystemExit({SKIPPED})"), 20),
        Part("hangs", ("-c", "import time; time.sleep(60)"), 0.5),
        Part("breaks", ("-c", "print('first'); raise ValueError('no kernel image')"), 20),
        Part("leaves a child", ("-c", LEAVES_A_CHILD), 20),
    ]
    file = tmp_path / "gpu.json"
    outcomes = session(todo, 1, file, dry_run=True)
    content = json.loads(file.read_text())
    found = {part["part"]: part for part in content["parts"]}
    assert [part["part"] for part in content["parts"]][:3] == ["breaks", "hangs", "nothing to do"]
    assert found["breaks"]["exit_code"] == 1
    assert "ValueError: no kernel image" in found["breaks"]["output"]
    assert (found["measures"]["found"], found["measures"]["told"]) == ({"H": 1.5}, "H 1.5")
    assert found["hangs"]["seconds"] < at_most(10)
    assert [outcome.part for outcome in failures_first(outcomes)] == [p["part"] for p in content["parts"]]
    assert {"gpus", "versions", "date", "python"} <= set(content["machine"])
    wait_until_gone(int(found["leaves a child"]["told"]))
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if " s  " in line] == [
        part.name.split()[0] for part in todo
    ]
    failure = printed.index("ValueError: no kernel image", printed.index("breaks, exit code 1:"))
    assert failure < printed.index("leaves a child"), "a session that is cut off has said it"


def wait_until_gone(pid: int) -> None:
    """A killed process stays until the kernel has run it once more, and then until init collects it."""
    status, deadline = Path(f"/proc/{pid}/status"), time.monotonic() + 10
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while "State:\tZ" not in status.read_text():
            assert time.monotonic() < deadline, f"{pid} lives on"
            time.sleep(0.02)


@pytest.mark.parametrize("starting_s", [0, 1])
def test_a_session_that_is_ended_ends_its_part(starting_s, tmp_path) -> None:
    """Its parts are sessions of their own, so that no signal reaches them but through it.

    Also while it waits for a part to start, which may already print.
    """
    code = f"""
import subprocess, sys, time
from pathlib import Path
from scripts.bench import gpu_road, gpu_session
sleeps = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
start = subprocess.Popen
def slow(*words, **more):
    started = start(*words, **more)
    time.sleep({starting_s})
    return started
subprocess.Popen = slow
part = gpu_session.Part("sleeps", ("-c", sleeps), 50)
gpu_session.parts = lambda arguments: [part]
gpu_session.tempfile.tempdir = {str(tmp_path)!r}
gpu_session.main(["--json", {str(tmp_path / "gpu.json")!r}])
"""
    session = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (texts := [text for path in tmp_path.glob("*/output") if (text := path.read_text())]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        session.terminate()
        assert session.wait(30) == 128 + signal.SIGTERM
        assert not Path(f"/proc/{int(texts[0])}/cmdline").exists()
    finally:
        session.kill()
        session.wait()


def test_what_there_is_no_time_for_is_said(tmp_path) -> None:
    (outcome,) = session([Part("late", ("-c", ""), 20)], 0.0, tmp_path / "gpu.json", dry_run=True)
    assert outcome.state == "no time"


def test_wheels_are_installed_first_and_without_network(tmp_path) -> None:
    (tmp_path / "hydra_core-1.3.8-py3-none-any.whl").touch()
    first, *rest = parts(parse(["--wheels", str(tmp_path)]))
    assert first.command[:5] == ("-m", "pip", "install", "--no-index", "--no-deps")
    assert first.command[-1].endswith("hydra_core-1.3.8-py3-none-any.whl")
    assert [part.name for part in rest][4:9] == ["kernels", "launcher", "restart", "wires", "tests/gpu"]


def test_what_is_asked_for_first_fits_into_the_session_however_slow() -> None:
    first = parts(arguments := parse([]))[:4]
    assert [part.name for part in first] == ["H3", "H2", "H5", "H8"]
    assert sum(part.limit_s for part in first) <= 60 * arguments.minutes
    assert all(part.limit_s >= 90 for part in first), "a cold start"


@pytest.mark.parametrize(("words", "writes"), [([], True), (["--dry-run"], False)])
def test_a_dry_run_leaves_nothing_where_a_result_would_lie(tmp_path, monkeypatch, words, writes) -> None:
    monkeypatch.setattr(gpu_session, "RESULTS", tmp_path / "gpu.json")
    monkeypatch.setattr(gpu_session, "parts", lambda arguments: [Part("measures", ("-c", ""), 20)])
    assert main(words) == 0
    assert (tmp_path / "gpu.json").exists() == writes


def bench(memory_bytes: float) -> Bench:
    return Bench(torch.device("cuda"), dry_run=False, memory_bytes=int(memory_bytes))


@pytest.mark.parametrize(
    ("memory_bytes", "batch", "sequences"),
    [(14.6 * 2**30, 64, 4), (15.8 * 2**30, 64, 4), (23.7 * 2**30, 128, 8), (79.2 * 2**30, 256, 8)],
    ids=["T4", "V100", "RTX 3090", "H100"],
)
def test_batches_fit_a_small_gpu(memory_bytes, batch, sequences) -> None:
    assert bench(memory_bytes).photographs == batch
    assert len(bench(memory_bytes).text(causal=True).inputs) == sequences


def test_a_photograph_takes_as_much_as_the_batches_are_chosen_by() -> None:
    """What ResNet-50 keeps for its backward pass, in fp32, beside its weights."""
    task = bench(80e9).resnet("resnet50", 224, 2)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        held.append(tensor)
        return tensor

    held: list[torch.Tensor] = []
    model = task.model().to("meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(task.inputs.to("meta")).sum()
    weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert (sum(kept.values()) - weights) / 2 == pytest.approx(BYTES_PER_PHOTOGRAPH, rel=0.15)


def test_operations_are_counted_without_memory() -> None:
    task = Task(lambda: nn.Linear(8, 4), torch.randn(3, 8), torch.zeros(3, dtype=torch.int64))
    assert flops_of(task) == 2 * 2 * 3 * 8 * 4  # forward, and the gradient of the weights


@pytest.mark.slow
def test_without_a_gpu_the_parts_are_skipped(tmp_path, capsys) -> None:
    assert main(["--only", "H3", "--json", str(tmp_path / "gpu.json")]) == 0
    assert "no CUDA device: --dry-run runs all of it" in capsys.readouterr().out


def test_every_wire_gives_a_group_of_one_the_bits_of_no_group(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)  # restored: the check sets both
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert len(gpu_road.wires(torch.device("cpu"), dry_run=True)) == 6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_goes_through_every_part(tmp_path) -> None:
    file = tmp_path / "gpu.json"
    done = subprocess.run(
        [ROOT / "scripts" / "bench" / "gpu", "--dry-run", "--minutes", "9", "--json", file],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout
    states = {part["part"]: part["state"] for part in json.loads(file.read_text())["parts"]}
    assert {state for part, state in states.items() if part != "H6"} == {"done"}
    assert len(states) == 16
