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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from launcher.config.optimizers import OptimConfig
from launcher.engine import ParameterGroup, UnusableError
from launcher.engine.flat.groups import Rates, idle_groups, owners_of
from launcher.engine.flat.names import all_names, named_parameters
from launcher.errors import ConfigError

BOTTOM, TOP = "", "."  # layers before the first and behind the last number; no name of a parameter


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
    group_of = {**_owners("Recipe", model, own), **_owners("optim", model, configured)}
    layers = layers_of(model, optim.layer_decay)
    scales = {name: layer.scale for layer in layers for name in layer.parameters}
    found: dict[str, ParameterGroup] = {}
    for name, p in named_parameters(model).items():
        group = group_of.get(name, ParameterGroup(name))
        if group.frozen:
            found[name] = ParameterGroup(name, frozen=True)
        elif p.requires_grad:
            decay = group.weight_decay
            if decay is None and p.ndim <= 1 and not optim.decay_vectors:
                decay = 0.0
            decay = None if decay == optim.weight_decay else decay
            found[name] = ParameterGroup(name, group.lr_scale * scales.get(name, 1.0), decay)
    idle = [
        f"{said}.{text}"
        for said, groups in (("optim", configured), ("Recipe", own))
        for text in idle_groups(model, groups)
    ]
    return ParameterGroups(_merged(found), tuple(_sentences(optim, model, found, layers)), idle)


def _owners(said: str, model: nn.Module, groups: Sequence[ParameterGroup]) -> Mapping[str, ParameterGroup]:
    """The group of each parameter that has one. The engine's errors begin with `groups[0]`."""
    try:
        return {name: groups[number] for name, number in owners_of(all_names(model), groups).items()}
    except UnusableError as error:
        raise ConfigError(f"{said}.{error}") from error


def _merged(found: Mapping[str, ParameterGroup]) -> list[ParameterGroup]:
    """One group for each set of rates, by exact names; none for what the optimizer does by itself."""
    members: dict[tuple[Rates, bool], list[str]] = {}
    for name, group in found.items():
        members.setdefault((Rates(group.lr_scale, group.weight_decay), group.frozen), []).append(name)
    return [
        ParameterGroup([glob.escape(name) for name in names], rates.lr_scale, rates.weight_decay, frozen)
        for (rates, frozen), names in members.items()
        if rates != Rates() or frozen
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
    stack = next((key for key in members if key not in (BOTTOM, TOP)), "")
    return [
        Layer(_title(key, parameters, stack), tuple(parameters), decay**depth)
        for depth, (key, parameters) in zip(reversed(range(len(members))), members.items(), strict=True)
    ]


def _layer_keys(names: Sequence[str]) -> Iterator[str]:
    """Which layer each name belongs to, in the order of the names."""
    numbered = [position for position, name in enumerate(names) if _up_to_number(name)]
    key = BOTTOM
    for position, name in enumerate(names):
        if not numbered:
            key = name.partition(".")[0]
        elif position > numbered[-1]:
            key = TOP
        else:
            key = _up_to_number(name) or key
        yield key


def _up_to_number(name: str) -> str:
    """`encoder.layer.0` of `encoder.layer.0.norm.bias`; empty where there is no number."""
    parts = name.split(".")
    number = next((position for position, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _title(key: str, names: Sequence[str], stack: str) -> str:
    """A numbered layer's own name; of the lowest and highest the modules, as far as they leave the stack."""
    if key not in (BOTTOM, TOP):
        return key
    modules = []
    for parts in (name.split(".") for name in names):
        pairs = zip(parts, stack.split("."), strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        modules.append(".".join(parts[: shared + 1]))
    return ", ".join(dict.fromkeys(modules))


def _sentences(
    optim: OptimConfig, model: nn.Module, found: Mapping[str, ParameterGroup], layers: Sequence[Layer]
) -> Iterator[tuple[str, str]]:
    trained = [group for group in found.values() if not group.frozen]
    decays = [optim.weight_decay if each.weight_decay is None else each.weight_decay for each in trained]
    scales = [group.lr_scale for group in trained]
    parts = []
    for decay in sorted(set(decays) - {optim.weight_decay}):
        with_decay = "without weight decay" if decay == 0 else f"with weight decay {decay:g}"
        parts.append(f"{decays.count(decay)} of {len(trained)} parameters {with_decay}")
    if not layers:
        parts += [f"{scales.count(scale)} at {scale:g} x lr" for scale in sorted(set(scales) - {1.0})]
    if frozen := sum(group.frozen for group in found.values()):
        parts.append(f"{frozen} frozen")
    if parts:
        yield "parameter groups", "; ".join(parts)
    if layers:
        shown = [f"{layer.name} at {layer.scale:.3g} x lr" for layer in layers]
        middle = [*shown[:2], "...", *shown[-2:]] if len(shown) > 4 else shown
        yield "layer decay", f"{len(layers)} layers by name, from the lowest: {', '.join(middle)}"
