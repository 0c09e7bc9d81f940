"""One table of all benchmarks: what it shows where one fails, and what its file keeps."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from scripts.bench import all_benchmarks
from scripts.bench.all_benchmarks import Benchmark, figures_in, main
from scripts.bench.interleaved import CANNOT_BE_SAID, Figure

TIMES = {"ours": [2.0, 2.0], "peer": [2.5, 2.5]}
MISSED = Figure.ratio("slow", TIMES, "ours", "peer", promised=0.7)
KEPT = Figure.ratio("fast", TIMES, "ours", "peer", promised=0.9)


def writing(*figures: Figure) -> tuple[str, ...]:
    """A benchmark with these figures."""
    content = json.dumps({"n": 2, "machine": {}, "figures": [asdict(each) for each in figures]})
    return "-c", f"import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write({content!r})"


FAILS = ("-c", "print('no memory'); raise SystemExit(3)")


def test_one_that_fails_is_named_and_the_others_run(tmp_path, capsys) -> None:
    known = [Benchmark("bad", FAILS, 20), Benchmark("gpu", (), 20, lambda: "no GPU")]
    known += [Benchmark("one", writing(MISSED), 20), Benchmark("two", writing(KEPT), 20)]
    assert main(["--json", str(tmp_path / "all.json")], known) == 1
    printed = capsys.readouterr().out
    assert "bad ... failed: exit code 3\nno memory" in printed
    assert "gpu ... skipped: no GPU" in printed
    assert [line.split()[-1] for line in printed.splitlines() if "peer" in line] == ["no", "yes"]


def test_results_are_replaced_one_by_one(tmp_path, monkeypatch) -> None:
    """By --only, beside a benchmark that fails, and in a run that is interrupted; --quick writes none."""
    file = tmp_path / "all.json"
    monkeypatch.setattr(all_benchmarks, "RESULTS", file)

    def interrupted() -> str:
        raise KeyboardInterrupt

    def kept() -> dict[str, list[Figure]]:
        return {name: figures_in(result) for name, result in json.loads(file.read_text()).items()}

    known = [Benchmark("one", writing(MISSED), 20), Benchmark("two", writing(KEPT), 20)]
    main(["--only", "one"], known)
    main(["--only", "two"], known)
    main([], [Benchmark("one", FAILS, 20), Benchmark("three", (), 20, lambda: "no GPU")])
    main(["--quick"], [Benchmark("one", writing(KEPT), 20)])
    assert kept() == {"one": [MISSED], "two": [KEPT]}
    with pytest.raises(KeyboardInterrupt):
        main([], [Benchmark("one", writing(KEPT), 20), Benchmark("two", (), 20, interrupted)])
    assert kept() == {"one": [KEPT], "two": [KEPT]}


@pytest.mark.parametrize(
    ("ratios", "interval", "kept"),
    [
        ([0.5, *[0.7] * 6, 9.0], (0.7, 0.7), "yes"),
        ([0.5, *[1.1] * 6, 9.0], (1.1, 1.1), "no"),
        ([0.5, 0.8, 0.8, 0.8, 1.1, 1.1, 1.1, 9.0], (0.8, 1.1), CANNOT_BE_SAID),
    ],
)
def test_a_promise_is_judged_if_the_interval_lies_on_one_side_of_it(ratios, interval, kept) -> None:
    times = {"ours": ratios, "theirs": [1.0] * len(ratios)}
    figure = Figure.ratio("what", times, "ours", "theirs", promised=0.9)
    assert (figure.low, figure.high) == interval
    assert figure.kept == kept
