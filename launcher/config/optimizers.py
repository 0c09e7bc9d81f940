"""The optimizers that `optim.name` chooses from: the keys of each, and its class.

To add one: a line of OPTIMIZERS, a class of keys where none of these fits, and conf/optim/NAME.yaml. Never
imports torch: classes are named here, and imported where a run is built. Also owns what optim.groups may
hold, a list of mappings with patterns of parameter names; which match is known once there is a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from launcher.config import rules as value_rules
from launcher.config.messages import show, unknown_key
from launcher.config.rules import Name, NotNegative, Options, Positive, Rate, Rule, Share

GROUPS = "optim.groups"
GROUPS_EXAMPLE = '[{match:"*.bias",weight_decay:0}]'
_texts = value_rules.list_of(value_rules.text, "a list of strings")
_text_or_texts = value_rules.either(value_rules.text, _texts)
_patterns = Rule(
    'a pattern of parameter names such as "*.bias", or a list of patterns',
    lambda value: value != [] and _text_or_texts.holds(value),
)
Patterns = Annotated[tuple[str, ...], _patterns]


@dataclass(frozen=True)
class GroupConfig:
    """Parameters with rates of their own; the first group that matches a parameter has it."""

    match: Patterns
    lr_scale: NotNegative = 1.0
    weight_decay: NotNegative | None = None
    frozen: bool = False


_shares = value_rules.list_of(value_rules.share, "two numbers from 0 to below 1")
_two_shares = Rule(_shares.text, lambda value: _shares.holds(value) and len(value) == 2)
Betas = Annotated[tuple[float, float], _two_shares]
_groups = Rule("a list of groups", lambda value: isinstance(value, list | tuple))
Groups = Annotated[tuple[GroupConfig, ...], _groups]


@dataclass(frozen=True)
class CommonConfig:
    """The keys of every optimizer that are about the run, and not arguments of its class."""

    name: Name
    lr: Rate
    clip_norm: Positive | None
    groups: Groups
    decay_norm_and_bias: bool


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
class MuonConfig(AdamConfig):
    momentum: Share
    nesterov: bool


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

    A class of the engine updates shards and runs without masters; one of torch.optim, which muon is made of,
    does neither.
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
    "muon": OptimizerEntry(MuonConfig, "launcher.engine.optim.muon:MuonWithAdamW"),
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


@cache
def group_rules() -> Mapping[str, Rule]:
    kinds = get_type_hints(GroupConfig, include_extras=True)
    return {key: value_rules.rule_of(kind) for key, kind in kinds.items()}


def group_problems(value: object) -> Iterator[str]:
    """One line per mistake in the value of optim.groups; none for a valid one."""
    if not isinstance(value, list | tuple):
        yield f"{GROUPS}={show(value)}: must be a list of groups, for example {GROUPS_EXAMPLE}."
        return
    for number, group in enumerate(value):
        path = f"{GROUPS}[{number}]"
        if not isinstance(group, Mapping):
            yield f"{path}={show(group)}: must be a mapping with the keys {', '.join(group_rules())}."
            continue
        for key, item in group.items():
            if key not in group_rules():
                unknown = unknown_key(f"{path}.{key}", str(key), group_rules())
                yield f"{unknown} A group has {', '.join(group_rules())}."
            elif not group_rules()[key].holds(item):
                yield value_rules.value_problem(f"{path}.{key}", item, group_rules()[key])
        if "match" not in group:
            missing = "the key match is missing: patterns of parameter names"
            yield f"{path}: {missing}, for example {GROUPS_EXAMPLE}."


def completed_groups(value: Any) -> list[dict[str, object]]:
    """A valid value with all keys in each group, and patterns as lists."""
    defaults = {each.name: each.default for each in fields(GroupConfig) if each.default is not MISSING}
    lists = ([group["match"]] if isinstance(group["match"], str) else [*group["match"]] for group in value)
    return [{**defaults, **group, "match": match} for group, match in zip(value, lists, strict=True)]
