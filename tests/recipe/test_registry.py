import pytest

from launcher.config.optimizers import OptimConfig
from launcher.engine import UnusableError
from launcher.errors import ConfigError
from launcher.recipe import registry_of
from launcher.trainer.builders.build import build_optimizer
from tests.recipe.own import OWN_RECIPE, written

OWN_OPTIMIZERS = """
import torch
from launcher.recipe import optimizer
@optimizer("plain")
class Plain(torch.optim.Adamax): pass
class Unmarked(Plain): pass
@optimizer("made")
def made(params, lr): return torch.optim.Adamax(params, lr)
"""


def optimizer_of(tmp_path, name, **options):
    file = str(written(tmp_path, OWN_OPTIMIZERS))
    return build_optimizer(OptimConfig(name, 0.1, None, (), True, options), file)


def test_a_class_of_torch_is_an_optimizer_with_its_options(tmp_path):
    found = optimizer_of(tmp_path, "plain", eps=1e-6)
    assert (found.kind.__name__, found.lr, found.options) == ("Plain", 0.1, {"eps": 1e-6})


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("plain", {"momentum": 0.9}, "unexpected keyword argument 'momentum'"),
        ("made", {}, "is not a class of torch.optim"),
        ("plane", {}, "optim.name=plane is not known. Nearest: plain"),
    ],
)
def test_what_cannot_be_an_optimizer_is_refused_in_words(tmp_path, name, options, text):
    with pytest.raises((ConfigError, UnusableError)) as caught:
        optimizer_of(tmp_path, name, **options)
    assert text in str(caught.value)


def test_a_name_of_the_launchers_own_optimizers_is_taken(tmp_path):
    file = written(tmp_path, OWN_OPTIMIZERS.replace('"plain"', '"adamw"'))
    with pytest.raises(ConfigError, match=r'@optimizer\("adamw"\): that optimizer is one of the launcher'):
        registry_of(str(file))


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
