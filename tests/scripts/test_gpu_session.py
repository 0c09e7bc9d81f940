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

from scripts.bench.gpu_session import SKIPPED, Part, failures_first, main, parse, parts, session
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
    assert capsys.readouterr().out.count("\n") == len(todo)


def wait_until_gone(pid: int) -> None:
    """A killed process stays until the kernel has run it once more, and then until init collects it."""
    status, deadline = Path(f"/proc/{pid}/status"), time.monotonic() + 10
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while "State:\tZ" not in status.read_text():
            assert time.monotonic() < deadline, f"{pid} lives on"
            time.sleep(0.02)


def test_a_session_that_is_ended_ends_its_part(tmp_path) -> None:
    """Its parts are sessions of their own, so that no signal reaches them but through it."""
    code = f"""
import sys
from pathlib import Path
from scripts.bench import gpu_session
sleeps = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
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
    assert [part.name for part in rest][:5] == ["kernels", "launcher", "restart", "wires", "tests/gpu"]


def test_without_a_gpu_the_parts_are_skipped(tmp_path, capsys) -> None:
    assert main(["--only", "H3", "--json", str(tmp_path / "gpu.json")]) == 0
    assert "no CUDA device: --dry-run runs all of it" in capsys.readouterr().out


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
