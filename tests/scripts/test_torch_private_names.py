"""Private names of torch: every use is listed, and every call fits each version of torch that was checked."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from scripts.torch_private_names import FILE, OR, VALUE, found_in

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "launcher").rglob("*.py"))
KNOWN: dict[str, dict[str, str]] = json.loads(FILE.read_text())
NAMES = tuple(next(iter(KNOWN.values())))
# Attributes and functions of C++ without a line of Python or a stub: they are tested with the installed torch
# only. `_saved_...` belong to a node of the backward pass, `_cdata` to a storage; the others are
# operators of aten and functions of a backend.
COMPILED = (
    "_cdata",
    "_is_mkldnn_bf16_supported",
    "_is_mkldnn_fp16_supported",
    "_local_scalar_dense",
    "_saved_other",
    "_saved_reduction",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_to_copy",
)
# Private attributes of others than torch: of sys, os, named tuples and argparse.
OF_OTHERS = ("_current_frames", "_exit", "_getframe", "_option_string_actions", "_replace")


class Use(NamedTuple):
    """One place in the launcher, and the dotted name of torch or the last part of it."""

    place: str
    name: str
    call: ast.Call | None = None


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def from_torch(tree: ast.Module) -> dict[str, str]:
    """What the names that a file imports from torch stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            found |= {alias.asname or "torch": alias.name if alias.asname else "torch" for alias in roots}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.expr, imported: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in imported:
        return ".".join([imported[node.id], *reversed(parts)])
    return None


@cache
def defined() -> set[str]:
    """Names that the launcher defines itself: functions, classes, and what it assigns."""
    found = set()
    for node in (node for file in FILES for node in ast.walk(parsed(file))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


@cache
def uses() -> list[Use]:
    return [use for file in FILES for use in uses_of(file)]


def uses_of(file: Path) -> Iterator[Use]:
    imported, path = from_torch(parsed(file)), str(file.relative_to(ROOT))
    calls = {id(node.func): node for node in ast.walk(parsed(file)) if isinstance(node, ast.Call)}
    for node in ast.walk(parsed(file)):
        place = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node, imported)
            if name and is_private(name):
                yield Use(place, name, calls.get(id(node)))
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in defined():
                yield Use(place, node.attr, calls.get(id(node)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            if node.value in COMPILED:
                yield Use(place, node.value)
        elif isinstance(node, ast.ClassDef):
            for base in filter(None, (dotted(base, imported) for base in node.bases)):
                yield from uses_of_base(node, base, path)


def uses_of_base(node: ast.ClassDef, base: str, path: str) -> Iterator[Use]:
    """Private methods of torch's class that ours overrides, and what it calls on itself or on super()."""
    module, _, name = base.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    calls = {id(each.func): each for each in ast.walk(node) if isinstance(each, ast.Call)}
    for each in ast.walk(node):
        own = isinstance(each, ast.FunctionDef)
        attribute = each.name if own else each.attr if isinstance(each, ast.Attribute) else ""
        if is_private(attribute) and hasattr(cls, attribute):
            of_super = isinstance(each, ast.Attribute) and ast.unparse(each.value) == "super()"
            call = calls.get(id(each)) if of_super else None
            yield Use(f"{path}:{each.lineno}", f"{base}.{attribute}", call)


def listed(name: str) -> list[str]:
    """The entries of the list that a use may mean: itself, or what ends with the attribute."""
    if "." in name:
        prefixes = [each for each in NAMES if each == name or each.startswith(name + ".")]
        return prefixes or [each for each in NAMES if name.startswith(each + ".")]
    return [each for each in NAMES if each.rpartition(".")[2] == name]


@pytest.mark.slow
def test_every_private_name_of_torch_is_listed() -> None:
    missing = {
        f"{use.place} {use.name}"
        for use in uses()
        if not listed(use.name) and use.name.rpartition(".")[2] not in {*COMPILED, *OF_OTHERS}
    }
    assert not missing, f"read these with scripts/torch_private_names.py: {sorted(missing)}"


def test_the_installed_torch_is_as_it_was_read_from_its_wheel() -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in KNOWN:
        pytest.skip(f"torch {version} has not been read yet")
    packages = Path(torch.__file__).parents[1]

    def read(name: str) -> bytes | None:
        return (packages / name).read_bytes() if (packages / name).is_file() else None

    assert found_in(read, NAMES) == KNOWN[version]


def signature(text: str) -> inspect.Signature:
    namespace: dict[str, Any] = {}
    exec(f"def function{text}: ...", namespace)
    return inspect.signature(namespace["function"])


def accepts(text: str, call: ast.Call, method: bool) -> bool:
    """Whether a function with this signature can be called so. A starred argument stands for any number."""
    if any(isinstance(each, ast.Starred) for each in call.args) or any(
        not each.arg for each in call.keywords
    ):
        return True
    positional = [None] * (len(call.args) + method)
    try:
        signature(text).bind(*positional, **{str(each.arg): None for each in call.keywords})
    except TypeError:
        return False
    return True


def takes_self(name: str, text: str) -> bool:
    """A method or a class. Stubs of functions over lists call their first argument `self`, too."""
    of_class = name.endswith(".config.patch") or any(
        part.lstrip("_")[:1].isupper() for part in name.split(".")[-2:]
    )
    return of_class and text.startswith("(self")


def refused_by(use: Use) -> list[str]:
    assert use.call is not None
    found = []
    for name in listed(use.name):
        for version, names in KNOWN.items():
            texts = [text for text in names[name].split(OR) if text != VALUE]
            if not any(accepts(text, use.call, takes_self(name, text)) for text in texts):
                call = ast.unparse(use.call)
                found.append(f"{use.place}: {call}, but torch {version} has {name}{' or '.join(texts)}")
    return found


def test_every_version_accepts_every_call() -> None:
    calls = [use for use in uses() if use.call is not None and listed(use.name)]
    assert len(calls) > 20, "the search has found too few"
    assert [line for use in calls for line in refused_by(use)] == []
