from dataclasses import replace

import pytest
import torch

from launcher.data.batch_plan import BatchPlan
from launcher.data.tensors import DeviceBatches
from launcher.errors import ConfigError
from launcher.recipe import load_recipe
from tests.recipe.own import OWN_RECIPE, OWN_SCHEDULE, config_of, written


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


def test_a_schedule_is_found_by_its_name_in_the_config(tmp_path):
    file = written(tmp_path, OWN_RECIPE + OWN_SCHEDULE)
    config = config_of("pixels", "perceptron", file)
    assert load_recipe(config).schedule is None
    named = load_recipe(replace(config, schedule=replace(config.schedule, name="stairs")))
    assert named.schedule is not None
    assert [named.schedule(step, 6) for step in range(6)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    with pytest.raises(ConfigError, match=r"^schedule\.name=stair is not known\. Nearest: stairs"):
        load_recipe(replace(config, schedule=replace(config.schedule, name="stair")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("resnte"), r"recipe\.uses=resnte is not known\. Nearest: resnet.*\. Known: .*resnet"),
        (config_of(model="resnet81"), r"model\.name=resnet81 is not known\. Nearest: .*resnet18"),
        (config_of(stemm="small"), r"model\.stemm .*resnet18.* Nearest: stem\. Known: stem, zero_init"),
        (config_of(path="/no/such/file.py"), r"recipes\.path=/no/such/file\.py does not exist"),
    ],
)
def test_unknown_names_get_the_nearest_ones(config, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nraise RuntimeError('boom')", r"mine\.py cannot be loaded: line 2: RuntimeError: boom"),
        ("x = 1\n\ndef f(:\n", r"mine\.py cannot be loaded: line 3: SyntaxError"),
        ("import no_such_package", r"line 1: ModuleNotFoundError: No module named 'no_such_package'"),
        (
            "from launcher.recipe import recipe\n@recipe('resnet')\ndef f(config): ...",
            r'@recipe\("resnet"\) is given twice: in .*resnet\.py and in .*mine\.py',
        ),
    ],
)
def test_files_that_cannot_be_used_name_file_and_error(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(config_of("mine", path=written(tmp_path, text)))


def test_a_recipe_that_returns_something_else_is_refused(tmp_path):
    file = written(tmp_path, "from launcher.recipe import recipe\n@recipe('mine')\ndef f(config): return 3")
    with pytest.raises(ConfigError, match=r'under @recipe\("mine"\) returned int'):
        load_recipe(config_of("mine", path=file))
