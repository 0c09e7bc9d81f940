"""Models that a Stepper cannot train are refused; a subclass of it has attributes of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.engine import SGD, Policy, Stepper, UnusableError
from tests.engine.observe import train
from tests.meta_device import fake_group
from tests.models import features, loss_sum, mlp


def test_rates_may_be_any_sequence() -> None:
    for rates in ((0.5, 0.25), torch.linspace(0.5, 0.25, 2).tolist(), iter([0.5, 0.25])):
        assert Stepper(mlp(), SGD(0.1), learning_rates=rates).lr == 0.5


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_a_lazy_model_is_refused_until_its_first_forward_pass() -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Linear(16, 3))
    with pytest.raises(UnusableError, match=r"0.weight, 0.bias, 1.weight, 1.bias and 2 more of Sequential"):
        Stepper(model, SGD(0.1), Policy.fp32())
    x, classes = features(4, 0)
    model(x)
    assert train(Stepper(model, SGD(0.1), Policy.fp32()), x, classes).applied_steps == 1
    buffers = nn.Sequential(nn.Linear(8, 3), nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(UnusableError, match=r"1.running_mean, 1.running_var of Sequential have no shape"):
        Stepper(buffers, SGD(0.1))


def test_a_dry_backward_needs_the_reference_count() -> None:
    x, classes = features(4, 0)
    model = mlp()
    stepper = Stepper(model, SGD(0.1), Policy.fp32())
    with pytest.raises(
        UnusableError, match=r"before the reference count is known.*reference_count, the usual"
    ):
        stepper.dry_backward(loss_sum(model(x), classes))
    train(stepper, x, classes)
    assert stepper.dry_backward(loss_sum(model(x), classes)).keys() == dict(model.named_parameters()).keys()


class Logging(Stepper):
    lr_of_head: float = 0.0

    def __init__(self, model: nn.Module) -> None:
        self.early: list[int] = []
        super().__init__(model, SGD(0.1), Policy.fp32())
        self.log: list[float] = []
        self._steps = 0
        self.best_model = None
        self.lr_of_head = 0.1

    def step(self):
        self._steps += 1
        self.early = [*self.early, self._steps]
        return super().step()


def test_a_subclass_has_attributes_of_its_own() -> None:
    stepper = Logging(mlp())
    stepper.lr = 0.2
    train(stepper, *features(4, 0))
    stepper.log = [1.0]
    assert (stepper.log, stepper.early, stepper._steps, stepper.lr_of_head) == ([1.0], [1], 1, 0.1)
    assert stepper.lr == pytest.approx(0.2)


@pytest.mark.parametrize("within", [False, True], ids=["itself", "within another module"])
def test_a_model_that_exchanges_gradients_itself_is_refused(within) -> None:
    """It trained other weights without a word: its means were taken for the gradients of one rank."""
    with fake_group(2):
        wrapped = nn.parallel.DistributedDataParallel(mlp())
        with pytest.raises(UnusableError, match=r"DistributedDataParallel.*wrapped\.module"):
            Stepper(nn.Sequential(wrapped) if within else wrapped, SGD(0.1), Policy.fp32())
