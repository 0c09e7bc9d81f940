"""Any other `torch.optim` optimizer, on fp32 masters, with skip and clip as for our own.

Owns the translation between the flat layout and the parameter lists that torch's optimizers take. It is
correct, not fast: the gradient is widened into separate memory, and the host waits for the skip flag.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import launcher.engine.limits as limits
from launcher.engine.errors import UnusableError
from launcher.engine.grads.zero1 import Zero1
from launcher.engine.names import named_parameters
from launcher.engine.optim.muon import MuonWithAdamW, hidden_matrices
from launcher.engine.optim.optimizers import Optimizer
from launcher.engine.optim.update import Collect, StepScalars, Updater
from launcher.engine.params.flat_buffers import Shard
from launcher.engine.params.flat_params import Layout, half_in
from launcher.engine.params.param_groups import Grouping, GroupOptions
from launcher.engine.precision.policy import Policy
from launcher.engine.state import check_forms, forms_of

Kind = type[torch.optim.Optimizer]


@dataclass(init=False)
class TorchOptimizer:
    """A class from `torch.optim` with its options: `TorchOptimizer(torch.optim.Adam, 1e-3, eps=1e-6)`.

    Raises UnusableError for anything but such a class, and for options that it does not accept. Not for
    LBFGS, which evaluates the loss several times per step, and SparseAdam: a step here is one dense gradient.
    """

    kind: Kind
    lr: float
    options: dict[str, Any]

    def __init__(self, kind: Kind, /, lr: float, **options: Any) -> None:
        self.kind, self.lr, self.options = kind, lr, options
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise UnusableError(
                f"{kind!r} is not a class of torch.optim. Give the class and its options: "
                "TorchOptimizer(torch.optim.Adam, lr=1e-3)."
            )
        limits.rate.require(f"{kind.__name__} lr", lr)
        errors = [self.objection(torch.zeros(shape)) for shape in ((1, 1), (1,))]
        if all(errors):  # an optimizer may refuse one shape: Muon takes matrices only
            raise UnusableError(f"{kind.__name__} refuses lr={lr}, {options}: {errors[0]}")

    def over(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """torch's own, of these parameters or groups."""
        return self.kind(params, lr=self.lr, **self.options)  # type: ignore[call-arg]  # each takes a rate

    def objection(self, tensor: Tensor) -> str:
        """The error of torch's own for a parameter like this; empty if it accepts it."""
        try:
            self.over([{"params": [nn.Parameter(tensor)], "use_muon": tensor.ndim == 2}])
        except (TypeError, ValueError, RuntimeError) as error:
            return str(error)
        return ""


def check_adaptable(
    optimizer: object, model: nn.Module, grouping: Grouping, policy: Policy, sharded: bool
) -> None:
    """Raise UnusableError for a TorchOptimizer that cannot train `model`. Does not change `model`."""
    named = named_parameters(model).items()
    trainable = {name: p for name, p in named if p.requires_grad and name not in grouping.frozen}
    if not isinstance(optimizer, TorchOptimizer):
        return
    kind = optimizer.kind.__name__
    matrices = half_in(model, policy).intersection(trainable.values())
    if matrices and sharded:
        raise UnusableError(
            f"{kind} cannot be sharded: it needs whole parameters. Use SGD or AdamW, or a "
            "DDPOptions without shard_optimizer."
        )
    if matrices and not policy.masters and policy.weights != torch.float32:
        raise UnusableError(
            f"{kind} needs fp32 masters, and policy {policy.name} has none. Use SGD or AdamW, or a policy "
            "with masters."
        )
    if optimizer.kind is MuonWithAdamW and not hidden_matrices(model).intersection(trainable):
        raise UnusableError(
            f"{type(model).__name__} has no matrix that Muon trains: those of nn.Linear and "
            "nn.MultiheadAttention, but for the head. Use AdamW."
        )
    decayed = any(options.weight_decay is not None for options in grouping.options)
    if decayed and "weight_decay" not in inspect.signature(optimizer.kind).parameters:
        raise UnusableError(
            f"{kind} has no weight_decay, and a parameter group sets one. Leave weight_decay out of the "
            "groups, or use an optimizer that has it."
        )
    for name, p in trainable.items():
        if error := optimizer.objection(p.detach().float()):
            other = "MuonWithAdamW" if optimizer.kind is torch.optim.Muon else "another optimizer"
            raise UnusableError(
                f"{kind} refuses parameter {name}, {tuple(p.shape)}: {error}. Freeze it with "
                f"requires_grad_(False) before building the Stepper, or use {other}."
            )


AnyOptimizer = Optimizer | TorchOptimizer


def updater_of(
    optimizer: AnyOptimizer, model: nn.Module, layout: Layout, zero1: Zero1
) -> Updater | TorchUpdater:
    """The updater that applies `optimizer` to the shards of `layout`, which are those of `model`."""
    if isinstance(optimizer, TorchOptimizer):
        of_muon = hidden_matrices(model) if optimizer.kind is MuonWithAdamW else set()
        return TorchUpdater(layout, zero1.shards, optimizer, of_muon)
    return Updater(zero1.shards, optimizer, layout.grouping.options, zero1.group_slices())


def _states_of(
    optimizer: TorchOptimizer, master: Tensor, use_muon: bool, after_a_step: bool
) -> dict[str, Any]:
    """What it keeps for a parameter like `master`, at the start or after an update without a gradient."""
    parameter = nn.Parameter(torch.zeros_like(master))
    probe = optimizer.over([{"params": [parameter], "use_muon": use_muon}])
    if after_a_step:
        parameter.grad = torch.zeros_like(master)
        with torch.enable_grad():  # as in a step: an optimizer may need autograd
            probe.step()
    return {state: value for state, value in probe.state[parameter].items() if value is not None}


def _as_tensor(optimizer: torch.optim.Optimizer, state: str, value: object) -> Tensor:
    """A state as it is saved: numbers are tensors of no dimensions."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, int | float):
        raise UnusableError(
            f"{type(optimizer).__name__} keeps a {type(value).__name__} as its state {state}, which cannot "
            "be saved. Use an optimizer whose states are tensors and numbers."
        )
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


class TorchUpdater:
    """Runs a `TorchOptimizer` over the parameters of a layout; the counterpart of `update.Updater`.

    Only for what `check_adaptable` accepts. `of_muon`: the parameters whose group has `use_muon`.
    """

    def __init__(
        self, layout: Layout, shards: Sequence[Shard], optimizer: TorchOptimizer, of_muon: Set[str]
    ) -> None:
        self._layout = layout
        self._shards = list(shards)
        self._of_muon = of_muon
        self.states: list[list[Tensor]] = [[] for _ in shards]  # torch's are per parameter, not flat
        masters = layout.named([shard.master for shard in shards if shard.master is not None])
        self._masters = {name: nn.Parameter(master) for name, master in masters.items()}
        self._template = optimizer
        self._optimizer = optimizer.over(self._param_groups())

    def _param_groups(self) -> list[dict[str, Any]]:
        """torch's own: one for each set of options, with `lr_scale` and `use_muon` beside its options."""
        grouping = self._layout.grouping
        members: dict[tuple[GroupOptions, bool], list[nn.Parameter]] = {}
        for name, master in self._masters.items():
            members.setdefault((grouping.options_of(name), name in self._of_muon), []).append(master)
        return [
            {"params": masters, "use_muon": use_muon}
            | {name: value for name, value in vars(options).items() if value is not None}
            for (options, use_muon), masters in members.items()
        ]

    def step(self, scalars: StepScalars) -> None:
        """Apply one update, or change nothing if `scalars.skip` is true. Waits for the device."""
        if bool(scalars.skip):
            return
        gradients = [shard.grad.float().mul_(scalars.multiplier) for shard in self._shards]
        for name, gradient in self._layout.named(gradients).items():
            self._masters[name].grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = float(scalars.lr) * group["lr_scale"]
        self._optimizer.step()
        for master in self._masters.values():
            master.grad = None
        for shard in self._shards:
            if shard.half and shard.master is not None:
                shard.weight.copy_(shard.master)

    def named_states(self, collect: Collect) -> dict[str, Tensor]:
        """The optimizer's tensors and numbers by `state/parameter`.

        Empty before the first update, unless it begins with some, as Adagrad does.

        Raises UnusableError for states of other kinds, which would be lost.
        """
        return {
            f"{state}/{name}": _as_tensor(self._optimizer, state, value)
            for name, master in self._masters.items()
            for state, value in self._optimizer.state[master].items()
            if value is not None
        }

    def prepare_load(self, zero1: Zero1, named: Mapping[str, Tensor], updated: bool) -> Callable[[], None]:
        """What takes these states, by `state/parameter`. Raises ValueError for those of another optimizer.

        These have other names, shapes or dtypes than this one has, after an update if they were `updated`.
        """
        # What a new optimizer of this kind keeps for such parameters shows the names, shapes and dtypes, and
        # whether it counts its steps on the device or on the host.
        expected = {
            f"{state}/{name}": value
            for name, master in self._masters.items()
            for state, value in _states_of(self._template, master, name in self._of_muon, updated).items()
        }
        tensors = {key: _as_tensor(self._optimizer, key, each) for key, each in expected.items()}
        check_forms("optimizer states", forms_of(tensors), named)

        def load() -> None:
            self._optimizer.state.clear()
            for key, example in expected.items():
                state, _, name = key.partition("/")
                is_tensor, saved = isinstance(example, Tensor), named[key]
                value = saved.to(example.device, copy=True) if is_tensor else type(example)(saved.item())
                self._optimizer.state[self._masters[name]][state] = value

        return load

    def tensors(self) -> list[Tensor]:
        """All states."""
        states = self._optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]
