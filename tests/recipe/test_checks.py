import pytest
import torch
from torch import nn

from launcher.errors import ConfigError, DataError
from launcher.recipe import Recipe, cross_entropy, load_recipe
from launcher.recipe.checks import refuse_unusable_data
from tests.recipe.own import OWN_RECIPE, config_of, written


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        ('compare_by="f1"', "compare_by='f1'.* Nearest: macro_f1, weighted_f1. They have loss, accuracy, "),
        ('compare_by="Accuracy"', "compare_by='Accuracy'.* Nearest: accuracy"),
        ("compare_by=3", "compare_by=3: its evaluations have no such metric"),
        ('compare_by="macro_f1", classes=None', "have no such metric. They have loss."),
    ],
)
def test_a_metric_that_no_evaluation_has_is_refused_before_training(tmp_path, replacement, message):
    own = OWN_RECIPE
    if "classes=None" in replacement:
        own = own.replace("        classes=images.classes,\n", "")
    text = own.replace("loss=cross_entropy,", f"loss=cross_entropy, {replacement},")
    with pytest.raises(ConfigError, match=message):
        load_recipe(config_of("pixels", "perceptron", written(tmp_path, text)))


@pytest.mark.parametrize("metric", ["loss", "accuracy", "weighted_f1", "top5_accuracy", "calibration_error"])
def test_a_metric_that_an_evaluation_has_is_taken(tmp_path, metric):
    text = OWN_RECIPE.replace("loss=cross_entropy,", f'loss=cross_entropy, compare_by="{metric}",')
    assert load_recipe(config_of("pixels", "perceptron", written(tmp_path, text))).compare_by == metric


class Measured:
    """A data set of a length."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"image": torch.ones(2), "label": 0}


@pytest.mark.parametrize("length", [64.0, -1, None, "64"], ids=repr)
@pytest.mark.parametrize("kind", ["training", "validation"])
def test_a_length_that_is_no_number_of_samples_is_refused(kind, length):
    sets = [Measured(length), Measured(8)]
    if kind == "validation":
        sets.reverse()
    with pytest.raises(DataError, match=f"the {kind} set is a Measured, whose __len__ does not return a"):
        refuse_unusable_data(Recipe(nn.Identity, *sets, cross_entropy))
