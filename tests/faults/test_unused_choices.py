"""What a run reports as used, where the recipe uses neither the config's model nor its data."""

from __future__ import annotations

import pytest
import torch

from launcher.recipe import load_recipe
from launcher.recipe.contract import data_name, model_name
from tests.configs import composed
from tests.faults.launching import Ended, run
from tests.faults.usercode import stop_after

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
    assert result["metric_name"] == "val_loss"
    assert result["metric"] == result["metrics"]["val_loss"]
    for start in ended.events("start"):
        assert (start["model"], start["data"]) == ("Noisy", "noisy")


def test_what_a_recipe_has_looked_up_keeps_its_name() -> None:
    config = composed("precision=fp32")
    recipe = load_recipe(config)
    model, data = model_name(recipe, recipe.build_model()), data_name(config, recipe)
    assert (model, data) == ("resnet18", "digits")
    assert recipe.train.to(torch.device("cpu")).name == "digits"
