"""The public API of a Stepper in any order, against a loop written with plain torch.

Hypothesis draws sequences of micro-batches, failures, probes outside the Stepper, steps, abandoned steps,
saved and loaded states, in-place changes, freezing, casts and second Steppers. The reference keeps fp32
masters in a `torch.optim` optimizer, a half copy of the model, and the loss scale as Python integers. After
each call both hold the same numbers, and whatever the user left in `p.grad` is still there.
"""

from __future__ import annotations

import copy
import io
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from launcher.engine import SGD, AdamW, Policy, Scaling, Stepper, UnusableError

POLICIES = {
    "fp32": Policy.fp32(),
    "amp_fp16": Policy.amp_fp16(),
    "fp16": Policy.fp16(),
    "bf16": Policy.bf16(),
}
INIT, GROWTH, MAX = 2**10, 3, 2**12
REFERENCE = 4  # n0
CLIP = 0.5
EPS = 1e-2  # of AdamW: with a small one its first updates turn on the sign of rounding errors
FEATURES, CLASSES = 6, 3


class _Fails(torch.autograd.Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise MemoryError("planted")


class Net(nn.Module):
    """[n, FEATURES] to [n, CLASSES], with batch norm; may be told to fail half-way through its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, CLASSES)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(_Fails.apply(hidden) if self.fails else hidden)


def batch_of(seed: int, size: int, value: float = 1.0) -> tuple[Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (size,), generator=generator), value


def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor, float]) -> Tensor:
    x, classes, factor = batch
    return F.cross_entropy(model(x).float(), classes, reduction="sum") * factor


@dataclass
class Reference:
    """The same training by torch's own parts."""

    policy: Policy
    micro_batches: int
    master: nn.Module  # fp32
    kind: str
    lr: float = 0.05
    exponent: int = 0
    clean: int = 0
    applied: int = 0
    skipped: int = 0
    gradients: dict[str, Tensor] = field(default_factory=dict)  # scaled; fp32 sums of this step
    losses: list[float] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        if self.scaled:
            self.exponent = INIT.bit_length() - 1
        options: dict[str, Any] = {"lr": self.lr, "weight_decay": 0.01}
        parameters = list(self.master.parameters())
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, momentum=0.9, **options)
            if self.kind == "sgd"
            else torch.optim.AdamW(parameters, eps=EPS, **options)
        )
        self.before = self._buffers()

    @property
    def scaled(self) -> bool:
        return self.policy.scale_mode == "dynamic"

    def backward(self, batch: tuple[Tensor, Tensor, float], own: bool = True) -> None:
        """Add a micro-batch; the buffers move with those of this rank's `own`."""
        half = copy.deepcopy(self.master)
        half.fails = False
        for p in half.parameters():
            p.grad = None
            if p.ndim >= 2:
                p.data = p.data.to(self.policy.weights)
        with self.policy.forward(torch.device("cpu"), emulate=self.policy.arithmetic != torch.float32):
            loss = loss_sum(half, batch)
            (loss * 2.0**self.exponent / REFERENCE).backward()
        for (name, p), wire in zip(half.named_parameters(), self._wires(), strict=True):
            assert p.grad is not None
            got = p.grad if self.micro_batches > 1 else p.grad.to(wire)
            self.gradients[name] = (
                self.gradients[name] + got.float() if name in self.gradients else got.float()
            )
        if own:
            self._restore(list(half.buffers()))
        self.losses.append(float(loss.detach()))
        self.count += len(batch[0])

    def step(self) -> bool:
        """Whether the step was skipped."""
        rounded = {
            name: self.gradients[name].to(wire).float()
            for (name, _), wire in zip(self.master.named_parameters(), self._wires(), strict=True)
            if name in self.gradients
        }
        bad_loss = not all(torch.isfinite(torch.tensor(self.losses)))
        overflow = not all(bool(g.isfinite().all()) for g in rounded.values()) and not bad_loss
        skip = bad_loss or overflow or self.count == 0
        if skip:
            self._restore(self.before)
            self.skipped += 1
            if self.scaled and overflow:
                self.exponent, self.clean = max(0, self.exponent - 1), 0
        else:
            unscale = REFERENCE / (2.0**self.exponent * self.count)
            for name, p in self.master.named_parameters():
                p.grad = rounded[name] * unscale
            torch.nn.utils.clip_grad_norm_(self.master.parameters(), CLIP)
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.applied += 1
            if self.scaled:
                self.clean += 1
                if self.clean == GROWTH:
                    self.exponent, self.clean = min(self.exponent + 1, MAX.bit_length() - 1), 0
        self._begin()
        return skip

    def abandon(self) -> None:
        self._restore(self.before)
        self._begin()

    def copy(self) -> Reference:
        return copy.deepcopy(self)

    def _begin(self) -> None:
        self.gradients, self.losses, self.count = {}, [], 0
        self.before = self._buffers()

    def _wires(self) -> list[torch.dtype]:
        return [
            self.policy.gradient_dtype if p.ndim >= 2 else torch.float32 for p in self.master.parameters()
        ]

    def _buffers(self) -> list[Tensor]:
        return [b.clone() for b in self.master.buffers()]

    def _restore(self, buffers: list[Tensor]) -> None:
        for ours, saved in zip(self.master.buffers(), buffers, strict=True):
            ours.copy_(saved)


class AnyOrder(RuleBasedStateMachine):
    """One Stepper on one rank, driven at random."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        kind=st.sampled_from(["sgd", "adamw"]),
        micro_batches=st.integers(1, 3),
    )
    def build(self, policy: str, kind: str, micro_batches: int) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.policy = POLICIES[policy]
        self.kind, self.micro_batches = kind, micro_batches
        self.reference = Reference(self.policy, micro_batches, copy.deepcopy(self.model), kind)
        self.stepper = self._stepper()
        self.done = 0
        self.failed = False
        self.saved: tuple[bytes, Reference] | None = None
        self.probes: dict[str, Tensor | None] = {name: None for name, _ in self.model.named_parameters()}

    def _stepper(self) -> Stepper:
        optimizer = (
            SGD(0.05, momentum=0.9, weight_decay=0.01)
            if self.kind == "sgd"
            else AdamW(0.05, eps=EPS, weight_decay=0.01)
        )
        dynamic = self.policy.scale_mode == "dynamic"
        scaling = Scaling("dynamic", init=INIT, growth_interval=GROWTH, max=MAX) if dynamic else None
        return Stepper(
            self.model,
            optimizer,
            self.policy,
            scaling=scaling,
            clip_norm=CLIP,
            micro_batches=self.micro_batches,
            reference_count=REFERENCE,
            emulate=True,
        )

    @property
    def room(self) -> bool:
        return self.done < self.micro_batches and not self.failed

    # ---- training

    @precondition(lambda self: self.room)
    @rule(
        seed=st.integers(0, 9),
        size=st.integers(3, 6),
        value=st.sampled_from([1.0, 1.0, 1.0, 1e6, float("inf")]),
    )
    def backward(self, seed: int, size: int, value: float) -> None:
        batch = batch_of(seed, size, value)
        with self.stepper.forward():
            loss = loss_sum(self.model, batch)
        self.stepper.backward(loss, size)
        self.reference.backward(batch)
        self.done += 1

    @precondition(lambda self: self.room)
    @rule(seed=st.integers(0, 9), size=st.integers(3, 6))
    def backward_that_raises(self, seed: int, size: int) -> None:
        self.model.fails = True
        try:
            with self.stepper.forward():
                loss = loss_sum(self.model, batch_of(seed, size))
            with pytest.raises(MemoryError):
                self.stepper.backward(loss, size)
        finally:
            self.model.fails = False
        self.failed = True

    @precondition(lambda self: self.failed or self.done == self.micro_batches)
    @rule()
    def backward_too_often(self) -> None:
        loss = (self.model.last.weight.float() * 1.0).sum()
        with pytest.raises(RuntimeError, match=r"abandon|micro_batches"):
            self.stepper.backward(loss, 1)

    @precondition(lambda self: self.room)
    @rule(which=st.sampled_from(["half", "vector", "count", "constant"]))
    def refused_loss(self, which: str) -> None:
        weight = self.model.last.weight
        loss, count = {
            "half": (weight.half().sum(), 1),
            "vector": (weight.float().sum(dim=1), 1),
            "count": (weight.float().sum(), -1),
            "constant": (torch.zeros(()), 1),
        }[which]
        with pytest.raises(UnusableError):
            self.stepper.backward(loss, count)

    @rule()
    def step(self) -> None:
        if self.failed:
            self._abandoned_by_step()
            return
        if self.done == 0:
            return  # an empty step is refused or warned of where p.grad is set: its own tests
        report = self.stepper.step().read()
        skipped = self.reference.step()
        assert report.skipped == skipped
        assert report.applied_steps == self.reference.applied
        assert report.skipped_steps == self.reference.skipped
        self.done = 0

    def _abandoned_by_step(self) -> None:
        report = self.stepper.step().read()
        assert report.skipped
        assert report.abandoned_ranks == (0,)
        self._forget()

    @rule()
    def abandon(self) -> None:
        self.stepper.abandon()
        self._forget()

    def _forget(self) -> None:
        self.reference.abandon()
        self.done, self.failed = 0, False

    @rule(lr=st.sampled_from([0.05, 0.01, 0.1]))
    def set_rate(self, lr: float) -> None:
        self.stepper.lr = lr
        self.reference.lr = lr

    # ---- beside the Stepper

    @rule(seed=st.integers(0, 9))
    def probe(self, seed: int) -> None:
        """A backward pass of the user's own, which goes to p.grad."""
        buffers = [b.clone() for b in self.model.buffers()]
        with self.stepper.forward():
            loss_sum(self.model, batch_of(seed, 3)).backward()
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        self._remember_probes()

    @rule(to_none=st.booleans())
    def zero_grad(self, to_none: bool) -> None:
        self.model.zero_grad(set_to_none=to_none)
        self._remember_probes()

    def _remember_probes(self) -> None:
        self.probes = {
            name: None if p.grad is None else p.grad.clone() for name, p in self.model.named_parameters()
        }

    @precondition(lambda self: self.done == 0 and not self.failed)
    @rule(
        low=st.sampled_from([-0.1, -0.2]), name=st.sampled_from(["first.weight", "last.weight", "last.bias"])
    )
    def clamp_in_place(self, low: float, name: str) -> None:
        """As a WGAN does: elements that are changed are taken, the others keep their master."""
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            parameter, master = self.model.get_parameter(name), self.reference.master.get_parameter(name)
            changed = (parameter < low) | (parameter > -low)
            parameter.clamp_(low, -low)
            master.copy_(torch.where(changed, parameter.float(), master))
            self.stepper.named_masters()

    @precondition(lambda self: self.done == 0 and not self.failed)
    @rule()
    def freeze_and_thaw(self) -> None:
        self.model.first.weight.requires_grad_(False)
        with self.stepper.forward():
            loss = loss_sum(self.model, batch_of(0, 3))
        with pytest.raises(UnusableError, match=r"first\.weight"):
            self.stepper.backward(loss, 3)
        self.model.first.weight.requires_grad_(True)
        self.stepper.abandon()

    @precondition(lambda self: self.done == 0 and not self.failed)
    @rule(how=st.sampled_from(["double", "data", "second"]))
    def cut_off(self, how: str) -> None:
        """A model that left the flat memory is refused; a new Stepper trains it."""
        state = self.stepper.state().clone()
        if how == "double":
            self.model.double().float()
        elif how == "data":
            self.model.last.weight.data = self.model.last.weight.data.clone()
        newer = self._stepper() if how == "second" else None
        with pytest.raises(UnusableError):
            self.stepper.step()
        self.stepper = newer or self._stepper()
        self.stepper.load(state)
        self.stepper.lr = self.reference.lr
        self._remember_probes()

    # ---- states

    @precondition(lambda self: self.done == 0 and not self.failed)
    @rule()
    def save(self) -> None:
        file = io.BytesIO()
        torch.save(self.stepper.state_dict(), file)
        self.saved = (file.getvalue(), self.reference.copy())

    @precondition(lambda self: self.saved is not None and self.done == 0 and not self.failed)
    @rule(anew=st.booleans())
    def load(self, anew: bool) -> None:
        assert self.saved is not None
        data, reference = self.saved
        if anew:
            self.model = Net()
            self.stepper = self._stepper()
            self._remember_probes()
        self.stepper.load_state_dict(torch.load(io.BytesIO(data), weights_only=True))
        self.reference = reference.copy()
        self.stepper.lr = self.reference.lr

    @precondition(lambda self: self.done > 0)
    @rule()
    def state_in_mid_step(self) -> None:
        with pytest.raises(UnusableError, match="step"):
            self.stepper.state()

    # ---- what always holds

    @invariant()
    def both_agree(self) -> None:
        if not hasattr(self, "stepper"):
            return
        for name, p in self.model.named_parameters():
            before = self.probes[name]
            assert (p.grad is None) == (before is None), name
            assert before is None or torch.equal(p.grad, before), name
        if self.done or self.failed:
            return
        masters = self.stepper.named_masters()
        slack = 1 + self.reference.applied / 50  # rounding differs, and the differences add up
        for name, expected in self.reference.master.named_parameters():
            torch.testing.assert_close(masters[name], expected.detach(), rtol=2e-5 * slack, atol=2e-6 * slack)
            p = self.model.get_parameter(name)
            assert torch.equal(p.detach(), masters[name].to(p.dtype)), name
        for (name, ours), theirs in zip(
            self.model.named_buffers(), self.reference.master.buffers(), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5 * slack, atol=1e-6 * slack, msg=name)
        scale = 2.0**self.reference.exponent if self.reference.scaled else 1.0
        assert float(self.stepper.scale.value()) == scale


AnyOrder.TestCase.settings = settings(
    max_examples=10, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_long_sequences() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        AnyOrder,
        settings=settings(
            max_examples=40, stateful_step_count=500, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
