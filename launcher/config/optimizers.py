"""The optimizers that `optim.name` chooses from: the keys of each, and its class.

To add one: a line of OPTIMIZERS, a class of keys where none of these fits, and conf/optim/NAME.yaml. Never
imports torch: classes are named here, and imported where a run is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from launcher.config.parameter_groups import GroupConfig
from launcher.config.rules import (
    Name,
    NotNegative,
    Options,
    Positive,
    Rate,
    Rule,
    Share,
    list_of,
    number,
    share,
)

_shares = list_of(share, "two numbers from 0 to below 1")
Betas = Annotated[
    tuple[float, float], Rule(_shares.text, lambda value: _shares.holds(value) and len(value) == 2)
]
Groups = Annotated[
    tuple[GroupConfig, ...], Rule("a list of groups", lambda value: isinstance(value, list | tuple))
]
LayerDecay = Annotated[float, number("above 0 and at most 1", lambda value: 0 < value <= 1)]


@dataclass(frozen=True)
class CommonConfig:
    """The keys of every optimizer that are about the run, and not arguments of its class."""

    name: Name
    lr: Rate
    clip_norm: Positive | None
    groups: Groups
    decay_vectors: bool
    layer_decay: LayerDecay | None


@dataclass(frozen=True)
class BuiltInConfig(CommonConfig):
    weight_decay: NotNegative


@dataclass(frozen=True)
class SgdConfig(BuiltInConfig):
    momentum: Share
    nesterov: bool


@dataclass(frozen=True)
class AdamConfig(BuiltInConfig):
    betas: Betas
    eps: Positive


@dataclass(frozen=True)
class RmspropConfig(BuiltInConfig):
    alpha: Share
    eps: Positive
    momentum: Share


@dataclass(frozen=True)
class AdagradConfig(BuiltInConfig):
    eps: Positive


@dataclass(frozen=True)
class OwnOptimConfig(CommonConfig):
    """An optimizer that a recipe file registers. `options` are its own keys, which its class is given."""

    options: Options

    @property
    def weight_decay(self) -> float:
        """The weight decay of parameters whose group has none."""
        return float(self.options.get("weight_decay", 0.0))


OptimConfig = BuiltInConfig | OwnOptimConfig


@dataclass(frozen=True)
class OptimizerEntry:
    """A built-in optimizer: the class of its keys, and the module and name of the class that takes them.

    A class of the engine updates shards and runs without masters; one of torch.optim does neither.
    """

    keys: type[BuiltInConfig]
    place: str

    @property
    def is_fused(self) -> bool:
        return self.place.startswith("launcher.engine:")


OPTIMIZERS = {
    "sgd": OptimizerEntry(SgdConfig, "launcher.engine:SGD"),
    "adamw": OptimizerEntry(AdamConfig, "launcher.engine:AdamW"),
    "adam": OptimizerEntry(AdamConfig, "torch.optim:Adam"),
    "nadam": OptimizerEntry(AdamConfig, "torch.optim:NAdam"),
    "radam": OptimizerEntry(AdamConfig, "torch.optim:RAdam"),
    "rmsprop": OptimizerEntry(RmspropConfig, "torch.optim:RMSprop"),
    "adagrad": OptimizerEntry(AdagradConfig, "torch.optim:Adagrad"),
}


def keys_of(name: str) -> type[OptimConfig]:
    """The keys of the optimizer of this name; of one that a recipe file registers, if none is built in."""
    return OPTIMIZERS[name].keys if name in OPTIMIZERS else OwnOptimConfig


def is_fused(name: str) -> bool:
    """Whether the optimizer is one of the engine, which needs neither whole parameters nor masters."""
    return name in OPTIMIZERS and OPTIMIZERS[name].is_fused
