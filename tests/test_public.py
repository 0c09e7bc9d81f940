"""What others import: exported where they look for it, documented, and typed for their own type checker."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType

import pytest

import launcher.data
import launcher.engine
import launcher.recipe
from launcher.engine import Stepper, stepper

ALIASES = {"Batch"}  # dict[str, Tensor]: nothing that could carry a docstring


def functions_of(cls: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties that the class itself defines, by name."""
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and not name.startswith("_"):
            yield name, function


def undocumented(module: ModuleType, name: str) -> list[str]:
    """What of an exported name has no docstring of its own; a dataclass is given its signature by Python."""
    exported = getattr(module, name)
    text = vars(exported).get("__doc__") if inspect.isclass(exported) else exported.__doc__
    generated = is_dataclass(exported) and str(text).startswith(f"{exported.__name__}(")
    found = [] if text and not generated else [name]
    if inspect.isclass(exported):
        found += [f"{name}.{member}" for member, f in functions_of(exported) if not inspect.getdoc(f)]
    return found


@pytest.mark.parametrize(
    "module", [launcher.engine, launcher.recipe, launcher.data], ids=lambda m: m.__name__
)
def test_every_exported_name_is_documented(module) -> None:
    assert [
        each for name in module.__all__ if name not in ALIASES for each in undocumented(module, name)
    ] == []


def test_what_a_stepper_returns_can_be_imported_from_the_engine() -> None:
    """For annotations in a loop of one's own."""
    methods = [function for _, function in functions_of(Stepper) if inspect.isfunction(function)]
    returned = [vars(stepper).get(method.__annotations__["return"]) for method in methods]
    ours = {kind.__name__ for kind in returned if getattr(kind, "__module__", "").startswith("launcher")}
    assert ours == {"EngineState", "ScaleStart", "StepResult"}
    assert ours <= set(launcher.engine.__all__)


def test_type_checkers_read_the_annotations_of_the_package() -> None:
    assert Path(launcher.engine.__file__).parents[1].joinpath("py.typed").is_file()
