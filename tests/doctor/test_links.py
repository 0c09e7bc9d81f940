"""Links between ranks: real ones over loopback, and stand-ins that hang, fail or give wrong sums."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import pytest

from launcher.doctor import links
from launcher.doctor.findings import FAILURE, OK

STANDIN = """
import json, os, sys, time
rank, devices = int(sys.argv[1]), sys.argv[5:]
kind = open({kind!r}).read()
if devices == ["cuda:0", "cuda:2"] and "NCCL_P2P_DISABLE" not in os.environ:
    if kind == "hangs":
        time.sleep(600)
    if kind == "fails":
        sys.exit("RuntimeError: CUDA error: peer access")
right = kind != "corrupts" or devices != ["cuda:0", "cuda:2"] or "NCCL_P2P_DISABLE" in os.environ
if rank == 0:
    print(json.dumps({{"copied": right, "summed": True, "bytes_per_s": 1e9}}))
"""


@pytest.fixture
def program(tmp_path):
    def of(kind: str) -> list[str]:
        (tmp_path / "kind").write_text(kind)
        script = tmp_path / "exchange.py"
        script.write_text(STANDIN.format(kind=str(tmp_path / "kind")))
        return [sys.executable, "-S", str(script)]

    return of


@pytest.mark.parametrize("gpus", [2, 3, 4, 7, 8])
def test_rounds_hold_every_pair_once_and_no_gpu_twice_at_a_time(gpus) -> None:
    met = list(links.rounds(gpus))
    assert sorted(pair for together in met for pair in together) == list(combinations(range(gpus), 2))
    for together in met:
        used = [number for pair in together for number in pair]
        assert len(used) == len(set(used))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("hangs", "0 and 2: no answer within"),
        ("fails", "peer access"),
        ("corrupts", "bytes that were copied are wrong"),
    ],
)
def test_a_broken_pair_is_named_with_what_heals_it(program, monkeypatch, kind, says) -> None:
    monkeypatch.setattr(links, "PAIR_S", 2.0 if kind == "hangs" else 60.0)
    (found,) = links.pairs(3, program(kind))
    assert found.verdict == FAILURE
    assert says in found.value
    assert "with NCCL_P2P_DISABLE=1 sums are right" in found.value
    assert "NCCL_P2P_DISABLE=1" in found.advice


def test_whole_pairs_are_one_line(program) -> None:
    (found,) = links.pairs(3, program("whole"))
    assert (found.verdict, found.value) == (OK, "3, copies and sums exact")


def test_wrong_sums_of_all_ranks_are_a_failure() -> None:
    assert links.judged_exchange({"summed": False, "bytes_per_s": 1e9}, 2).verdict == FAILURE


def test_speeds_that_differ_are_advised_to_be_shares() -> None:
    found = links.judged_speeds([1.0, 3.0])
    assert found.value == "1.00 : 3.00"
    assert "data.share=auto" in found.advice
    assert "2.00 times as fast" in found.advice
    assert links.judged_speeds([1.0, 1.1]).verdict == OK


@pytest.mark.slow
def test_two_ranks_over_loopback_sum_exactly_and_have_a_rate(monkeypatch) -> None:
    monkeypatch.setattr(links, "MEASURED_S", 0.1)
    (found,) = links.bandwidth(["cpu", "cpu"])
    assert found.verdict == OK, found
    assert float(found.value.split()[0]) > 0
    said = links.exchanged(["cpu", "cpu"], 0.1, {})
    assert isinstance(said, dict)
    assert len(said["speeds"]) == 2
    assert min(said["speeds"]) > 0


def test_the_program_is_a_file_of_the_launcher() -> None:
    assert Path(links.__file__).with_name("exchange.py").is_file()
    assert links.PROGRAM[-1] == "launcher.doctor.exchange"
