"""The engine's parameter groups from the config and the recipe, and the sentences that report them.

Owns how optim.groups, Recipe.groups, optim.decay_vectors and optim.layer_decay combine for each parameter,
and how layers are found from names. Changes no model.

A parameter belongs to the first group that matches it, the config's before the recipe's. Its rate is
lr_scale of that group times the factor of its layer; its weight decay is the group's, else 0 for a vector
where optim.decay_vectors is false, else the optimizer's.

Layers, for optim.layer_decay: the parameters up to the first number in their names (`encoder.layer.0`,
`blocks.3`, `layer1.0`), in the order of registration; what is registered before the first of them is the
lowest layer (embeddings, stem), what is registered behind the last the highest (norm, pooler, head), and what
is between two belongs to the one before. Without numbers the layers are the model's children. The highest has
the factor 1, each below `layer_decay` times that of the one above: Clark et al. 2020 (ELECTRA, section A.2)
and Bao et al. 2021 (BEiT, section 3.1), after Howard and Ruder 2018 (discriminative fine-tuning).
"""

from __future__ import annotations

import glob
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from launcher.config.optimizers import OptimConfig
from launcher.engine import ParameterGroup, UnusableError
from launcher.engine.flat.groups import Rates, idle_groups, owners_of
from launcher.engine.flat.names import all_names, named_parameters
from launcher.errors import ConfigError, listed

SHOWN = 3  # modules of the lowest and of the highest layer
BOTTOM, TOP = "", "."  # layers before the first and behind the last number; no name of a parameter
UP_TO_NUMBER = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")  # `encoder.layer.0` of `encoder.layer.0.norm.bias`


@dataclass(frozen=True)
class Layer:
    """Parameters that have one rate; `name` is what their names begin with, or where they are."""

    name: str
    parameters: tuple[str, ...]
    scale: float


@dataclass(frozen=True)
class ParameterGroups:
    """What a Stepper is given, and why."""

    groups: Sequence[ParameterGroup] = ()
    sentences: Sequence[tuple[str, str]] = field(default_factory=tuple)  # topic and text, for the start
    idle: Sequence[str] = ()  # warnings of groups that change nothing


def parameter_groups(optim: OptimConfig, own: Sequence[ParameterGroup], model: nn.Module) -> ParameterGroups:
    """The groups of `model`; `own` are the recipe's. ConfigError for a pattern that matches nothing."""
    configured = [
        ParameterGroup(each.match, each.lr_scale, each.weight_decay, each.frozen) for each in optim.groups
    ]
    group_of: dict[str, ParameterGroup] = {}
    idle: list[str] = []
    for said, groups in (("optim", configured), ("Recipe", own)):
        try:  # the engine's errors begin with `groups[0]`
            owners = owners_of(all_names(model), groups)
        except UnusableError as error:
            raise ConfigError(f"{said}.{error}") from error
        group_of = {name: groups[number] for name, number in owners.items()} | group_of
        idle += [f"{said}.{text}" for text in idle_groups(model, groups)]
    layers = layers_of(model, optim.layer_decay)
    scales = {name: layer.scale for layer in layers for name in layer.parameters}
    found: dict[str, tuple[Rates, bool]] = {}  # with whether it is frozen
    for name, p in named_parameters(model).items():
        group = group_of.get(name, ParameterGroup(name))
        if group.frozen:
            found[name] = Rates(), True
        elif p.requires_grad:
            decay = group.weight_decay
            if decay is None and p.ndim <= 1 and not optim.decay_vectors:
                decay = 0.0
            decay = None if decay == optim.weight_decay else decay
            found[name] = Rates(group.lr_scale * scales.get(name, 1.0), decay), False
    return ParameterGroups(_merged(found), tuple(_sentences(optim, found, layers)), idle)


def _merged(found: Mapping[str, tuple[Rates, bool]]) -> list[ParameterGroup]:
    """One group for each set of rates, by exact names; none for what the optimizer does by itself."""
    members: dict[tuple[Rates, bool], list[str]] = {}
    for name, key in found.items():
        members.setdefault(key, []).append(glob.escape(name))
    members.pop((Rates(), False), None)
    return [
        ParameterGroup(names, rates.lr_scale, rates.weight_decay, frozen)
        for (rates, frozen), names in members.items()
    ]


def layers_of(model: nn.Module, decay: float | None) -> list[Layer]:
    """The layers, lowest first; none where `decay` is None. ConfigError for fewer than two."""
    if decay is None:
        return []
    names = list(named_parameters(model))
    members: dict[str, list[str]] = {}
    for key, name in zip(_layer_keys(names), names, strict=True):
        members.setdefault(key, []).append(name)
    if len(members) < 2:
        raise ConfigError(
            f"optim.layer_decay={decay}: the {len(names)} parameters of {type(model).__name__} form "
            f"{len(members)} layer by their names ({', '.join(names[:3])}, ...), and it needs two or more. "
            "Set optim.layer_decay=null, and optim.groups with lr_scale for the parts of the model."
        )
    layers = []
    for depth, (key, parameters) in zip(reversed(range(len(members))), members.items(), strict=True):
        modules = dict.fromkeys(name.rpartition(".")[0] or name for name in parameters)
        title = key if key not in (BOTTOM, TOP) else listed(list(modules), SHOWN)
        layers.append(Layer(title, tuple(parameters), decay**depth))
    return layers


def _layer_keys(names: Sequence[str]) -> list[str]:
    """Which layer each name belongs to, in the order of the names."""
    numbers = [found[0] if (found := UP_TO_NUMBER.match(name)) else "" for name in names]
    if not any(numbers):
        return [name.partition(".")[0] for name in names]
    num_above = next(above for above, number in enumerate(reversed(numbers)) if number)
    numbered = numbers[: len(names) - num_above]
    up_to_last: Iterator[str] = itertools.accumulate(numbered, lambda below, number: number or below)
    return [*up_to_last, *[TOP] * num_above]


def _sentences(
    optim: OptimConfig, found: Mapping[str, tuple[Rates, bool]], layers: Sequence[Layer]
) -> Iterator[tuple[str, str]]:
    trained = [rates for rates, is_frozen in found.values() if not is_frozen]
    decays = Counter(optim.weight_decay if x.weight_decay is None else x.weight_decay for x in trained)
    scales = Counter(rates.lr_scale for rates in trained)
    of_all = f"of {len(trained)} parameters with weight decay"
    parts = [f"{n} {of_all} {decay:g}" for decay, n in sorted(decays.items()) if decay != optim.weight_decay]
    if not layers:
        parts += [f"{n} at {scale:g} x lr" for scale, n in sorted(scales.items()) if scale != 1.0]
    if frozen := len(found) - len(trained):
        parts.append(f"{frozen} frozen")
    if parts:
        yield "parameter groups", "; ".join(parts)
    if layers:
        shown = [f"{layer.name} at {layer.scale:.3g} x lr" for layer in layers]
        middle = [*shown[:2], "...", *shown[-2:]] if len(shown) > 4 else shown
        yield "layer decay", f"{len(layers)} layers by name, from the lowest: {', '.join(middle)}"
