"""The optimizers that `optim.name` chooses from: the keys of each, and its class.

To add one: a line of OPTIMIZERS, the constraint of a new key, and conf/optim/NAME.yaml. Never imports torch:
classes are named here, and imported where a run is built. Also owns what optim.groups may hold, a list of
mappings with patterns of parameter names; which match is known once there is a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, get_type_hints

from launcher.config import constraints as must_be
from launcher.config.codec import FLAT
from launcher.config.constraints import (
    Constraint,
    Name,
    NotNegative,
    Positive,
    Rate,
    constraint_of,
    value_problem,
)
from launcher.config.messages import show, unknown_key

GROUPS = "optim.groups"
GROUPS_EXAMPLE = '[{match:"*.bias",weight_decay:0}]'
_texts = must_be.list_of(must_be.text, "a list of strings")
_text_or_texts = must_be.either(must_be.text, _texts)
_patterns = Constraint(
    'a pattern of parameter names such as "*.bias", or a list of patterns',
    lambda value: value != [] and _text_or_texts.is_valid(value),
)
Patterns = Annotated[tuple[str, ...], _patterns]


@dataclass(frozen=True)
class GroupConfig:
    """Parameters with rates of their own; the first group that matches a parameter has it."""

    match: Patterns
    lr_scale: NotNegative = 1.0
    weight_decay: NotNegative | None = None
    frozen: bool = False


_groups = Constraint(
    f"a list of groups, for example {GROUPS_EXAMPLE}", lambda value: isinstance(value, list | tuple)
)
Groups = Annotated[tuple[GroupConfig, ...], _groups]


@dataclass(frozen=True)
class OptimConfig:
    """`options` are the keys that its class is given besides `lr`."""

    name: Name
    lr: Rate
    clip_norm: Positive | None
    groups: Groups
    decay_norm_and_bias: bool
    options: dict[str, Any] = field(metadata=FLAT)

    @property
    def weight_decay(self) -> float:
        """The weight decay of parameters whose group has none."""
        return float(self.options.get("weight_decay", 0.0))


_shares = must_be.list_of(must_be.share, "two numbers from 0 to below 1")
OPTION_CONSTRAINTS: Mapping[str, Constraint] = {  # of the keys of the built-in optimizers
    "weight_decay": constraint_of(NotNegative),
    "momentum": must_be.share,
    "nesterov": must_be.flag,
    "betas": Constraint(_shares.text, lambda value: _shares.is_valid(value) and len(value) == 2),
    "eps": constraint_of(Positive),
    "alpha": must_be.share,
}


@dataclass(frozen=True)
class OptimizerEntry:
    """A built-in optimizer: the module and name of its class, and its keys besides `weight_decay`.

    A class of the engine updates shards and runs without masters; one of torch.optim, which muon is made of,
    does neither.
    """

    place: str
    own_keys: str

    @property
    def keys(self) -> tuple[str, ...]:
        return ("weight_decay", *self.own_keys.split())

    @property
    def is_fused(self) -> bool:
        return self.place.startswith("launcher.engine:")


OPTIMIZERS = {
    "sgd": OptimizerEntry("launcher.engine:SGD", "momentum nesterov"),
    "adamw": OptimizerEntry("launcher.engine:AdamW", "betas eps"),
    "adam": OptimizerEntry("torch.optim:Adam", "betas eps"),
    "muon": OptimizerEntry("launcher.engine.optim.muon:MuonWithAdamW", "betas eps momentum nesterov"),
    "nadam": OptimizerEntry("torch.optim:NAdam", "betas eps"),
    "radam": OptimizerEntry("torch.optim:RAdam", "betas eps"),
    "rmsprop": OptimizerEntry("torch.optim:RMSprop", "alpha eps momentum"),
    "adagrad": OptimizerEntry("torch.optim:Adagrad", "eps"),
}


def is_fused(name: str) -> bool:
    """Whether the optimizer is one of the engine, which needs neither whole parameters nor masters."""
    return name in OPTIMIZERS and OPTIMIZERS[name].is_fused


@cache
def group_constraints() -> Mapping[str, Constraint]:
    kinds = get_type_hints(GroupConfig, include_extras=True)
    return {key: constraint_of(kind) for key, kind in kinds.items()}


def group_problems(value: object) -> Iterator[str]:
    """One line per mistake in the groups of optim.groups; none for valid ones."""
    for number, group in enumerate(value if isinstance(value, list | tuple) else ()):
        path = f"{GROUPS}[{number}]"
        if not isinstance(group, Mapping):
            yield f"{path}={show(group)}: must be a mapping with the keys {', '.join(group_constraints())}."
            continue
        for key, item in group.items():
            if key not in group_constraints():
                unknown = unknown_key(f"{path}.{key}", str(key), group_constraints())
                yield f"{unknown} A group has {', '.join(group_constraints())}."
            elif not group_constraints()[key].is_valid(item):
                yield value_problem(f"{path}.{key}", item, group_constraints()[key])
        if "match" not in group:
            missing = "the key match is missing: patterns of parameter names"
            yield f"{path}: {missing}, for example {GROUPS_EXAMPLE}."


def completed(optim: Mapping[str, Any]) -> dict[str, Any]:
    """A valid section with patterns as lists, and whole numbers of a built-in optimizer's keys as floats."""
    groups = [
        {**group, "match": [group["match"]] if isinstance(group["match"], str) else [*group["match"]]}
        for group in optim["groups"]
    ]
    built_in = OPTIMIZERS[optim["name"]].keys if optim["name"] in OPTIMIZERS else ()
    floats = {key: float(optim[key]) for key in built_in if type(optim[key]) is int}
    return {**optim, **floats, "groups": groups}
