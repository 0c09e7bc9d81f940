"""What a run reports as used, where the recipe uses neither the config's model nor its data."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from wandb.proto import wandb_internal_pb2

from launcher.recipe import load_recipe
from launcher.recipe.contract import Used
from launcher.report.page import write_report
from launcher.report.run_record import RunRecord
from launcher.telemetry.tracker.sink import used_config
from tests.configs import composed
from tests.faults.launching import EPOCH, Ended, run
from tests.faults.usercode import stop_after
from tests.telemetry.tracker.test_wandb_session import transaction_log

pytestmark = pytest.mark.timeout(90)
WORDS = ("train.max_steps=13", "tracker=wandb", "tracker.mode=offline")


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Ended:
    """A recipe of one's own that classifies nothing, stopped once on the way."""
    directory = tmp_path_factory.mktemp("used") / "run"
    assert run(directory, *WORDS, user_code=stop_after(6)).codes == [75]
    done = run(directory, *WORDS)
    assert done.codes == [0], done
    return done


@pytest.mark.slow
def test_the_result_names_what_the_recipe_used_and_what_it_measured(ended) -> None:
    result = ended.result
    assert (result["model"], result["data"]) == ("Noisy", "noisy")
    assert result["metric_name"] == "loss"
    assert result["metric"] == result["metrics"]["loss"]
    for start in ended.events("start"):
        assert (start["model"], start["data"]) == ("Noisy", "noisy")


@pytest.mark.slow
def test_the_same_command_again_tells_the_loss_and_no_accuracy(ended) -> None:
    again = run(ended.directory, *WORDS)
    assert again.codes == [0]
    assert f"the run is done, after {EPOCH} steps: loss {ended.result['metric']}." in again.outputs[0]
    assert "accuracy" not in again.outputs[0] + ended.outputs[0]
    assert "None" not in again.outputs[0] + ended.outputs[0]


@pytest.mark.slow
def test_the_page_says_which_choices_nobody_looked_up(ended) -> None:
    page = write_report(RunRecord.read(ended.directory)).read_text()
    assert "  name: resnet18  # not used: the recipe has its own, Noisy" in page
    assert "  name: digits  # not used: the recipe has its own, noisy" in page
    assert '<th scope="row">model</th><td>Noisy</td>' in page


@pytest.mark.slow
def test_the_tracker_has_what_the_recipe_used(ended) -> None:
    paths = list((ended.directory / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(paths) == 2
    for path in paths:
        config: dict[str, Any] = {}
        for payload in transaction_log(path.read_bytes()):
            (record := wandb_internal_pb2.Record()).ParseFromString(payload)
            for each in (*record.run.config.update, *record.config.update):
                config[each.key] = json.loads(each.value_json)
        assert config["model"]["name"] == "Noisy"
        assert config["data"]["name"] == "noisy"
        assert config["data"]["batch_size"] == 16


def test_what_a_recipe_has_looked_up_keeps_its_name() -> None:
    config = composed("precision=fp32")
    recipe = load_recipe(config)
    used = Used.of(config, recipe, recipe.build_model())
    assert used == Used("resnet18", "digits")
    assert recipe.train.to(torch.device("cpu")).name == "digits"
    shape = {"model": {"name": "resnet18", "stem": "auto"}, "data": {"name": "digits"}}
    assert used_config(shape, {"event": "start", "model": used.model, "data": used.data}) == shape
