"""One table of all benchmarks: what it shows where one fails or is skipped, and what its file keeps."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from scripts.bench import all_benchmarks, tables
from scripts.bench.all_benchmarks import Benchmark, benchmarks, figures_in, main
from scripts.bench.interleaved import CANNOT_BE_SAID, Figure

TIMES = {"ours": [2.0, 2.0], "peer": [2.5, 2.5]}
MISSED = Figure.ratio("slow", TIMES, "ours", "peer", promised=0.7)
KEPT = Figure.ratio("fast", TIMES, "ours", "peer", promised=0.9)


def writing(*figures: Figure) -> tuple[str, ...]:
    """A benchmark with these figures."""
    content = json.dumps({"n": 2, "machine": {}, "figures": [asdict(each) for each in figures]})
    return "-c", f"import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write({content!r})"


def test_one_table_has_the_figures_of_all(tmp_path, capsys) -> None:
    file = tmp_path / "all.json"
    known = [Benchmark("one", writing(MISSED), 20), Benchmark("two", writing(KEPT), 20)]
    assert main(["--json", str(file)], known) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if "peer" in line] == ["no", "yes"]
    content = json.loads(file.read_text())
    assert figures_in(content["one"]) == [MISSED]
    assert "torch" in content["two"]["versions"]


def test_of_a_promise_within_the_interval_nothing_can_be_said() -> None:
    uneven = {"ours": [1.0, 2.0, 3.0], "peer": [2.0, 2.0, 2.0]}
    assert Figure.ratio("step", uneven, "ours", "peer", promised=1.1).kept == CANNOT_BE_SAID
    assert Figure.ratio("step", uneven, "ours", "peer").kept == ""


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
    known = [Benchmark("bad", command, 1), Benchmark("good", writing(KEPT), 20)]
    assert main(["--json", str(tmp_path / "all.json")], known) == 1
    printed = capsys.readouterr().out
    assert f"bad ... failed: {said}" in printed
    assert "fast" in printed


@pytest.mark.parametrize(("words", "writes"), [([], True), (["--quick"], False)])
def test_a_quick_run_leaves_nothing_where_a_result_would_lie(tmp_path, monkeypatch, words, writes) -> None:
    monkeypatch.setattr(all_benchmarks, "RESULTS", tmp_path / "all.json")
    assert main(words, [Benchmark("one", writing(KEPT), 20)]) == 0
    assert (tmp_path / "all.json").exists() == writes


def test_what_the_machine_lacks_is_skipped_with_the_reason(tmp_path, capsys) -> None:
    known = [Benchmark("gpu", ("-c", "raise SystemExit(1)"), 20, lambda: "this machine has no GPU")]
    assert main(["--json", str(tmp_path / "all.json")], known) == 0
    assert "gpu ... skipped: this machine has no GPU" in capsys.readouterr().out


def test_a_run_that_is_interrupted_keeps_what_it_has(tmp_path) -> None:
    file = tmp_path / "all.json"

    def interrupted() -> str:
        raise KeyboardInterrupt

    known = [Benchmark("one", writing(KEPT), 20), Benchmark("two", (), 20, interrupted)]
    with pytest.raises(KeyboardInterrupt):
        main(["--json", str(file)], known)
    assert figures_in(json.loads(file.read_text())["one"])


def test_only_runs_what_is_named_and_keeps_the_results_of_the_others(tmp_path) -> None:
    file = tmp_path / "all.json"
    known = [Benchmark("one", writing(MISSED), 20), Benchmark("two", writing(KEPT), 20)]
    assert main(["--only", "one", "--json", str(file)], known) == 0
    before = json.loads(file.read_text())
    assert list(before) == ["one"]
    assert main(["--only", "two", "--json", str(file)], known) == 0
    after = json.loads(file.read_text())
    assert list(after) == ["one", "two"]
    assert after["one"] == before["one"]


def test_a_benchmark_that_fails_keeps_its_former_result(tmp_path) -> None:
    file = tmp_path / "all.json"
    main(["--json", str(file)], [Benchmark("one", writing(KEPT), 20)])
    assert main(["--json", str(file)], [Benchmark("one", ("-c", "raise SystemExit(1)"), 20)]) == 1
    assert figures_in(json.loads(file.read_text())["one"]) == [KEPT]


def test_the_readme_has_the_promised_figures_as_they_were_measured() -> None:
    for readme in tables.READMES:
        text = readme.read_text()
        assert text == tables.with_tables(text), "run: python -m scripts.bench.tables"


def test_every_benchmark_is_a_program_that_exists() -> None:
    for benchmark in benchmarks():
        program = next(word for word in reversed(benchmark.command) if word.endswith(".py"))
        assert Path(program).is_file(), benchmark.name
