"""The soak can fail: each thing that must hold after a run is broken once, and noticed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from launcher.checkpoint.manifest import verify
from scripts.soaking import main as soak
from scripts.soaking import run as running
from scripts.soaking.checks import MARK, Expected, alive_with, problems_of_run
from scripts.soaking.faults import damage
from scripts.soaking.run import Failed, Plan, Run
from tests.snapshots import publish_steps

ROOT = Path(__file__).parents[2]
EXPECTED = Expected("the digest", steps=6, skipped=(2,))
RESULT = {"state": "done", "exit": 0, "steps": 6, "weights_sha256": "the digest", "skipped_steps": 1}
STATUS = {"state": "done", "exit": 0, "step": 6}


def events() -> list[dict[str, Any]]:
    steps = [{"event": "step", "step": step} for step in range(1, 7)]
    others = [{"event": "eval", "step": 6}, {"event": "end", "step": 6}]
    return [*steps[:2], {"event": "overflow", "step": 2}, *steps[2:], *others]


def write_events(run_dir: Path, told: list[dict[str, Any]]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """What a run of six steps leaves, the checkpoint of whose step 3 was damaged on the way."""
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    (tmp_path / "status.json").write_text(json.dumps(STATUS))
    write_events(tmp_path, events())
    folder = tmp_path / "checkpoints"
    publish_steps(folder, 3)[0].rename(folder / "damaged-step-00000003")
    publish_steps(folder, 3, 4, 6)
    return tmp_path


DAMAGED = ["step-00000003"]


def test_a_run_with_nothing_wrong_has_no_problems(run_dir: Path) -> None:
    assert problems_of_run(run_dir, EXPECTED, DAMAGED) == []


def lose_a_byte(run_dir: Path) -> None:
    file = run_dir / "checkpoints" / "step-00000006" / "weights.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def rewrite(name: str, **changes: Any) -> Callable[[Path], None]:
    values = RESULT if name == "result.json" else STATUS
    return lambda run_dir: (run_dir / name).write_text(json.dumps(values | changes)) and None


def tell(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Callable[[Path], None]:
    return lambda run_dir: write_events(run_dir, change(events()))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "another digest": (rewrite("result.json", weights_sha256="another"), "weights_sha256 is another"),
    "not done": (rewrite("result.json", state="failed"), "result.json: state is failed"),
    "a skip more": (rewrite("result.json", skipped_steps=2), "skipped_steps is 2, not 1"),
    "a status of before": (rewrite("status.json", state="running"), "status.json: state is running"),
    "a step told twice": (tell(lambda told: [told[0], *told]), "steps [1] are recorded twice"),
    "a step never told": (tell(lambda told: told[1:]), "steps [1] are missing"),
    "steps out of order": (tell(lambda told: [told[1], told[0], *told[2:]]), "not in order"),
    "no skip": (tell(lambda told: [*told[:2], *told[3:]]), "steps [] were skipped, not [2]"),
    "an evaluation told twice": (
        tell(lambda told: [*told[:-1], told[-2], told[-1]]),
        "the evaluations of steps [6] are recorded twice",
    ),
    "no end": (tell(lambda told: told[:-1]), "its only end event"),
    "a sink given up": (
        tell(lambda told: [{"event": "warning", "step": 0, "text": "x is given up: no room"}, *told]),
        "x is given up",
    ),
    "a damaged checkpoint": (lose_a_byte, "step-00000006: weights.safetensors has"),
    "a damaged one under its old name": (
        lambda run_dir: shutil.rmtree(run_dir / "checkpoints" / "damaged-step-00000003"),
        "step-00000003 was damaged and is not set aside",
    ),
    "damage of which nobody knows": (
        lambda run_dir: (
            shutil.copytree(
                run_dir / "checkpoints" / "step-00000004", run_dir / "checkpoints" / "damaged-step-00000004"
            )
            and None
        ),
        "damaged-step-00000004 was not damaged on purpose",
    ),
    "an unfinished checkpoint": (
        lambda run_dir: (run_dir / "checkpoints" / ".unfinished-step-00000006-ab").mkdir(),
        ".unfinished-step-00000006-ab is left over",
    ),
    "no checkpoint of the end": (
        lambda run_dir: shutil.rmtree(run_dir / "checkpoints" / "step-00000006"),
        "no checkpoint of the last step, 6",
    ),
    "a temporary file": (
        lambda run_dir: (run_dir / ".status.json.ab12.tmp").touch(),
        ".status.json.ab12.tmp was left",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_noticed(run_dir: Path, name) -> None:
    break_it, text = BROKEN[name]
    break_it(run_dir)
    problems = problems_of_run(run_dir, EXPECTED, DAMAGED)
    assert [problem for problem in problems if text in problem], problems
    assert len(problems) == 1, problems


def test_every_damage_is_one(tmp_path: Path) -> None:
    for seed in range(30):
        (path,) = publish_steps(tmp_path / str(seed), 1)
        random = Random(seed)
        damage(random.choice(sorted(path.iterdir())), random)
        assert verify(path), seed


@pytest.fixture
def orphan():
    """A process that outlives the one that started it."""
    starter = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!"],
        env=os.environ | {MARK: "a-test-1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    yield starter, pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    starter.stdout.close()
    starter.wait(30)


def test_an_orphan_is_noticed(tmp_path: Path, orphan, monkeypatch) -> None:
    monkeypatch.setattr(running, "GONE_S", 0.2)
    starter, pid = orphan
    assert pid in alive_with("a-test-1")
    assert alive_with("a-test-2") == []
    run = Run(Plan(2, 6), tmp_path, "a-test", limit_s=10)
    run._number, run._process = 1, starter
    with pytest.raises(Failed, match=f"orphans, 0.2 s after the parent: pid {pid} "):
        run.exit_code()
    run.__exit__(None, None, None)
    deadline = time.monotonic() + 30
    while alive_with("a-test-1"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_verdict_on_somebody_else_is_noticed(tmp_path: Path) -> None:
    run = Run(Plan(2, 6), tmp_path, "a-test", limit_s=10)
    line = "restart 1 of 9: rank 0 was killed by SIGKILL (pid 12) in wire of step 3; resuming from the start"
    (tmp_path / "command.err").write_text(f"{line}\n{line}\n")
    run.wait_for_restart(12)
    with pytest.raises(Failed, match="the fault hit pid 34, but the parent reports: restart 1 of 9: rank 0"):
        run.wait_for_restart(34)


def test_a_failure_is_told_with_its_seed_and_its_files_stay(tmp_path: Path, monkeypatch, capsys) -> None:
    def fail(*arguments: Any) -> None:
        tally = next(each for each in arguments if isinstance(each, soak.Tally))
        tally.rounds += 1
        tally.tell("round 1,   2.0 s: SIGUSR1")
        raise Failed("something did not hold")

    monkeypatch.setattr(soak, "undisturbed", lambda *_: EXPECTED)
    monkeypatch.setattr(soak, "one_round", fail)
    assert soak.main(["--quick", "--seed", "5", "--keep", str(tmp_path / "kept")]) == 1
    told = capsys.readouterr().out
    assert "soak: failed in round 1 (seed 5): something did not hold" in told
    assert "injected faults: round 1,   2.0 s: SIGUSR1" in told
    assert f"directory: {tmp_path / 'kept'}" in told
    assert (tmp_path / "kept").is_dir()


def test_the_same_seed_draws_the_same_faults() -> None:
    drawn = [list(soak.drawn(list(soak.FAULTS), Random(seed), once=True)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(sorted(names) == sorted(soak.FAULTS) for names in drawn)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_soak_is_survived(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "soaking" / "main.py"), "--quick"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"soak: 5 faults in 1 rounds, all survived, digest \w{16} equal in all", last)
    assert list(tmp_path.iterdir()) == []


def test_runs_that_are_kept_are_not_those_of_the_next_call(tmp_path: Path, monkeypatch, capsys) -> None:
    """Else a run of another length, which is there and done, would be the reference."""
    used: list[Path] = []

    def undisturbed(plan: Plan, directory: Path) -> Expected:
        assert not directory.exists()
        directory.mkdir()
        used.append(directory)
        raise Failed("seen")

    monkeypatch.setattr(soak, "undisturbed", undisturbed)
    for words in (["--keep", str(tmp_path / "kept")], ["--keep", str(tmp_path / "kept"), "--quick"]):
        assert soak.main(words) == 1
    assert [path.parent.parent for path in used] == [tmp_path / "kept"] * 2
    assert str(used[-1].parent) in capsys.readouterr().out
