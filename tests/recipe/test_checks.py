import pytest

from launcher.errors import ConfigError
from launcher.recipe import load_recipe
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
