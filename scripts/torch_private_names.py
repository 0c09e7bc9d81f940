"""Reads from wheels of torch, without installing them, what tests compare the launcher's calls with.

    pip download --no-deps --only-binary=:all: --platform macosx_14_0_arm64 torch==2.12.0
    python -m scripts.torch_private_names torch-*.whl
    python -m scripts.torch_private_names torch-*.whl torch._C.a_new_name

Writes the signatures of the names in tests/torch_private_names.json, and of new ones, into that file, by
minor version; versions of other wheels stay. torch's Python files are those of every platform, so the
smallest wheel, that for macOS, will do.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath

FILE = Path(__file__).parents[1] / "tests" / "torch_private_names.json"
# Modules whose names are functions of C: torch has stubs of them.
STUBS = {"torch": "torch/_C/_VariableFunctions.pyi"}
VALUE, OR = "a value", " or "

Read = Callable[[str], bytes | None]  # a file of torch by path; None where there is none


def found_in(read: Read, names: Iterable[str]) -> dict[str, str]:
    """The signature of each name; a function of C may have several. Raises LookupError for a missing name."""
    source = Source(read)
    return {name: OR.join(source.signatures(name)) for name in names}


class Source:
    """The Python files and stubs of one torch."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._module = cache(self._parsed)

    def signatures(self, name: str) -> list[str]:
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            module, rest = ".".join(parts[:length]), parts[length:]
            for tree in self._module(module):
                if found := self._within(module, tree, rest):
                    return found
        if parts[-2:] == ["config", "patch"]:  # a module that torch gives the methods of this class
            return self.signatures(f"torch.utils._config_module.ConfigModule.{parts[-1]}")
        raise LookupError(f"{name} is not in this torch")

    def _parsed(self, module: str) -> list[ast.Module]:
        path = PurePosixPath(*module.split("."))
        files = [
            f"{path}.py",
            f"{path}/__init__.py",
            f"{path}.pyi",
            f"{path}/__init__.pyi",
            STUBS.get(module),
        ]
        texts = (self._read(file) for file in files if file)
        return [ast.parse(text) for text in texts if text is not None]

    def _within(self, module: str, tree: ast.Module | ast.ClassDef, rest: list[str]) -> list[str]:
        """What `rest`, a name and those within it, is in a module or class; empty if it is not there."""
        found = []
        for node in _statements(tree):
            if isinstance(node, ast.FunctionDef) and node.name == rest[0]:
                found.append(_text(node.args))
            elif isinstance(node, ast.ClassDef) and node.name == rest[0]:
                return self._of_class(module, node, rest[1:])
            elif isinstance(node, ast.ImportFrom) and rest[0] in (
                alias.asname or alias.name for alias in node.names
            ):
                found += self._imported(module, node, rest)
            elif rest[0] in _assigned(node):
                found.append(VALUE)
        return sorted(set(found))

    def _of_class(self, module: str, node: ast.ClassDef, rest: list[str]) -> list[str]:
        own = self._within(module, node, rest or ["__init__"])
        if own or not rest:
            return own or [_of_dataclass(node)]
        if any(rest[0] in _assigned(each) for each in ast.walk(node)):
            return [VALUE]  # set on an instance, in one of its methods
        bases = (f"{module}.{ast.unparse(base)}.{rest[0]}" for base in node.bases)
        return next((self.signatures(base) for base in bases), [])

    def _imported(self, module: str, node: ast.ImportFrom, rest: list[str]) -> list[str]:
        original = next(alias.name for alias in node.names if rest[0] == (alias.asname or alias.name))
        package = (
            module if self._read(f"{module.replace('.', '/')}/__init__.py") else module.rpartition(".")[0]
        )
        within = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
        origin = ".".join(filter(None, (within if node.level else "", node.module)))
        if f"{origin}.{original}" == f"{module}.{rest[0]}":
            return []  # a package that imports its own module
        return self.signatures(".".join([origin, original, *rest[1:]]))


def _of_dataclass(node: ast.ClassDef) -> str:
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return (
        f"({', '.join(['self', *(ast.unparse(each.target) + '=...' * bool(each.value) for each in fields)])})"
    )


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Of a module or class, those under its conditions among them."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(node)


def _assigned(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [getattr(target, "attr", getattr(target, "id", "")) for target in targets]


def _text(arguments: ast.arguments) -> str:
    """Without types and the values of defaults."""
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    ellipsis = ast.Constant(...)
    arguments.defaults = [ellipsis for _ in arguments.defaults]
    arguments.kw_defaults = [each and ellipsis for each in arguments.kw_defaults]
    return f"({ast.unparse(arguments)})"


def of_wheel(path: Path, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Its minor version, and the signatures."""
    with zipfile.ZipFile(path) as archive:
        files = set(archive.namelist())
        found = found_in(lambda name: archive.read(name) if name in files else None, names)
    return ".".join(path.name.split("-")[1].split(".")[:2]), found


def main(arguments: list[str]) -> None:
    known = json.loads(FILE.read_text())
    new = [each for each in arguments if not each.endswith(".whl")]
    names = sorted({*new, *(name for of_version in known.values() for name in of_version)})
    known |= dict(of_wheel(Path(each), names) for each in arguments if each.endswith(".whl"))
    FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
