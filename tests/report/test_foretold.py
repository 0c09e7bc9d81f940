"""The part of a page with what `plan` foretold of the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.report.foretold import foretold
from launcher.report.run_record import RunRecord
from launcher.run_dir.atomic import read_json, write_json
from tests.forked import launch_forked

PLAN = {
    "steps": 40,
    "parameters": 1000,
    "step_ms": 200.0,
    "wire_bytes_per_step": 2000.0,
    "state_bytes": 16000.0,
    "memory_bytes": 5e6,
    "checkpoint_bytes": 12000,
    "config": {"seed": "0", "optim.lr": "0.1", "run.dir": "elsewhere"},
}
RESULT = {"state": "done", "exit": 0, "steps": 40, "parameters": 1000, "wire_bytes_per_step": 2010.0}
TIME = {"steps": 30, "step_ms": 230.0, "data_ms": 1.0, "compute_ms": 2.0, "wire_ms": 3.0, "update_ms": 4.0}


def texts(
    run_dir: Path, plan: dict[str, Any], result: dict[str, Any], config: str = "seed: 0\n"
) -> list[str]:
    """The cells and words of the part, in order."""
    write_json(run_dir / "plan.json", plan)
    write_json(run_dir / "result.json", result)
    (run_dir / "config.yaml").write_text(config)
    markup = foretold(RunRecord.read(run_dir))
    return [text for text in re.split(r"\s*<[^>]*>\s*", markup) if text]


def test_measured_numbers_stand_beside_those_of_the_plan(tmp_path) -> None:
    step_time = TIME | {"rank": 0, "waited_ms": 0.0, "overhead_ms": 0.0}
    found = texts(tmp_path, PLAN, RESULT | {"step_time": step_time, "peak_memory_bytes": 6_000_000})
    for row in (
        ["steps", "40", "40", "1.00"],
        ["time per step", "200.0 ms", "230.0 ms", "1.15"],
        ["sent by a rank per step", "2.0 kB", "2.0 kB", "1.00"],
        ["peak of memory", "5.0 MB", "6.0 MB", "1.20"],
        ["checkpoint", "12.0 kB", "-", "-"],
    ):
        at = found.index(row[0])
        assert found[at : at + 4] == row
    assert not any("other settings" in text for text in found)


def test_a_run_with_other_settings_than_its_plan_is_said_to_have_them(tmp_path) -> None:
    config = "seed: 0\noptim: {lr: 0.2}\nrun: {dir: here}\n"
    assert texts(tmp_path, PLAN, RESULT, config)[-1] == (
        "The plan was for other settings: optim.lr=0.1 (in the run 0.2)."
    )


def test_a_run_on_another_number_of_ranks_than_its_plan_is_said_to_have_them(tmp_path) -> None:
    found = texts(tmp_path, PLAN | {"world_size": 1}, RESULT | {"world_size": 2})
    assert found[-1] == "The plan was for other settings: 1 rank (in the run 2)."
    found = texts(tmp_path, PLAN | {"world_size": 2}, RESULT | {"world_size": 2})
    assert not any("other settings" in text for text in found)


@pytest.mark.parametrize(
    "plan", [{}, {"steps": "x", "state_bytes": None, "config": 3}, PLAN | {"step_ms": 0.0}]
)
def test_damaged_plans_show_what_is_left_of_them(tmp_path, plan) -> None:
    assert "time per step" not in texts(tmp_path, plan, RESULT)


def test_a_run_without_a_plan_has_no_such_part(tmp_path) -> None:
    write_json(tmp_path / "result.json", RESULT)
    assert foretold(RunRecord.read(tmp_path)) == ""


def test_plan_keeps_its_forecast_where_the_run_finds_it(tmp_path, capsys) -> None:
    """A real plan and a real run, which must agree on all but the time, which was not measured."""
    words = (
        "recipe=cnn",
        "data=digits",
        "launch.nproc=2",
        "train.max_steps=4",
        f"run.dir={tmp_path / 'run'}",
    )
    assert cli.main(["plan", *words]) == 0
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["plan.json"]
    assert read_json(tmp_path / "run" / "plan.json")["steps"] == 4
    done = launch_forked(tmp_path, [*words, "tracker=none"])
    assert done.returncode == 0, done.stderr
    markup = foretold(RunRecord.read(tmp_path / "run"))
    ratios = re.findall(r"<td>(\d\.\d\d)</td>", markup)
    assert ratios[:4] == ["1.00"] * 4  # steps, parameters, bytes on the wire, state
    assert len(ratios) == 5
    assert "other settings" not in markup


def test_plan_writes_to_no_directory_of_other_files(tmp_path, capsys) -> None:
    (tmp_path / "letters.txt").write_text("mine")
    assert cli.main(["plan", "recipe=cnn", "data=digits", f"run.dir={tmp_path}"]) == 2
    assert "letters.txt" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]
