"""Arguments of another type are refused before the model is touched; a subclass has attributes of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.engine import SGD, DDPOptions, Policy, Scaling, Stepper, UnusableError
from tests.engine.observe import train
from tests.meta_device import fake_group
from tests.models import features, loss_sum, mlp

REFUSED = {
    "a method": (
        {"policy": Policy.fp16},
        r"policy=<bound method .*must be a Policy, for example Policy.fp16\(\)",
    ),
    "a name": ({"policy": "fp16"}, "policy='fp16': it must be a Policy"),
    "an empty name": ({"policy": ""}, "policy='': it must be a Policy"),
    "a dtype": ({"policy": torch.float16}, "policy=torch.float16: it must be a Policy"),
    "ddp": ({"ddp": "fp32"}, "ddp='fp32': it must be a DDPOptions, for example DDPOptions"),
    "ddp class": ({"ddp": DDPOptions}, "ddp=<class .*must be a DDPOptions"),
    "scaling": ({"scaling": 1024}, r"scaling=1024: it must be a Scaling, for example Scaling\(init=1024\)"),
    "scaling class": ({"scaling": Scaling}, "scaling=<class .*must be a Scaling"),
    "one rate": ({"learning_rates": 0.1}, "learning_rates=0.1: it must be a sequence of numbers"),
    "a tensor of a rate": ({"learning_rates": torch.tensor(0.1)}, "it must be a sequence of numbers"),
    "a function": ({"learning_rates": lambda step: 0.1}, "it must be a sequence of numbers"),
    "emulate": ({"emulate": "auto"}, "emulate='auto': it must be True or False"),
    "emulate as an int": ({"emulate": 1}, "emulate=1: it must be True or False"),
    "group": ({"group": "WORLD"}, "group='WORLD': it must be a process group"),
    "group as a flag": ({"group": True}, "group=True: it must be a process group"),
    "no group": ({"group": 0}, "group=0: it must be a process group"),
}


@pytest.mark.parametrize(("options", "text"), REFUSED.values(), ids=REFUSED)
def test_arguments_of_another_type_are_refused_before_the_model_is_moved(options, text) -> None:
    model = mlp()
    before = [(p.data_ptr(), p.dtype) for p in model.parameters()]
    with pytest.raises(UnusableError, match=text):
        Stepper(model, SGD(0.1), **options)
    assert [(p.data_ptr(), p.dtype) for p in model.parameters()] == before


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(UnusableError, match=r"model=.*must be a torch.nn.Module"):
        Stepper(mlp().parameters(), SGD(0.1))


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


def test_parameters_that_are_tied_through_their_data_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(UnusableError, match=r"^0\.weight and 1\.weight share memory through their data"):
        Stepper(model, SGD(0.1))
    model[1].weight = model[0].weight
    Stepper(model, SGD(0.1))
