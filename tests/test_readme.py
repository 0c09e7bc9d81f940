"""The README is true: its Python runs, its commands are accepted, its tree names what is there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, flags=re.S)
COMMANDS = [
    line.partition("#")[0].strip()
    for kind, block in BLOCKS
    if kind == "bash"
    for line in block.splitlines()
    if " -m launcher" in line
]
OWN_RECIPE = next(block for kind, block in BLOCKS if kind == "python" and "@recipe" in block)
OWN_YAML = next(block for kind, block in BLOCKS if kind == "yaml")
SHORT = ["train.max_steps=2", "tracker=none"]


def write_own_recipe(directory: Path) -> None:
    (directory / "mine.py").write_text(OWN_RECIPE)
    (directory / "mine" / "recipe").mkdir(parents=True)
    (directory / "mine" / "recipe" / "rings.yaml").write_text(OWN_YAML)


def run(words: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], cwd=directory, env=environ, capture_output=True, text=True, timeout=100
    )


def launcher_words(command: str) -> list[str]:
    return shlex.split(command.replace("DIR", ".").partition("-m launcher")[2])


def test_it_is_short_enough_to_be_read() -> None:
    assert len(TEXT.splitlines()) <= 200


def test_the_table_of_wires_is_what_the_benchmark_found() -> None:
    found = json.loads((ROOT / "scripts/bench/results/wire_precision.json").read_text())["rows"]
    lines = TEXT.partition("| simulated on real gradients")[2].splitlines()[2:6]
    for wire, line in zip(("plain", "average", "split", "fp32"), lines, strict=True):
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        rows = [row for row in found if row["wire"] == wire]
        assert [row["ranks"] for row in rows] == [8, 64, 512, 4096]
        for cell, row in zip(cells, rows, strict=True):
            error, zeros, scale = cell.split("; ")
            assert error == f"{100 * row['error_at_largest_scale']:.2f} %"
            assert float(zeros.removesuffix(" %")) == pytest.approx(
                100 * row["zeros_by_scale_exponent"]["0"], abs=0.5 if "." not in zeros else 0.05
            )
            assert scale == f"2^{row['largest_scale_exponent']}"


def test_a_recipe_of_ones_own_takes_at_most_25_lines() -> None:
    assert len(OWN_RECIPE.splitlines()) <= 25


def test_the_engine_alone_trains_in_a_loop_of_ones_own(capsys) -> None:
    code = next(block for kind, block in BLOCKS if kind == "python" and "Stepper(" in block)
    torch.manual_seed(0)
    data = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]
    exec(compile(code, "README.md", "exec"), {"torch": torch, "model": torch.nn.Linear(4, 3), "data": data})
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_accepted(command, tmp_path) -> None:
    """Everything up to the start of training: composed, checked, printed as a resolved config."""
    write_own_recipe(tmp_path)
    words = launcher_words(command)
    if words[0] in ("report", "export"):
        pytest.skip("needs a finished run; tests/test_end_to_end.py and tests/test_cli.py have one")
    trains = "recipe=" in command
    flags = ["--cfg", "job"] if trains and "-m" not in words else []
    if trains and not flags:
        words = [word.replace(",0.1", "").replace("0,1", "0") for word in words if word != "-m"]
        flags = ["--cfg", "job"]
    done = run(["-m", "launcher", *words, *flags], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if "torchrun" in c and "cifar10" not in c])
def test_commands_train(command, tmp_path) -> None:
    write_own_recipe(tmp_path)
    torchrun = shlex.split(command.partition("torchrun")[2].partition("-m launcher")[0])
    words = [*torchrun, "-m", "launcher", *launcher_words(command), *SHORT]
    done = run(["-m", "torch.distributed.run", *words], tmp_path)
    assert done.returncode == 0, done.stderr


TREE = TEXT.split("## Files and source")[1].split("## ")[0]
ROOMS = [path for path in (ROOT / "launcher").iterdir() if path.name not in ("__init__.py", "__pycache__")]


@pytest.mark.parametrize("name", re.findall(r"\w+/(?=[ \n])", TREE.partition("```")[2]))
def test_the_tree_names_folders_that_are_there(name) -> None:
    assert [path for path in (ROOT, *ROOT.glob("launcher/**/")) if (path / name).is_dir()]


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.name)
def test_every_room_is_in_the_tree(room) -> None:
    assert (f"{room.name}/" if room.is_dir() else room.stem) in TREE.split()
