"""The house's one direction: a module imports only from the left of itself, and the engine only itself."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    {
        "errors",
        "guardian",
        "stranded",
        "streams",
        "ties",
        "config",
        "config_files",
        "environment_values",
        "search_path",
        "resources",
        "problems",
        "rules",
        "shortage",
        "terminal",
        "validation",
    },
    {"environment", "collectives", "heartbeat", "roll_call", "signals", "telemetry", "arguments", "overview"},
    {"data", "parquet_images", "images", "recipe", "recipe_errors", "engine", "schedule"},
    {"checkpoint", "consistency"},
    {"loop", "saving", "watch", "evaluate", "culprit", "gradients", "report", "export"},
    {"continuity", "measuring", "meeting", "equipment", "closing", "watchdog", "worker"},
    {"supervisor", "rendezvous", "overrides", "compose", "completion", "experiments", "jobs", "sweep"},
    {"cli"},
    {"__main__"},
)
WITHOUT_TORCH = (
    "torch",
    "launcher.engine",
    "launcher.recipe",
    "launcher.data",
    "launcher.worker",
    "launcher.supervisor.agent",
)
FOUND_AT_IMPORT = (
    "__main__",
    "guardian",
    "streams",
    "ties",
    "cli",
    "rendezvous",
    "environment",
    "config",
    "validation",
    "jobs",
    "sweep",
    "telemetry",
    "heartbeat",
)
WITHOUT_AGENT = ("__init__", "parent", "workers", "signals", "verdict")  # of the supervisor


def imports(file: Path, module_level_only: bool = False) -> Iterator[str]:
    """Every module that the file imports, wherever in it; those under TYPE_CHECKING load nothing."""
    for node in statements(ast.parse(file.read_text(encoding="utf-8")), module_level_only):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide which layer is meant"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def statements(node: ast.AST, module_level_only: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        if not (module_level_only and isinstance(child, ast.FunctionDef | ast.ClassDef)):
            yield from statements(child, module_level_only)


def part_of(file: Path) -> str:
    """The module or package directly below launcher/ that the file belongs to."""
    return file.relative_to(ROOT / "launcher").parts[0].removesuffix(".py")


def layer_of(part: str) -> int:
    return next(index for index, parts in enumerate(LAYERS) if part in parts)


FILES = sorted(
    file for file in (ROOT / "launcher").rglob("*.py") if file != ROOT / "launcher" / "__init__.py"
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_imports_only_from_its_left(file: Path) -> None:
    own = layer_of(part_of(file))
    known = set().union(*LAYERS)
    used = {name.split(".")[1] for name in imports(file) if name.startswith("launcher.")} & known
    to_the_right = {part for part in used if layer_of(part) > own}
    assert not to_the_right


def test_every_part_has_a_layer() -> None:
    assert {part_of(file) for file in FILES} <= set().union(*LAYERS)


def test_parts_of_one_layer_do_not_import_each_other_in_circles() -> None:
    uses: dict[str, set[str]] = {}
    for file in FILES:
        names = {name.split(".")[1] for name in imports(file) if name.startswith("launcher.")}
        uses.setdefault(part_of(file), set()).update(names - {part_of(file)})
    done: set[str] = set()
    while ready := {
        part for part, used in uses.items() if part not in done and not (used & uses.keys()) - done
    }:
        done |= ready
    assert uses.keys() - done == set()


@pytest.mark.parametrize(
    "file", sorted((ROOT / "launcher" / "engine").rglob("*.py")), ids=lambda file: file.name
)
def test_the_engine_imports_torch_and_itself_alone(file: Path) -> None:
    foreign = ("hydra", "omegaconf", "wandb", "sklearn", "datasets", "tqdm", "pynvml")
    for name in imports(file):
        assert name.split(".")[0] not in foreign
        assert not name.startswith("launcher") or name.startswith("launcher.engine")


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").rglob("*.py")), ids=lambda file: file.name)
def test_recipes_import_what_a_user_would(file: Path) -> None:
    allowed = ("launcher.recipe", "launcher.data", "launcher.images")
    assert all(name.startswith(allowed) for name in imports(file) if name.split(".")[0] == "launcher")


@pytest.mark.parametrize("part", FOUND_AT_IMPORT)
def test_the_front_door_does_not_load_torch(part: str) -> None:
    files = [file for file in FILES if part_of(file) == part]
    assert files
    assert_light(files)


def test_the_parent_has_its_handlers_before_it_loads_torch() -> None:
    assert_light(ROOT / "launcher" / "supervisor" / f"{part}.py" for part in WITHOUT_AGENT)


def assert_light(files: Iterable[Path]) -> None:
    for file in files:
        for name in imports(file, module_level_only=True):
            assert not name.startswith(WITHOUT_TORCH), f"{file} imports {name}"


def test_nothing_imports_the_scripts() -> None:
    for file in (*FILES, *(ROOT / "recipes").rglob("*.py")):
        assert not any(name.split(".")[0] == "scripts" for name in imports(file))
