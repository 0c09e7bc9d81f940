"""A run that is pruned from outside: all ranks end after the same step, and every file says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.report.run import Run
from launcher.report.watching import RunView, run_line
from launcher.run_dir.pruning import PRUNE, PruneRequest, ask_to_prune
from launcher.run_dir.status import FILE_NAME
from tests.faults.launching import Started, run
from tests.faults.parent import ENDLESS, Parent, write_recipe
from tests.faults.test_stopping import step_reached
from tests.faults.usercode import slowly

pytestmark = pytest.mark.timeout(90)
LONG = "train.epochs=100000"
REASON = "accuracy 0.4 after step 40 is not among the best third"


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False], ids=["keeping its checkpoint", "removing its checkpoints"])
def test_a_supervised_run_ends_with_the_state_pruned(tmp_path: Path, keep: bool) -> None:
    write_recipe(tmp_path, ENDLESS)
    with Parent(tmp_path, LONG, "checkpoint.every_steps=10", "launch.max_restarts=2") as parent:
        parent.rank(0), parent.rank(1)
        ask_to_prune(parent.run_dir, PruneRequest(REASON, keep))
        assert parent.end() == 11
        status, result = parent.json(FILE_NAME), parent.json("result.json")
        assert (status["state"], status["exit"]) == (result["state"], result["exit"]) == ("pruned", 11)
        assert f"pruned: after step {status['step']}: {REASON}; " in parent.stderr.replace("\n", " ")
        assert "restart" not in parent.stderr
        saved = sorted(path.name for path in (parent.run_dir / "checkpoints").glob("step-*"))
        assert (saved[-1:] == [f"step-{status['step']:08d}"]) if keep else saved == []
        record = Run.read(parent.run_dir)
        assert (record.state, REASON in record.error) == ("pruned", True)
        assert "pruned" in run_line(RunView(parent.run_dir).view())


@pytest.mark.slow
def test_ranks_that_were_started_alone_agree_on_the_step(tmp_path: Path) -> None:
    with Started(tmp_path / "run", (LONG,), ranks=2, user_code=slowly) as started:
        started.until(lambda: step_reached(tmp_path / "run", 4))
        ask_to_prune(tmp_path / "run", PruneRequest(REASON, True))
        ended = started.end()
    assert ended.codes == [11, 11]
    step = ended.status["step"]
    for rank in range(2):
        assert f"rank {rank}: after step {step}: {REASON}; checkpoint saved" in ended.log(rank)
    again = run(tmp_path / "run", f"train.max_steps={step + 2}", ranks=2)
    assert again.codes == [0, 0], "the same command trains it further"
    assert again.result["steps"] == step + 2
    assert not (tmp_path / "run" / PRUNE).exists()
