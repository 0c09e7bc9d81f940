from types import SimpleNamespace

import pytest
import torch
from torch import nn

from launcher.data.tensors import TensorData
from launcher.errors import ConfigError, DataError
from launcher.metrics import Classification
from launcher.recipe import Recipe, cross_entropy, load_recipe
from launcher.recipe.checks import refuse_unusable_data
from tests.recipe.own import OWN_RECIPE, config_of, written


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        ('monitor="f1"', "monitor=f1: .* Nearest: macro_f1, weighted_f1. They have val_loss, accuracy, "),
        ('monitor="Accuracy"', "monitor=Accuracy: .* Nearest: accuracy"),
        ("monitor=3", "monitor=3: the evaluations of this recipe have no such metric"),
        ('monitor="macro_f1", classes=None', "have no such metric. They have val_loss."),
    ],
)
def test_a_metric_that_no_evaluation_has_is_refused_before_training(tmp_path, replacement, message):
    own = OWN_RECIPE
    if "classes=None" in replacement:
        own = own.replace("        classes=images.classes,\n", "")
    text = own.replace("loss=cross_entropy,", f"loss=cross_entropy, {replacement},")
    with pytest.raises(ConfigError, match=message):
        load_recipe(config_of("pixels", "perceptron", written(tmp_path, text)))


def unlabelled(dtype: torch.dtype, *labels: int, metrics=None) -> Recipe:
    column = torch.tensor(labels).to(dtype)
    data = TensorData({"image": torch.zeros(len(labels), 2), "label": column})
    train = TensorData({"image": torch.zeros(2, 2), "label": torch.tensor([0, -100])})
    return Recipe(lambda: nn.Linear(2, 2), train, data, cross_entropy, classes=("a", "b"), metrics=metrics)


OF_TORCHMETRICS = SimpleNamespace(ignore_index=-100)  # what the check reads of one


@pytest.mark.parametrize("metric", [Classification(("a", "b"), ignore_index=-100), OF_TORCHMETRICS])
def test_labels_that_a_metric_ignores_are_taken(metric):
    refuse_unusable_data(unlabelled(torch.int64, 0, -100, metrics=[metric]))


@pytest.mark.parametrize("metrics", [None, [Classification(("a", "b"), ignore_index=-1)]])
def test_labels_that_no_metric_ignores_are_refused_with_the_option(metrics):
    with pytest.raises(DataError, match=r"of sample 1 is -100, .*\(classes, ignore_index=-100\)"):
        refuse_unusable_data(unlabelled(torch.int64, 1, -100, metrics=metrics))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int16])
def test_labels_of_each_integer_type_are_compared_with_the_classes(dtype):
    refuse_unusable_data(unlabelled(dtype, 0, 1))
    with pytest.raises(DataError, match="label of sample 1 is 2, but the recipe names 2 classes"):
        refuse_unusable_data(unlabelled(dtype, 0, 2))
