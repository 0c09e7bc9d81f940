"""The session of measurements on a GPU: failures first, each part ended in time, a dry run of all of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from scripts.bench.gpu_session import SKIPPED, Part, failures_first, parse, parts, session
from tests.limits import at_most

ROOT = Path(__file__).parents[2]
MEASURED = "import json, sys; json.dump({'H': 1.5}, open(sys.argv[1], 'w')); print('H 1.5')"


def test_failures_come_first_and_each_part_leaves_its_trace(tmp_path, capsys) -> None:
    todo = [
        Part("measures", ("-c", MEASURED, "{json}"), 20),
        Part("nothing to do", ("-c", f"raise SystemExit({SKIPPED})"), 20),
        Part("hangs", ("-c", "import time; time.sleep(60)"), 0.5),
        Part("breaks", ("-c", "print('first'); raise ValueError('no kernel image')"), 20),
    ]
    file = tmp_path / "gpu.json"
    outcomes = session(todo, 1, file, dry_run=True)
    content = json.loads(file.read_text())
    found = {part["part"]: part for part in content["parts"]}
    assert list(found) == ["breaks", "hangs", "nothing to do", "measures"]
    assert [outcome.part for outcome in failures_first(outcomes)] == list(found)
    assert found["breaks"]["exit_code"] == 1
    assert "ValueError: no kernel image" in found["breaks"]["output"]
    assert (found["measures"]["found"], found["measures"]["told"]) == ({"H": 1.5}, "H 1.5")
    assert found["hangs"]["seconds"] < at_most(10)
    assert "ValueError: no kernel image" in capsys.readouterr().out
    (late,) = session([Part("late", ("-c", ""), 20)], 0.0, tmp_path / "late.json", dry_run=True)
    assert late.state == "no time"


def test_what_is_asked_for_first_fits_into_the_session_however_slow() -> None:
    first = parts(arguments := parse([]))[:4]
    assert [part.name for part in first] == ["H3", "H2", "H5", "H8"]
    assert sum(part.limit_s for part in first) <= 60 * arguments.minutes


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
    assert len(states) == len(parts(parse([])))
