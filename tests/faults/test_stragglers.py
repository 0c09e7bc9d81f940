"""A rank that is slowed down on purpose is named while the run goes on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launcher.report.page import write_report
from launcher.report.run import Run
from tests.faults.launching import run

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]
RECIPES = Path(__file__).with_name("bounds.py")
WORDS = (f"recipes.path={RECIPES}", "checkpoint.every_steps=null", "train.max_steps=120", "train.epochs=100")
SLOW = {
    "slow_set_of_rank_1": ("data", ("data.num_workers=0",)),  # its loader
    "slow_layers_of_rank_1": ("compute", ()),  # its processor
}


@pytest.mark.parametrize("name", SLOW)
def test_the_slow_rank_and_its_slow_part_are_named(tmp_path, name):
    cause, words = SLOW[name]
    ended = run(tmp_path / "run", *WORDS, *words, f"recipe.uses={name}", ranks=2)
    assert ended.codes == [0] * len(ended.codes), ended
    found = ended.events("straggler")
    assert found, ended.outputs
    assert {(event["rank"], event["host"], event["cause"]) for event in found} == {
        (1, socket.gethostname(), cause)
    }
    warnings = [event["text"] for event in ended.events("warning") if "arrives last" in event["text"]]
    assert len(warnings) == 1
    assert f"rank 1 on {socket.gethostname()} arrives last" in ended.outputs[0]
    assert "Ranks that the others waited for" in write_report(Run.read(tmp_path / "run")).read_text()
