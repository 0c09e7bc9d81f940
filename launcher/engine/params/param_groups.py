"""Parameter groups: which parameters are updated at another rate, with another decay, or not at all.

Owns the value that a user gives and the assignment of every parameter to one set of options, by name. Where
the parameters of one set lie in the flat memory is the layout's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated

from torch import nn

import launcher.engine.limits as limits
from launcher.engine.errors import UnusableError, require_match
from launcher.engine.names import all_names, named_parameters


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated in a way of their own: `ParameterGroup("*.bias", weight_decay=0.0)`.

    `match`: one pattern or several over parameter names, as of `fnmatch`, case-sensitive: `*` matches any
    characters, dots included. A parameter belongs to the first group that matches it; a tied one matches by
    any of its names. `lr_scale` multiplies the learning rate; `weight_decay` replaces the optimizer's, None
    keeps it. `frozen` parameters are not trained: requires_grad is set to False. Half weights keep no fp32
    copy of them: they are rounded when the Stepper is built. The clip norm is computed over all groups, and a
    state can be loaded with other groups if the same parameters are frozen. Raises UnusableError.
    """

    match: str | Sequence[str]
    lr_scale: Annotated[float, limits.rate] = 1.0
    weight_decay: Annotated[float, limits.not_negative] | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        patterns = (self.match,) if isinstance(self.match, str) else tuple(self.match)
        object.__setattr__(self, "match", patterns)
        limits.require_fields(self, "ParameterGroup")

    def matches(self, name: str) -> bool:
        """Whether one of the patterns matches the name."""
        return any(fnmatchcase(name, pattern) for pattern in self.match)


@dataclass(frozen=True)
class GroupOptions:
    """How parameters are updated: `lr_scale` times the learning rate, with the optimizer's decay if None."""

    lr_scale: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True)
class Grouping:
    """Every trained parameter's options. `options` is empty where all are updated as the optimizer says."""

    options: tuple[GroupOptions, ...] = ()  # in the order in which the flat layout meets them
    index: Mapping[str, int] = field(default_factory=dict)  # into `options`, by parameter name
    frozen: frozenset[str] = frozenset()  # names of parameters that a group freezes

    @classmethod
    def of(cls, model: nn.Module, groups: Sequence[ParameterGroup]) -> Grouping:
        """Raises UnusableError for a pattern that matches nothing, and for a group that is left empty."""
        if not groups:
            return cls()
        owners = owners_of(all_names(model), groups)
        frozen = {name for name, owner in owners.items() if groups[owner].frozen}
        trained = [n for n, p in named_parameters(model).items() if p.requires_grad and n not in frozen]
        options = [GroupOptions(float(group.lr_scale), group.weight_decay) for group in groups]
        found = {n: options[owners[n]] if n in owners else GroupOptions() for n in reversed(trained)}
        distinct = tuple(dict.fromkeys(found.values()))
        if distinct in ((), (GroupOptions(),)):
            return cls(frozen=frozenset(frozen))
        index = {name: distinct.index(each) for name, each in found.items()}
        return cls(distinct, index, frozenset(frozen))

    def options_of(self, name: str) -> GroupOptions:
        """The options of the group of a trained parameter."""
        return self.options[self.index[name]] if self.options else GroupOptions()


def owners_of(names: Mapping[str, Sequence[str]], groups: Sequence[ParameterGroup]) -> dict[str, int]:
    """The number of the group that each parameter belongs to, by name; those in none are left out.

    `names` are all names of each parameter by its first. Raises UnusableError as `Grouping.of`.
    """
    owners: dict[str, int] = {}
    known = [name for aliases in names.values() for name in aliases]
    for number, group in enumerate(groups):
        for pattern in group.match:
            require_match(pattern, known, "parameter names", f"groups[{number}]: ")
        matched = [first for first, aliases in names.items() if any(map(group.matches, aliases))]
        new = [name for name in matched if name not in owners]
        if not new:
            earlier = sorted({owners[name] for name in matched})
            raise UnusableError(
                f"groups[{number}] ({', '.join(group.match)}) is left without a parameter: all "
                f"{len(matched)} that it matches belong to groups{earlier}. Put the narrower pattern first."
            )
        owners |= dict.fromkeys(new, number)
    return owners
