"""Metrics through the whole program: several validation sets, mistakes in a metric, what the files say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launcher.report.page import write_report
from launcher.report.run import Run
from launcher.telemetry.tracker.rows import scalars_of
from tests.faults.launching import Ended, run

pytestmark = pytest.mark.timeout(90)

RECIPE = """
import torch
from torch import nn
from launcher.recipe import Loss, Recipe, TensorData, Classification, cross_entropy, recipe

class Margin:
    higher_is_better = True

    def __init__(self):
        self.margins = torch.zeros(0)

    def update(self, outputs, batch):
        pass  # UPDATE
        best = outputs.topk(2, dim=1).values
        self.margins = torch.cat([self.margins, (best[:, 0] - best[:, 1]).cpu()])

    def compute(self):
        pass  # COMPUTE
        return {"margin": self.margins.mean()}

def build():
    pass  # BUILD
    return nn.Linear(4, 3)

@recipe("measured")
def measured(config):
    def points(seed, num_samples):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_samples, 4, generator=generator)
        return TensorData({"image": x, "label": x[:, :3].argmax(1)})

    return Recipe(
        build_model=build,
        train=points(0, 48),
        validation={"near": points(1, 30), "far": points(2, 5)},
        loss=cross_entropy,
        classes=("a", "b", "c"),
        metrics=[Classification(("a", "b", "c")), Margin()],
        monitor=COMPARE_BY,
    )
"""
WORDS = ("recipe.uses=measured", "precision=fp32", "train.max_steps=6")


def run_recipe(directory: Path, monitor="None", ranks=1, mark="", line="", words=()) -> Ended:
    text = RECIPE.replace("COMPARE_BY", monitor)
    if mark:
        text = text.replace(f"pass  # {mark}", line)
    file = directory / "measured.py"
    file.write_text(text)
    return run(directory / "run", f"recipes.path={file}", *WORDS, *words, ranks=ranks)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Ended:
    found = run_recipe(tmp_path_factory.mktemp("sets"), "'far/margin'", ranks=2)
    assert found.codes == [0, 0], found
    return found


def test_each_set_has_its_own_evaluation_and_any_may_be_compared_by(ended: Ended) -> None:
    near, far = ended.events("eval")[-2:]
    assert (near["set"], near["samples"], far["set"], far["samples"]) == ("near", 30, "far", 5)
    result = ended.result
    assert (result["metric_name"], result["metric"]) == ("far/margin", far["margin"])
    assert result["sets"] == {
        each["set"]: {name: each[name] for name in result["metrics"]} for each in (near, far)
    }
    assert result["metrics"]["margin"] == near["margin"] != far["margin"]
    higher = far["higher_is_better"]
    assert (higher["margin"], higher["val_loss"], higher["train_loss"]) == (True, False, False)
    assert sum(map(sum, result["confusion_matrix"])) == 30
    checkpoints = sorted((ended.directory / "checkpoints").iterdir())
    state = json.loads((checkpoints[-1] / "state.json").read_text())
    assert (state["metric"]["name"], state["metric"]["lower_is_better"]) == ("far/margin", False)


def test_people_and_programs_find_the_first_set_first(ended: Ended) -> None:
    near, far = ended.events("eval")[-2:]
    lines = [line.split() for line in ended.outputs[0].splitlines()]
    assert [line[2] for line in lines if line[:2] in (["1", "6"], ["2", "6"])] == ["near", "far"]
    assert any(line[:4] == ["epoch", "step", "set", "val_loss"] for line in lines)
    assert ended.status["last"]["eval"]["set"] == "near"
    assert scalars_of(near)["eval/near/margin"] == near["margin"]
    assert not any(key.endswith("/set") for key in scalars_of(far))
    page = write_report(Run.read(ended.directory)).read_text()
    assert re.search(r"<td[^>]*>far</td>", page)


REFUSED: dict[str, tuple[str, str, int, str]] = {
    "in update": (
        "UPDATE",
        "batch['target']",
        7,
        "the metric Margin's update on the validation (near) set failed at ",
    ),
    "in compute": (
        "COMPUTE",
        "self.margin",
        1,
        "the metric Margin's compute on the validation (near) set failed at ",
    ),
}


@pytest.mark.sampled(every=2, first=1)
@pytest.mark.parametrize(
    ("mark", "text"), [("COMPUTE", "the metric Margin's compute"), ("BUILD", "the recipe's build_model")]
)
def test_a_collective_of_which_the_other_ranks_know_nothing_is_refused_by_name(tmp_path, mark, text) -> None:
    line = "torch.distributed.all_reduce(torch.zeros(1))"
    ended = run_recipe(tmp_path, ranks=2, mark=mark, line=line)
    assert ended.codes == [2, 2], ended
    assert ended.result["error"].startswith(text)
    assert f" uses torch.distributed at {tmp_path / 'measured.py'}:" in ended.result["error"]
    assert not ended.events("step", "eval")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("mark", "line", "code", "text"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_one_message_on_all_ranks_before_the_first_step(
    tmp_path: Path, mark, line, code, text
) -> None:
    ended = run_recipe(tmp_path, ranks=2, mark=mark, line=line)
    assert ended.codes == [code] * 2, ended
    assert sum(output.count(text) for output in ended.outputs) == 1, ended
    traces = sum(output.count("Traceback (most recent") for output in ended.outputs)
    assert traces == (mark == "COMPUTE"), "a missing column explains itself"
    assert f"{text}{tmp_path / 'measured.py'}:" in ended.result["error"]
    assert "The full traceback is in " in ended.result["error"]
    assert not ended.events("step", "eval")


def test_a_name_that_no_metric_gives_is_refused_before_the_first_step(tmp_path: Path) -> None:
    ended = run_recipe(tmp_path, "'margins'", ranks=2)
    assert ended.codes == [2, 2], ended
    assert "monitor=margins: the evaluations of this recipe have no such metric." in ended.result["error"]
    assert "Nearest: margin." in ended.result["error"]
    assert not ended.events("step", "eval")
