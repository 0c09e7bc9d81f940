"""Mistakes of a training loop that would train wrongly in silence, and what such a loop may set."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher.engine import SGD, AdamW, EngineWarning, Policy, Stepper, TorchOptimizer, UnusableError
from tests.engine.observe import deciding_on_device, state_digest, train
from tests.models import features, loss_sum, mlp


def stepper_of(**options) -> Stepper:
    return Stepper(mlp(), SGD(0.1), Policy.fp32(), **options)


def test_a_step_after_torchs_own_backward_is_refused_with_the_right_call() -> None:
    stepper = stepper_of()
    x, classes = features(4, 0)
    before = state_digest(stepper)
    loss_sum(stepper.model(x), classes).backward()
    with pytest.raises(UnusableError, match=r"call stepper.backward\(loss_sum, count\) instead"):
        stepper.step()
    assert state_digest(stepper) == before
    assert train(stepper, x, classes).applied_steps == 1  # gradients of a probe do not matter beside ours
    stepper.model.zero_grad()
    assert stepper.step().read().skipped


def test_a_step_beside_another_networks_pass_names_both_cases() -> None:
    """A discriminator through which a generator was trained, on a rank without samples of its own."""
    stepper = stepper_of()
    stepper.model(features(4, 0)[0]).sum().backward()
    with pytest.raises(UnusableError) as caught:
        stepper.step()
    assert "from this network's loss, call stepper.backward(loss_sum, count)" in str(caught.value)
    assert "another network's backward pass (a generator's" in str(caught.value)
    assert "call model.zero_grad() before step(), or skip step() on all ranks" in str(caught.value)


@pytest.mark.filterwarnings("ignore:clip_grad_norm_.. is called beside")
def test_torchs_own_clipping_before_a_step_changes_nothing_and_clip_norm_clips() -> None:
    moved = []
    for clip_norm, clips in ((None, False), (None, True), (1e-3, False)):
        stepper = stepper_of(clip_norm=clip_norm)
        before = {name: p.detach().clone() for name, p in stepper.model.named_parameters()}
        x, classes = features(4, 0)
        stepper.backward(loss_sum(stepper.model(x), classes), 4)
        if clips:
            assert nn.utils.clip_grad_norm_(stepper.model.parameters(), 1e-3) == 0, "p.grad is None"
        stepper.step()
        squares = [(p - before[name]).square().sum() for name, p in stepper.model.named_parameters()]
        moved.append(torch.stack(squares).sum().sqrt().item())
    assert moved[0] == moved[1] > 1e-2
    assert moved[2] == pytest.approx(0.1 * 1e-3, rel=1e-2)
    assert "clip_grad_norm_" in (Stepper.__doc__ or "")


def test_the_docstring_of_the_rate_says_that_no_state_holds_it() -> None:
    stepper, other = stepper_of(), stepper_of()
    stepper.lr = 0.05
    other.load_state_dict(stepper.state_dict())
    assert other.lr == pytest.approx(0.1)
    assert "not part of state_dict()" in " ".join((type(stepper).lr.__doc__ or "").split())


def test_a_step_without_samples_is_skipped_and_has_no_loss() -> None:
    report = stepper_of().step().read()
    assert report.skipped
    assert report.count == 0
    assert report.loss != report.loss


@pytest.mark.parametrize("rate", [-1.0, float("nan"), True, "0.1", None])
def test_a_rate_that_is_none_is_refused(rate) -> None:
    stepper = stepper_of()
    with pytest.raises(UnusableError, match="lr="):
        stepper.lr = rate
    assert stepper.lr == 0.1


def test_the_rate_of_the_next_applied_step_is_shown_and_set() -> None:
    stepper = stepper_of(learning_rates=[0.4, 0.3, 0.2])
    x, classes = features(4, 0)
    shown, used = [], []
    for step in range(5):
        if step == 3:
            stepper.lr = 0.05
        shown.append(stepper.lr)
        with stepper.forward():
            loss = loss_sum(stepper.model(x), classes)
        stepper.backward(loss * (float("nan") if step == 1 else 1.0), 4)
        used.append(stepper.step().read().lr)
    assert shown == used == [0.4, 0.3, 0.3, 0.05, 0.05]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", ["own", "adapted", "on a device"])
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
def test_a_scheduler_of_torch_sets_the_rates_of_an_own_loop(name, kind) -> None:
    """Against AdamW of torch under the same scheduler."""
    optimizer = TorchOptimizer(torch.optim.AdamW, 0.1) if kind == "adapted" else AdamW(0.1)
    with deciding_on_device(kind == "on a device"):
        stepper = Stepper(mlp(), optimizer, Policy.fp32())
    twin = mlp()
    dummy = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
    ours_scheduler, their_scheduler = SCHEDULERS[name](dummy), SCHEDULERS[name](theirs)
    for step in range(20):
        x, classes = features(8, step)
        stepper.lr = dummy.param_groups[0]["lr"]
        train(stepper, x, classes)
        theirs.zero_grad()
        torch.nn.functional.cross_entropy(twin(x), classes).backward()
        theirs.step()
        if step < 19:
            ours_scheduler.step()
            their_scheduler.step()
    for ours, reference in zip(stepper.model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, reference, rtol=1e-4, atol=1e-5)


def test_one_of_several_processes_without_a_process_group_says_so(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    stepper_of()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(EngineWarning, match=r"^WORLD_SIZE=2, but no process group .*init_process_group\(\)"):
        stepper_of()


def test_a_group_of_one_among_several_processes_is_meant(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        stepper_of(group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "rates", [np.linspace(0.1, 0.05, 3, dtype=np.float32), [Fraction(1, 10)] * 3, [1, 1, 1]]
)
def test_rates_of_any_kind_of_number_are_reported_as_floats(rates, on_device) -> None:
    """An event of the log, for one, is written as JSON."""
    with deciding_on_device(on_device):
        stepper = Stepper(mlp(), SGD(0.1), Policy.fp32(), learning_rates=rates)
    assert json.dumps([train(stepper, *features(8, 0)).lr, stepper.lr])
    stepper.lr = rates[1]
    assert type(stepper.lr) is float
    assert json.dumps(train(stepper, *features(8, 0)).lr) == json.dumps(stepper.lr)


@pytest.mark.parametrize("optimizer", [SGD(0.1, 0.9), AdamW(0.1)], ids=["sgd", "adamw"])
def test_it_trains_under_another_default_dtype(optimizer) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        model, (x, classes) = mlp(), features(8, 0)
        torch.set_default_dtype(dtype)
        try:
            stepper = Stepper(model, optimizer, Policy.fp16(), reference_count=8)
            assert not train(stepper, x, classes).skipped
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([master.clone() for master in stepper.named_masters().values()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    "count", [torch.tensor(200, dtype=torch.uint8), torch.tensor(200.0, dtype=torch.float16)]
)
def test_a_count_of_few_bits_is_taken_as_it_is(count) -> None:
    stepper = Stepper(mlp(), SGD(0.1), Policy.fp32(), micro_batches=512)
    x, classes = features(8, 0)
    stepper.backward(loss_sum(stepper.model(x), classes), count)
    assert not stepper.step().read().skipped
    assert stepper.state().reference_count == 2**17


def test_a_stepper_that_decides_on_the_device_reports_the_same_norm() -> None:
    """With gaps between the parameters, which are read with them."""
    norms = []
    for on_device in (False, True):
        torch.manual_seed(0)
        layers = [
            nn.Linear(8, 5),
            nn.BatchNorm1d(5),
            nn.ReLU(),
            nn.Linear(5, 7),
            nn.BatchNorm1d(7),
            nn.ReLU(),
        ]
        model = nn.Sequential(*layers, nn.Linear(7, 3))
        with deciding_on_device(on_device):
            stepper = Stepper(model, SGD(0.1), Policy.fp32())
        norms.append([train(stepper, *features(8, step)).grad_norm for step in range(40)])
    assert norms[0] == pytest.approx(norms[1], rel=1e-15)  # torch 2.11: but for the last bit


def test_a_grad_scaler_that_is_left_in_place_is_refused() -> None:
    stepper, scaler = stepper_of(), torch.amp.GradScaler("cpu")
    x, classes = features(4, 0)
    with pytest.raises(UnusableError, match=r"multiplied by a GradScaler.*remove scaler.scale\(\)"):
        stepper.backward(scaler.scale(loss_sum(stepper.model(x), classes)), 4)
    stepper.backward(loss_sum(stepper.model(x), classes) * torch.tensor(65536.0), 4)  # a factor of the user's
    assert not stepper.step().read().skipped


@pytest.mark.parametrize("clips", [True, False])
def test_a_clip_grad_norm_that_is_left_in_place_is_named_once(clips) -> None:
    stepper = stepper_of(clip_norm=None if clips else 1.0)
    x, classes = features(4, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            stepper.backward(loss_sum(stepper.model(x), classes), 4)
            torch.nn.utils.clip_grad_norm_(stepper.model.parameters(), 1.0)
            stepper.step()
    assert ["clip_grad_norm_() is called beside stepper.step()" in str(each.message) for each in caught] == (
        [True] * clips
    )
    assert all(each.filename == __file__ for each in caught)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("emulate", [False, True])
def test_a_model_that_is_called_outside_of_forward_says_where_to_call_it(copied, emulate) -> None:
    stepper = Stepper(mlp(), SGD(0.1), Policy.fp16(), emulate=emulate)
    model = copy.deepcopy(stepper.model) if copied else stepper.model
    x = features(4, 0)[0]
    with pytest.raises(RuntimeError) as caught, torch.no_grad():
        model(x)
    (note,) = caught.value.__notes__
    assert "The weights of this model are torch.float16" in note
    assert "within `with stepper.forward():`" in note
    with stepper.forward(), torch.no_grad():
        assert model(x).isfinite().all()
    with stepper.forward(), pytest.raises(RuntimeError) as caught:  # of its own: it has other shapes
        model(x[:, :3])
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_takes_the_lr_optimizer(name) -> None:
    """The rates of a torch optimizer under the same scheduler, without a dummy and without a warning."""
    stepper = stepper_of()
    theirs = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedulers = SCHEDULERS[name](stepper.lr_optimizer), SCHEDULERS[name](theirs)
    x, classes = features(8, 0)
    for _ in range(19):
        assert stepper.lr == theirs.param_groups[0]["lr"] == train(stepper, x, classes).lr
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
    stepper.lr = 0.25
    assert train(stepper, x, classes).lr == 0.25


def test_clipping_is_noticed_after_a_first_step_that_was_abandoned() -> None:
    stepper = stepper_of()
    stepper.abandon()
    x, classes = features(4, 0)
    stepper.backward(loss_sum(stepper.model(x), classes), 4)
    torch.nn.utils.clip_grad_norm_(stepper.model.parameters(), 1.0)
    with pytest.warns(EngineWarning, match="clip_grad_norm_.. is called beside"):
        stepper.step()
