"""The engine's parameter groups from the config and the recipe, and the sentence that reports them.

Owns how optim.groups, Recipe.groups and optim.decay_norm_and_bias combine for each parameter. Changes no
model.

A parameter belongs to the first group that matches it, the config's before the recipe's. Its rate is
lr_scale of that group; its weight decay is the group's, else 0 for a vector where optim.decay_norm_and_bias
is false, else the optimizer's.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from launcher.config.optimizers import OptimConfig
from launcher.engine import ParameterGroup, UnusableError
from launcher.engine.names import all_names, named_parameters
from launcher.engine.params.param_groups import GroupOptions, owners_of
from launcher.errors import ConfigError


def parameter_groups(
    optim: OptimConfig, own: Sequence[ParameterGroup], model: nn.Module
) -> tuple[list[ParameterGroup], str]:
    """The groups of `model`, and the sentence that reports them, which may be empty.

    `own` are the recipe's. Raises ConfigError for a pattern that matches nothing.
    """
    configured = [
        ParameterGroup(each.match, each.lr_scale, each.weight_decay, each.frozen) for each in optim.groups
    ]
    group_of: dict[str, ParameterGroup] = {}
    for said, groups in (("optim", configured), ("Recipe", own)):
        try:  # the engine's errors begin with `groups[0]`
            owners = owners_of(all_names(model), groups)
        except UnusableError as error:
            raise ConfigError(f"{said}.{error}") from error
        group_of = {name: groups[number] for name, number in owners.items()} | group_of
    found: dict[str, tuple[GroupOptions, bool]] = {}  # with whether it is frozen
    for name, p in named_parameters(model).items():
        group = group_of.get(name, ParameterGroup(name))
        if group.frozen:
            found[name] = GroupOptions(), True
        elif p.requires_grad:
            decay = group.weight_decay
            if decay is None and p.ndim <= 1 and not optim.decay_norm_and_bias:
                decay = 0.0
            decay = None if decay == optim.weight_decay else decay
            found[name] = GroupOptions(group.lr_scale, decay), False
    return _merged(found), _sentence(optim, found)


def _merged(found: Mapping[str, tuple[GroupOptions, bool]]) -> list[ParameterGroup]:
    """One group for each set of rates, by exact names; none for what the optimizer does by itself."""
    members: dict[tuple[GroupOptions, bool], list[str]] = {}
    for name, key in found.items():
        members.setdefault(key, []).append(glob.escape(name))
    members.pop((GroupOptions(), False), None)
    return [
        ParameterGroup(names, rates.lr_scale, rates.weight_decay, frozen)
        for (rates, frozen), names in members.items()
    ]


def _sentence(optim: OptimConfig, found: Mapping[str, tuple[GroupOptions, bool]]) -> str:
    trained = [rates for rates, is_frozen in found.values() if not is_frozen]
    decays = Counter(optim.weight_decay if x.weight_decay is None else x.weight_decay for x in trained)
    scales = Counter(rates.lr_scale for rates in trained)
    of_all = f"of {len(trained)} parameters with weight decay"
    parts = [f"{n} {of_all} {decay:g}" for decay, n in sorted(decays.items()) if decay != optim.weight_decay]
    parts += [f"{n} at {scale:g} x lr" for scale, n in sorted(scales.items()) if scale != 1.0]
    if frozen := len(found) - len(trained):
        parts.append(f"{frozen} frozen")
    return "; ".join(parts)
