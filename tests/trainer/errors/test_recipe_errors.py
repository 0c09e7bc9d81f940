"""Exceptions of torch that a recipe's data brings about, and the rule that the message adds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from launcher.data.tensors import Batch
from launcher.distributed.env import LaunchEnv
from launcher.engine import EngineWarning
from launcher.errors import ConfigError, DataError, LauncherError, RecipeError
from launcher.recipe import Loss, Recipe, TensorData
from launcher.trainer.errors.rank_failure import to_launcher_error
from launcher.trainer.errors.recipe_errors import guarding, wrap_recipe

LOG = "/run/logs/rank0.log"
NORMS: dict[str, tuple[nn.Module, Tensor, str]] = {
    "batch norm": (nn.BatchNorm1d(3), torch.ones(1, 3), "A batch norm divides by the variance of a channel"),
    "of images": (nn.BatchNorm2d(3), torch.ones(1, 3, 1, 1), "set data.drop_last=true if it is the rest of"),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_a_single_value_says_what_it_needs(name: str) -> None:
    norm, x, rule = NORMS[name]

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return norm(batch["x"])

    with pytest.raises(DataError) as caught, guarding("the recipe's loss", LOG, {"x": x}):
        loss({"x": x})
    text = str(caught.value)
    assert text.count("\n") == 0
    assert f"at {__file__}:" in text
    assert rule in text


@pytest.mark.parametrize(
    ("label", "advice"), [(255, "give the loss ignore_index=255"), (3, "at least 4 outputs")]
)
def test_a_label_beyond_the_outputs_names_its_samples(label: int, advice: str) -> None:
    batch = {"x": torch.ones(4, 2), "label": torch.tensor([0, label, 1, label])}
    with pytest.raises(DataError) as caught, guarding("loss", LOG, batch):
        nn.functional.cross_entropy(torch.zeros(4, 3), batch["label"])
    assert f"The column label has {label} in samples 1, 3 of this micro-batch" in str(caught.value)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    "error", [ValueError("bad"), RuntimeError("bad"), AssertionError(), ZeroDivisionError()]
)
@pytest.mark.parametrize(("of_metric", "code"), [(False, 1), (True, 2)])
def test_only_an_exception_of_a_metric_is_sure_to_recur(error: Exception, of_metric: bool, code: int) -> None:
    with (
        pytest.raises(LauncherError) as caught,
        guarding("what", LOG, {"x": torch.ones(1)}, of_metric=of_metric),
    ):
        raise error
    assert (caught.value.exit_code, bool(caught.value.traceback)) == (code, True)


def test_a_module_that_is_not_installed_is_no_failure_that_a_restart_mends() -> None:
    with (
        pytest.raises(
            ConfigError, match=r"No module named 'absent_one'\. The package that has absent_one must"
        ),
        guarding("the function under @recipe", LOG),
    ):
        import absent_one  # noqa: F401


def test_the_tracker_of_a_hook_is_the_launchers() -> None:
    wandb = pytest.importorskip("wandb")
    assert wandb.run is None  # as on every rank but 0, and without tracker=wandb
    for log in (lambda: wandb.log({"mine": 1.0}), lambda: wandb.run.log({"mine": 1.0})):
        with pytest.raises(ConfigError, match=r"return \{name: value\} from"), guarding("the hook", LOG):
            log()


def test_another_attribute_of_none_is_no_matter_of_the_tracker() -> None:
    with pytest.raises(RecipeError) as raised, guarding("the hook", LOG):
        _ = None.shape  # type: ignore[attr-defined]
    assert "return {name" not in str(raised.value)


def recipe_with(loss: Callable[[nn.Module, Batch], Loss]) -> Recipe:
    data = TensorData({"x": torch.ones(4, 3)})
    return wrap_recipe(Recipe(lambda: nn.Linear(3, 1), data, data, loss), LOG)


@pytest.mark.parametrize(
    ("training", "text"),
    [(True, "to evaluation mode while it is trained"), (False, "to training mode while it is evaluated")],
)
def test_a_loss_that_changes_the_mode_of_the_network_is_warned_of_once(training: bool, text: str) -> None:
    def loss(network: nn.Module, batch: Batch) -> Loss:
        network.train(not training)
        return Loss(network(batch["x"]).sum(), 4)

    recipe = recipe_with(loss)
    network = recipe.build_model()
    with pytest.warns(EngineWarning, match=text):
        recipe.loss(network.train(training), {"x": torch.ones(4, 3)})
    recipe.loss(network.train(training), {"x": torch.ones(4, 3)})


def test_parts_of_the_network_may_have_another_mode() -> None:
    def loss(network: nn.Module, batch: Batch) -> Loss:
        next(iter(network.children())).eval()
        network.eval()  # for a second look, say
        return Loss(network.train()(batch["x"]).sum(), 4)

    network = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    assert recipe_with(loss).loss(network, {"x": torch.ones(4, 3)}).count == 4


@pytest.mark.parametrize("text", ["samples 0, 1: RuntimeError: kaboom", "samples 0, 1: it was torn."])
def test_the_error_of_a_sample_is_a_sentence_before_its_log(text: str) -> None:
    error = DataError(text)
    error.traceback = "Traceback"
    found = to_launcher_error(error, LaunchEnv(), "logs/rank0.log", ("reading", "Read less."))
    assert str(found) == f"{text.rstrip('.')}. The full traceback is in logs/rank0.log."
    error.restart_helps = error.shared = True
    found = to_launcher_error(error, LaunchEnv(), "logs/rank0.log", ("reading", "Read less."))
    assert found is not None
    assert found.restart_helps
    assert found.shared


def test_a_lost_loader_process_is_not_blamed_on_what_was_running() -> None:
    """Torch raises it from a signal handler, so anywhere: the pool names the sample later."""
    lost = RuntimeError("DataLoader worker (pid 1234) is killed by signal: Killed. ")

    def loss(network: nn.Module, batch: Batch) -> Loss:
        raise lost

    recipe = recipe_with(loss)
    with pytest.raises(RuntimeError) as caught:
        recipe.loss(nn.Linear(1, 1), {})
    assert caught.value is lost


def test_a_failure_of_torchs_compiler_names_the_key() -> None:
    from torch._dynamo.exc import InternalTorchDynamoError

    with pytest.raises(ConfigError, match=r"failed: set train\.compile=false\."), guarding("the loss", LOG):
        raise InternalTorchDynamoError("no compiler")
