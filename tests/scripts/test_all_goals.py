"""One table of all benchmarks: what it shows where one fails, is skipped, or misses its goal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench import all_goals
from scripts.bench.all_goals import Benchmark, benchmarks, goals_in, main
from scripts.bench.interleaved import Goal

TIMES = {"ours": [2.0, 2.0], "peer": [2.5, 2.5]}
MISSED = Goal.of("P10", "slow", TIMES, "ours", "peer", goal=0.7)
REACHED = Goal.of("P2", "fast", TIMES, "ours", "peer", goal=0.9, limit=0.5)


def writing(*goals: Goal) -> tuple[str, ...]:
    """A benchmark that has these goals."""
    content = json.dumps({"n": 2, "goals": [goal.as_json() for goal in goals]})
    return "-c", f"import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write({content!r})"


def test_one_table_has_the_goals_of_all_in_the_order_of_their_rows(tmp_path, capsys) -> None:
    file = tmp_path / "all.json"
    known = [Benchmark("one", writing(MISSED), 20), Benchmark("two", writing(REACHED), 20)]
    assert main(["--json", str(file)], known) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("P")]
    assert [line.split()[0] for line in lines] == ["P2", "P10"]
    assert lines[0].endswith("  reached")
    assert lines[1].endswith("  not reached")
    assert "Goals: 2, of which 1 not reached, 1 reached." in printed
    content = json.loads(file.read_text())
    assert {"cpu", "torch", "date", "load_average"} <= content["machine"].keys()
    assert goals_in(content["benchmarks"]["one"]) == [MISSED]
    assert content["benchmarks"]["one"]["goals"][0]["verdict"] == "not reached"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("-c", "print('no memory'); raise SystemExit(3)"), "exit code 3\nno memory"),
        (("-c", "pass"), "exit code 0"),  # it has written no result
        (("-c", "import time; time.sleep(60)"), "still running after 1 s"),
    ],
    ids=["fails", "writes nothing", "hangs"],
)
def test_a_benchmark_without_a_result_fails_and_the_next_one_runs(command, said, tmp_path, capsys) -> None:
    known = [Benchmark("bad", command, 1), Benchmark("good", writing(REACHED), 20)]
    assert main(["--json", str(tmp_path / "all.json")], known) == 1
    printed = capsys.readouterr().out
    assert f"bad ... failed: {said}" in printed
    assert "Goals: 1, of which 1 reached." in printed


@pytest.mark.parametrize(("words", "writes"), [([], True), (["--quick"], False)])
def test_a_quick_run_leaves_nothing_where_a_result_would_lie(tmp_path, monkeypatch, words, writes) -> None:
    monkeypatch.setattr(all_goals, "RESULTS", tmp_path / "all.json")
    assert main(words, [Benchmark("one", writing(REACHED), 20)]) == 0
    assert (tmp_path / "all.json").exists() == writes


def test_what_the_machine_lacks_is_skipped_with_the_reason(tmp_path, capsys) -> None:
    known = [Benchmark("gpu", ("-c", "raise SystemExit(1)"), 20, lambda: "this machine has no GPU")]
    assert main(["--json", str(tmp_path / "all.json")], known) == 0
    assert "gpu ... skipped: this machine has no GPU" in capsys.readouterr().out


def test_a_run_that_is_interrupted_keeps_what_it_has(tmp_path) -> None:
    file = tmp_path / "all.json"

    def interrupted() -> str:
        raise KeyboardInterrupt

    known = [Benchmark("one", writing(REACHED), 20), Benchmark("two", (), 20, interrupted)]
    with pytest.raises(KeyboardInterrupt):
        main(["--json", str(file)], known)
    assert goals_in(json.loads(file.read_text())["benchmarks"]["one"])


def test_only_runs_what_is_named(tmp_path) -> None:
    file = tmp_path / "all.json"
    known = [Benchmark("one", writing(MISSED), 20), Benchmark("two", writing(REACHED), 20)]
    assert main(["--only", "two", "--json", str(file)], known) == 0
    assert list(json.loads(file.read_text())["benchmarks"]) == ["two"]


def test_every_benchmark_is_a_program_that_exists() -> None:
    for benchmark in benchmarks():
        program = next(word for word in reversed(benchmark.command) if word.endswith(".py"))
        assert Path(program).is_file(), benchmark.name
