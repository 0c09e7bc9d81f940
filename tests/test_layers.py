"""The house's one direction: a room imports only from its left, and the engine's rooms likewise."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    {"errors"},
    {"os"},
    {"config"},
    {"user_code"},
    {"run_dir"},
    {"distributed", "engine"},
    {"telemetry", "data"},
    {"metrics", "doctor"},
    {"recipe"},
    {"checkpoint", "report"},
    {"evaluation"},
    {"trainer"},
    {"worker"},
    {"launch", "sweep", "plan"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
ENGINE_LAYERS = (
    {"errors", "limits", "async_work", "step_timer", "names"},
    {"precision", "params"},
    {"grads", "state"},
    {"optim"},
    {"checks"},
    {"result", "rank_state"},
    {"build"},
    {"step"},
    {"stepper"},
    {"ema"},
    {"__init__"},
)
TRAINER_LAYERS = (
    {"progress", "warning_log", "device", "train_accuracy"},
    {"step_times", "replica_consistency", "errors"},
    {"callback"},
    {"pruning", "step_reader"},
    {"context"},
    {"after_evaluation", "diagnostics", "builders"},
    {"resume", "out_of_memory"},
    {"evaluation_loop", "train_step"},
    {"callbacks", "results"},
    {"trainer", "build_callbacks"},
    {"build_trainer"},
    {"__init__"},
)
LAUNCH_LAYERS = (
    {"__init__", "slurm", "worker_count", "root_cause", "config_broadcast"},
    {"node_env", "restart_policy", "worker_process"},
    {"worker_group"},
    {"multi_node"},
    {"agent"},
    {"parent"},
)
WITHOUT_TORCH = (
    "torch",
    "launcher.engine",
    "launcher.recipe",
    "launcher.data",
    "launcher.worker",
    "launcher.launch.agent",
)
FOUND_AT_IMPORT = (
    "__main__",
    "cli",
    "commands",
    "config",
    "os",
    "run_dir",
    "sweep",
    "telemetry",
    "distributed/env.py",
    "distributed/exit_records.py",
    "distributed/process_group.py",
    "launch/config_broadcast.py",
    "distributed/store.py",
    "distributed/heartbeat.py",
)
# of launch/
WITHOUT_AGENT = (
    "__init__",
    "parent",
    "worker_count",
    "root_cause",
    "restart_policy",
)


@cache
def imports(file: Path, module_level_only: bool = False) -> tuple[str, ...]:
    """Every module that the file imports, wherever in it; those under TYPE_CHECKING load nothing."""
    return tuple(imported(file, module_level_only))


def imported(file: Path, module_level_only: bool) -> Iterator[str]:
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


FILES = sorted(
    file for file in (ROOT / "launcher").rglob("*.py") if file != ROOT / "launcher" / "__init__.py"
)
OF_ENGINE = [file for file in FILES if file.is_relative_to(ROOT / "launcher" / "engine")]


def room_of(file: Path, house: Path) -> str:
    """The module or package directly below `house` that the file belongs to."""
    return file.relative_to(house).parts[0].removesuffix(".py")


def rooms_used(file: Path, house: Path) -> set[str]:
    """The other rooms of `house` that the file imports from."""
    prefix = ".".join(house.relative_to(ROOT).parts) + "."
    names = {name.removeprefix(prefix).split(".")[0] for name in imports(file) if name.startswith(prefix)}
    return (names & rooms_of(house)) - {room_of(file, house)}


@cache
def rooms_of(house: Path) -> frozenset[str]:
    return frozenset(room_of(file, house) for file in house.rglob("*.py"))


def layer_of(room: str, layers: tuple[set[str], ...]) -> int:
    return next(index for index, rooms in enumerate(layers) if room in rooms)


HOUSES = {
    ROOT / "launcher": LAYERS,
    ROOT / "launcher" / "engine": ENGINE_LAYERS,
    ROOT / "launcher" / "trainer": TRAINER_LAYERS,
    ROOT / "launcher" / "launch": LAUNCH_LAYERS,
}


@pytest.mark.parametrize(("house", "layers"), HOUSES.items(), ids=lambda value: getattr(value, "name", ""))
def test_a_room_imports_only_from_its_left_and_no_layer_has_a_circle(
    house: Path, layers: tuple[set[str], ...]
) -> None:
    uses: dict[str, set[str]] = {}
    for file in house.rglob("*.py"):
        if file != ROOT / "launcher" / "__init__.py":
            room, used = room_of(file, house), rooms_used(file, house)
            uses.setdefault(room, set()).update(used)
            right = {each for each in used if layer_of(each, layers) > layer_of(room, layers)}
            assert right == set(), f"{file} imports from its right"
    assert uses.keys() == set().union(*layers)
    done: set[str] = set()
    while ready := {room for room, used in uses.items() if room not in done and not used - done}:
        done |= ready
    assert uses.keys() - done == set()


def test_the_map_names_files_that_are_there_and_every_folder() -> None:
    page = (ROOT / "launcher" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+(?:/|\.py))`", page))
    missing = [
        name for name in named if not (ROOT / name).exists() and not (ROOT / "launcher" / name).exists()
    ]
    assert missing == []
    folders = {f"{path.parent.name}/" for path in (ROOT / "launcher").glob("*/__init__.py")}
    assert folders - named == set()


def test_the_engine_imports_torch_and_itself_alone() -> None:
    foreign = ("hydra", "omegaconf", "wandb", "sklearn", "datasets", "tqdm", "pynvml")
    for file in OF_ENGINE:
        for name in imports(file):
            assert name.split(".")[0] not in foreign, file
            assert not name.startswith("launcher") or name.startswith("launcher.engine"), file


def test_the_core_of_data_knows_neither_images_nor_text() -> None:
    kinds = ("launcher.data.images", "launcher.data.text")
    core = [file for file in (ROOT / "launcher" / "data").glob("*.py") if file.name != "__init__.py"]
    assert [name for file in core for name in imports(file) if name.startswith(kinds)] == []


def test_recipes_import_what_a_user_would() -> None:
    for file in (ROOT / "recipes").rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        ours = {module for module in modules if module.split(".")[0] == "launcher"}
        is_a_loop = file.name in ("flat_loop.py", "gan.py", "grpo.py")  # of one's own, without a recipe
        assert ours <= ({"launcher.engine"} if is_a_loop else {"launcher.recipe", "launcher.data"}), file


def test_the_front_door_does_not_load_torch() -> None:
    for part in FOUND_AT_IMPORT:
        place = ROOT / "launcher" / part
        files = [file for file in FILES if file == place or room_of(file, ROOT / "launcher") == part]
        assert files, part
        assert_light(files)


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("config", "torch hydra omegaconf"),
        ("distributed", "torch"),
        ("cli", "torch hydra"),
        ("run_dir", "torch"),
    ],
)
def test_importing_it_loads_neither(package: str, absent: str) -> None:
    code = f"import launcher.{package}, sys; print(*(set({absent.split()!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""


def test_the_parent_has_its_handlers_before_it_loads_torch() -> None:
    assert_light(ROOT / "launcher" / "launch" / f"{part}.py" for part in WITHOUT_AGENT)


def assert_light(files: Iterable[Path]) -> None:
    for file in files:
        for name in imports(file, module_level_only=True):
            assert not name.startswith(WITHOUT_TORCH), f"{file} imports {name}"


def test_nothing_imports_the_scripts() -> None:
    for file in (*FILES, *(ROOT / "recipes").rglob("*.py")):
        assert not any(name.split(".")[0] == "scripts" for name in imports(file))


INSIDE_A_STEPPER = {"layout", "reducer", "buffers", "scale", "zero1", "updater"}


def taken_from_inside(file: Path) -> set[str]:
    """Parts of a Stepper that the file uses directly; private attributes are such parts too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node.value).rpartition(".")[2]
            inside = node.attr in INSIDE_A_STEPPER or node.attr.startswith("_")
            if inside and name.strip("_") == "stepper":
                found.add(node.attr)
    return found


def test_nothing_outside_the_engine_reaches_through_a_stepper() -> None:
    outside = [file for file in FILES if file not in OF_ENGINE]
    outside += [file for folder in ("scripts", "recipes") for file in (ROOT / folder).rglob("*.py")]
    assert {file: found for file in outside if (found := taken_from_inside(file))} == {}
    assert taken_from_inside(ROOT / "tests" / "engine" / "observe.py") >= {"layout", "zero1", "updater"}
