import ast
import dataclasses
import textwrap
from dataclasses import replace

import pytest
import torch
from torch import nn

from launcher.config.schema import RecipeConfig, RecipesConfig
from launcher.data.batch_plan import BatchPlan
from launcher.data.tensors import DeviceBatches
from launcher.errors import ConfigError, DataError
from launcher.recipe import (
    Loss,
    Recipe,
    cross_entropy,
    load_recipe,
    loss_of,
    model_builder,
    refuse_unusable_data,
    registry_of,
)
from tests.configs import composed

OWN_RECIPE = """
from torch import nn
from launcher.data.images.catalog import load_images
from launcher.recipe import Config, Recipe, cross_entropy, model, model_builder, recipe

@model("perceptron")
def perceptron(num_pixels: int, num_classes: int, width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(num_pixels, width), nn.ReLU(), nn.Linear(width, num_classes)
    )

@recipe("pixels")
def pixels(config: Config) -> Recipe:
    images = load_images(config.data)
    num_pixels = images.channels * images.height * images.width
    return Recipe(
        build_model=model_builder(config, num_pixels=num_pixels, num_classes=len(images.classes)),
        train=images.train,
        validation=images.validation,
        loss=cross_entropy,
        train_transform=images.train_transform(config.data.augment),
        eval_transform=images.eval_transform(),
        classes=images.classes,
    )
"""


def config_of(uses="resnet", model="resnet18", path=None, **options):
    config = composed("data.batch_size=16", "data.augment.crop_padding=0", "precision=fp32")
    return replace(
        config,
        recipe=RecipeConfig("test", uses),
        model=replace(config.model, name=model, options=options),
        recipes=RecipesConfig(None if path is None else str(path)),
    )


def written(folder, text, name="mine.py"):
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return file


def test_a_recipe_of_ones_own_needs_at_most_25_lines():
    assert len([line for line in OWN_RECIPE.splitlines() if line.strip()]) <= 25
    ast.parse(OWN_RECIPE)


def test_a_recipe_of_ones_own_learns(tmp_path):
    recipe = load_recipe(config_of("pixels", "perceptron", written(tmp_path, OWN_RECIPE), width=32))
    torch.manual_seed(0)
    model = recipe.build_model()
    assert model[1].out_features == 32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = DeviceBatches(
        recipe.train, BatchPlan(len(recipe.train), 16, None, 1, 0, 0, False), recipe.train_transform
    )
    means = []
    for step in range(batches.plan.steps_per_epoch):
        (batch,) = batches.step(0, step)
        loss = recipe.loss(model, batch)
        assert loss.sum.dtype == torch.float32
        assert loss.sum.shape == ()
        assert loss.outputs.shape == (loss.count, 10)
        means.append(loss.sum.item() / loss.count)
        optimizer.zero_grad()
        (loss.sum / loss.count).backward()
        optimizer.step()
    assert sum(means[-10:]) < 0.5 * sum(means[:10])


def test_an_own_recipe_may_use_the_models_of_the_project(tmp_path):
    text = OWN_RECIPE.replace("num_pixels=num_pixels", "in_channels=1, image_size=8")
    recipe = load_recipe(config_of("pixels", "resnet18", written(tmp_path, text), stem="small"))
    assert recipe.build_model()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_the_projects_recipes_may_use_an_own_model(tmp_path):
    file = written(
        tmp_path,
        """
        from torch import nn
        from launcher.recipe import model
        @model("tiny")
        def tiny(num_classes, in_channels, image_size):
            return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
        """,
    )
    recipe = load_recipe(config_of("resnet", "tiny", file))
    assert recipe.build_model()(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_a_recipe_that_no_name_of_its_file_refers_to_is_not_known_and_says_why(tmp_path):
    text = """
    from launcher.recipe import recipe
    def made(size):
        @recipe(f"net{size}")
        def net(config): ...
    for size in (1, 2):
        made(size)
    """
    with pytest.raises(
        ConfigError, match=r"^recipe\.uses=net1 is not known\..* a name at the top level of its"
    ):
        load_recipe(config_of("net1", path=written(tmp_path, text)))


OWN_SCHEDULE = """
from launcher.recipe import recipe, schedule
@schedule("stairs")
def stairs(step, total):
    return 0.1 ** (3 * step // total)
"""


def test_a_schedule_is_found_by_its_name_in_the_config(tmp_path):
    file = written(tmp_path, OWN_RECIPE + OWN_SCHEDULE)
    config = config_of("pixels", "perceptron", file)
    assert load_recipe(config).schedule is None
    named = load_recipe(replace(config, schedule=replace(config.schedule, name="stairs")))
    assert named.schedule is not None
    assert [named.schedule(step, 6) for step in range(6)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    with pytest.raises(ConfigError, match=r"^schedule\.name=stair is not known\. Did you mean stairs\?"):
        load_recipe(replace(config, schedule=replace(config.schedule, name="stair")))


def test_a_name_of_the_launchers_own_schedules_is_taken(tmp_path):
    file = written(tmp_path, OWN_SCHEDULE.replace('"stairs"', '"cosine"'))
    with pytest.raises(ConfigError, match=r'@schedule\("cosine"\): the launcher has a schedule of that name'):
        registry_of(str(file))


def test_the_name_of_a_schedule_is_no_schedule(tmp_path):
    text = OWN_RECIPE.replace("classes=images.classes,", 'classes=images.classes, schedule="cosine",')
    with pytest.raises(ConfigError, match="the recipe's schedule='cosine': it must be a function"):
        load_recipe(config_of("pixels", "perceptron", written(tmp_path, text)))


def test_registry_lists_what_the_project_has():
    registry = registry_of(None)
    assert set(registry.recipes) >= {"resnet"}
    assert set(registry.models) >= {"resnet18", "resnet34", "resnet50", "resnet101", "resnet152"}


def test_a_file_is_run_once_and_again_when_it_changed(tmp_path):
    count = tmp_path / "count"
    text = f"with open({str(count)!r}, 'a') as f: f.write('x')\n" + OWN_RECIPE
    file = written(tmp_path, text)
    registry_of(str(file))
    registry_of(str(file))
    assert count.read_text() == "x"
    written(tmp_path, text.replace('"pixels"', '"dots"'))
    assert "dots" in registry_of(str(file)).recipes
    assert "pixels" not in registry_of(str(file)).recipes


def test_functions_that_a_file_imports_are_not_its_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    written(tmp_path, OWN_RECIPE, "first_recipes.py")
    file = written(tmp_path, "from first_recipes import pixels, perceptron", "second.py")
    assert "pixels" not in registry_of(str(file)).recipes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("resnte"), r"recipe\.uses=resnte is not known\. Did you mean resnet\? Known: .*resnet"),
        (config_of(model="resnet81"), r"model\.name=resnet81 is not known\. Did you mean .*resnet18"),
        (config_of(stemm="small"), r"model\.stemm .*resnet18.* Did you mean stem\? Known: stem, zero_init"),
        (config_of(num_classes=3), r"model\.num_classes .* is not known"),
        (config_of(path="/no/such/file.py"), r"recipes\.path=/no/such/file\.py does not exist"),
        (config_of(path="/tmp"), r"recipes\.path=/tmp is a folder\. Give the Python file"),
    ],
)
def test_unknown_names_get_the_nearest_ones(config, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nraise RuntimeError('boom')", r"mine\.py cannot be loaded: line 2: RuntimeError: boom"),
        ("x = 1\nraise SystemExit(3)", r"mine\.py cannot be loaded: line 2: SystemExit: 3"),
        ("x = 1\n\ndef f(:\n", r"mine\.py cannot be loaded: line 3: SyntaxError"),
        ("import no_such_package", r"line 1: ModuleNotFoundError: No module named 'no_such_package'"),
        (
            "from launcher.recipe import recipe\n@recipe('resnet')\ndef f(config): ...",
            r'@recipe\("resnet"\) is given twice: in .*resnet\.py and in .*mine\.py',
        ),
        (
            "from launcher.recipe import model\n@model('a')\ndef f(): ...\n@model('a')\ndef g(): ...",
            r'@model\("a"\) is given twice: in .*mine\.py and in .*mine\.py',
        ),
    ],
)
def test_files_that_cannot_be_used_name_file_and_error(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(config_of("mine", path=written(tmp_path, text)))


def test_a_file_that_failed_is_tried_again(tmp_path):
    file = written(tmp_path, "raise RuntimeError('boom')")
    for _ in range(2):
        with pytest.raises(ConfigError, match="boom"):
            registry_of(str(file))


def test_a_recipe_that_returns_something_else_is_refused(tmp_path):
    file = written(tmp_path, "from launcher.recipe import recipe\n@recipe('mine')\ndef f(config): return 3")
    with pytest.raises(ConfigError, match=r'under @recipe\("mine"\) returned int'):
        load_recipe(config_of("mine", path=file))


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


def test_a_file_that_is_no_python_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a \.py file"):
        registry_of(str(written(tmp_path, "", "mine.txt")))


def test_launcher_errors_of_a_recipe_file_keep_their_kind(tmp_path):
    file = written(tmp_path, "from launcher.errors import DataError\nraise DataError('no such set')")
    with pytest.raises(DataError, match="no such set"):
        registry_of(str(file))


def test_model_builder_builds_anew_each_time():
    build = model_builder(config_of(), num_classes=3, in_channels=1, image_size=8)
    one, other = build(), build()
    assert one is not other
    assert not torch.equal(one.conv1.weight, other.conv1.weight)


def test_cross_entropy_is_summed_in_fp32_over_the_samples():
    model = nn.Linear(4, 3).to(torch.bfloat16)
    batch = {"image": torch.randn(5, 4, dtype=torch.bfloat16), "label": torch.tensor([0, 1, 2, 0, 1])}
    loss = cross_entropy(model, batch)
    logits = model(batch["image"]).float()
    expected = -torch.log_softmax(logits, dim=1)[torch.arange(5), batch["label"]].sum()
    assert loss.sum.dtype == torch.float32
    assert torch.allclose(loss.sum, expected)
    assert loss.count == 5
    assert torch.equal(loss.outputs, logits)
    assert loss.outputs.dtype == torch.float32
    assert not loss.outputs.requires_grad


IMAGES = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("logits", "labels", "count"),
    [
        (IMAGES[:, :, 0, 0], torch.tensor([1, -100]), 1),
        (IMAGES[:, :, 0, 0], torch.tensor([-100, -100]), 0),
        (IMAGES, torch.ones(2, 3, 3, dtype=torch.int64), 18),
        (IMAGES, torch.tensor([[[1, -100, 2]] * 3, [[0, 3, -100]] * 3]), 12),
        (IMAGES[:, :, 0, 0], torch.full((2, 4), 0.25), 2),
        (IMAGES, torch.full((2, 4, 3, 3), 0.25), 18),
    ],
    ids=["an ignored label", "only ignored", "pixels", "ignored pixels", "probabilities", "of pixels"],
)
def test_cross_entropy_counts_the_labels_that_carry_loss(logits, labels, count):
    """Else a step divides by a wrong number."""
    loss = cross_entropy(nn.Identity(), {"image": logits, "label": labels})
    assert loss.count == count
    if count:
        assert torch.allclose(loss.sum / loss.count, nn.functional.cross_entropy(logits, labels))


def test_cross_entropy_reads_the_columns_it_is_told():
    batch = {"x": torch.ones(2, 4), "y": torch.tensor([0, 1])}
    assert cross_entropy(nn.Linear(4, 3), batch, inputs="x", labels="y").count == 2


def test_decorated_functions_stay_plain_functions():
    recipe = registry_of(None).models["resnet18"]
    assert recipe.__name__ == "resnet18"
    assert dataclasses.is_dataclass(load_recipe(config_of()))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (torch.ones(()), "returned a Tensor"),
        (Loss(1.5, 2), r"returned a Loss\(float, ...\)"),
        (None, "returned a NoneType"),
    ],
)
def test_a_loss_that_gives_something_else_is_refused(given, text) -> None:
    with pytest.raises(ConfigError, match=text):
        loss_of(lambda network, batch: given, torch.nn.Identity(), {})


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
