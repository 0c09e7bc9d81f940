"""The READMEs are true: their Python runs, their commands are accepted, their tables are those measured."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.commands.arguments import parse
from launcher.commands.compare import as_sweep
from launcher.recipe import registry_of
from tests.faults.parent import Parent
from tests.forked import launch_forked
from tests.meta_device import MetaDevice

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "",
    "launcher",
    "launcher/engine",
    "launcher/telemetry",
    "launcher/trainer",
    "recipes",
    "conf",
    "scripts",
    "tests",
)
PAGES = {folder: (ROOT / folder / "README.md").read_text() for folder in FOLDERS}
SHORT = ["train.max_steps=2", "tracker=none"]
LAUNCH = re.compile(r"scripts/run|-m launcher")


class Block(NamedTuple):
    folder: str
    kind: str
    text: str


BLOCKS = [
    Block(folder, kind, text)
    for folder, page in PAGES.items()
    for kind, text in re.findall(r"```(\w*)\n(.*?)```", page, flags=re.S)
]
COMMANDS = list(
    dict.fromkeys(
        line.partition("#")[0].strip()
        for block in BLOCKS
        if block.kind == "bash"
        for line in block.text.replace("\\\n", " ").splitlines()  # continued lines are one command
        if LAUNCH.search(line)
    )
)
TORCHRUN = [command for command in COMMANDS if "--standalone" in command]
OWN_RECIPE = next(block.text for block in BLOCKS if block.kind == "python" and "@recipe" in block.text)
OWN_YAML = "# @package _global_\nrecipe: {name: rings, uses: rings}\noptim: {lr: 0.1}\n"
OF_ENGINE = [b.text for b in BLOCKS if b.folder == "launcher/engine" and b.kind == "python"]


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
    return shlex.split(LAUNCH.split(command.replace("DIR", "."))[-1])


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the sources whose environment is set up, and in which no environment is active.

    As an installation would: the packages are those of these tests, and the launcher is that of the copy.
    """
    directory = tmp_path_factory.mktemp("clone")
    for name in ("launcher", "conf", "recipes", "scripts"):
        shutil.copytree(
            ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__", "results")
        )
    shutil.copy(ROOT / "pyproject.toml", directory)
    write_own_recipe(directory)
    venv = directory / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "found.pth").write_text(f"{directory}\n{sysconfig.get_path('purelib')}\n")
    sums = 'echo "$(cat "$1/pyproject.toml" "$1/scripts/constraints.txt" | cksum) $1"'
    wanted = subprocess.run(["bash", "-c", sums, "-", directory], capture_output=True, text=True, check=True)
    for extra in ("data", "text"):
        (venv / f"set-up-for-{extra}").write_text(wanted.stdout)
    return directory


def typed(command: str, clone: Path) -> subprocess.CompletedProcess[str]:
    """The command as the page has it, in a shell that finds no program of an environment."""
    environ = {
        "PATH": "/usr/bin:/bin",
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": os.environ.get("HOME", "/"),
        "OMP_NUM_THREADS": "1",
    }
    shell = ["bash", "-c", command]
    return subprocess.run(shell, cwd=clone, env=environ, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_lead_to_files(folder: str) -> None:
    links = re.findall(r"\]\(([^)]+)\)", PAGES[folder])
    assert all((ROOT / folder / link).is_file() for link in links), links


@pytest.mark.slow
def test_the_metric_of_ones_own_measures_as_the_page_says(tmp_path) -> None:
    code = next(block.text for block in BLOCKS if "class MissRate" in block.text)
    fields = 'metrics=[MissRate()], monitor="miss_rate", on_eval_end=largest_weight'
    assert fields in PAGES["recipes"]
    recipe = OWN_RECIPE.replace(
        'classes=("inner", "outer"),', fields.replace('="miss', '="near/miss') + ","
    ).replace("validation=TensorData(", 'validation={"near": TensorData(')
    recipe = re.sub(r"(validation=.*),\n", r"\1},\n", recipe)
    (tmp_path / "mine.py").write_text(f"{code}\n{recipe}")
    with Parent(
        tmp_path, "recipe.uses=rings", "recipes.path=mine.py", "run.dir=run", "train.epochs=1"
    ) as parent:
        assert parent.end() == 0, parent.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["metric_name"] == "near/miss_rate"
    assert 0 <= result["sets"]["near"]["miss_rate"] == result["metric"] <= 1
    assert '"largest weight":' in (tmp_path / "run" / "metrics.jsonl").read_text()


APART = ("init_process_group", "ParameterGroup(", "compute_in_fp32(")  # code with a test of its own
ALONE = [code for code in OF_ENGINE if not any(word in code for word in APART)]


@pytest.mark.parametrize("code", ALONE)
def test_the_engine_alone_trains_in_a_loop_of_ones_own(code: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    before = model.weight.detach().clone()
    data = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]
    exec(compile(code, "README.md", "exec"), {"torch": torch, "model": model, "data": data})
    assert ("backward" not in code) == bool(torch.equal(model.weight.float(), before.half().float()))


def test_the_modules_of_the_engine_page_compute_in_fp32() -> None:
    (code,) = [code for code in OF_ENGINE if "compute_in_fp32(" in code]
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    stepper = names["stepper"]
    with stepper.forward():
        first = stepper.model[0](torch.ones(1, 4))
        assert (first.dtype, stepper.model[1](first).dtype) == (torch.float16, torch.float32)


def test_the_groups_of_the_engine_page_freeze_and_train_what_they_name() -> None:
    (code,) = [code for code in OF_ENGINE if "ParameterGroup(" in code]
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    model, stepper = names["model"], names["stepper"]
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for _ in range(8):  # the scale halves until a step does not overflow
        with stepper.forward():
            outputs = model(torch.randn(8, 4)).float()
        stepper.backward(outputs.square().sum(), 8)
        stepper.step()
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {"1.weight", "1.bias", "2.weight", "2.bias"}


@pytest.mark.slow
def test_the_engine_trains_on_two_ranks_under_torchrun(tmp_path) -> None:
    (tmp_path / "loop.py").write_text(next(code for code in OF_ENGINE if "init_process_group" in code))
    done = run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "loop.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore::launcher.engine.EngineWarning")  # all values are read as zeros
def test_the_loop_of_many_ranks_runs_on_the_gpu_of_its_rank(monkeypatch) -> None:
    """On a device that refuses tensors of another one, in the place of the GPU."""
    code = next(code for code in OF_ENGINE if "init_process_group" in code).replace('"cuda"', '"meta"')
    code = code.replace("Policy.fp16(),", "Policy.fp16(), emulate=True,")  # `meta` has no autocast
    init, backends, bound = dist.init_process_group, [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", bound.append)
    monkeypatch.setenv("LOCAL_RANK", "1")

    def connect(backend: str) -> None:
        backends.append(backend)
        init("fake", store=FakeStore(), rank=0, world_size=1)

    monkeypatch.setattr(dist, "init_process_group", connect)
    names: dict[str, Any] = {}
    try:
        with MetaDevice():
            exec(compile(code, "README.md", "exec"), names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert (backends, bound) == (["nccl"], [torch.device("meta", 1)])
    assert all(p.is_meta for p in names["model"].parameters())
    assert names["outputs"].is_meta


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_accepted(command: str, clone: Path) -> None:
    """Everything up to the start of training: composed, checked, printed as a resolved config."""
    assert command.startswith("scripts/run "), "typed like this, it is found without an active environment"
    words = launcher_words(command)
    if words[0] in ("report", "watch", "export", "predict"):
        pytest.skip("needs a finished run; the test below has one")
    if words[0] == "plan":
        words = [*parse(words).positionals]
    if words[0] == "compare":
        words = [
            word.replace(",fp16", "").replace("0,1,2", "0") for word in as_sweep(parse(words)).positionals
        ]
        words.remove("sweep.parallel=1")  # only a sweep has it, and --cfg shows one job
    if words[0] == "doctor":
        words += ["launch.nproc=1", "tracker=none"]  # without ranks that exchange for seconds
    if words[0] == "python":
        pytest.skip("a benchmark; tests of their own run them")
    if "recipe=" in command and "--cfg" not in words:
        if "-m" in words:
            words = [word.replace(",0.1", "").replace("0,1", "0") for word in words if word != "-m"]
        words += ["--cfg", "job"]
    done = typed(f"scripts/run {shlex.join(words)}", clone)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_each_command_runs_as_it_is_printed_and_as_the_pages_have_it(clone: Path) -> None:
    """From a new recipe to its exported weights, typed in a clone in which no environment is active."""
    done = typed("scripts/run new points", clone)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()[-1].removeprefix("train it: ")
    assert printed.startswith("scripts/run recipe=points.py ")
    done = typed(f"{printed} run.dir=run train.epochs=1 tracker=none", clone)
    assert done.returncode == 0, done.stderr
    assert "\nworkers 2 " in done.stdout, "without a GPU"
    for command in COMMANDS:
        words = launcher_words(command)
        if words[0] in ("report", "watch", "export"):
            command = re.sub(r"(outputs/resnet18/)?\bRUN\b(\.\.\.)?", "run", command)
            done = typed(command, clone)
            assert done.returncode == 0, f"{command}: {done.stderr}"
    assert (clone / "weights.safetensors").is_file()


def test_the_lines_for_predicting_load_an_exported_folder(tmp_path, monkeypatch, capsys) -> None:
    code = next(block.text for block in BLOCKS if "import load_file" in block.text)
    folder = tmp_path / "DIR"
    folder.mkdir()
    network = registry_of(None).models["resnet18"](num_classes=10, in_channels=1, image_size=8)
    save_file(network.state_dict(), folder / "model.safetensors")
    about = {"classes": list("abcdefghij"), "normalisation": {"mean": [0.3], "std": [0.4]}}
    (folder / "prediction.json").write_text(json.dumps(about))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() in about["classes"]


@pytest.mark.parametrize(
    "file", ["launcher.py", pytest.param("launcher/__init__.py", marks=pytest.mark.slow)]
)
def test_a_launcher_in_the_users_folder_is_not_run_in_its_place(file: str, clone: Path, tmp_path) -> None:
    """Neither in the parent, nor in its workers, nor in the jobs of a sweep."""
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("open('imported', 'w').close()\n")
    (path.parent / "__main__.py").write_text("open('imported', 'w').close()\n")
    (tmp_path / "mine.py").write_text(OWN_RECIPE)
    command = f"cd {tmp_path}; {clone}/scripts/run recipe=mine.py tracker=none train.max_steps=1"
    for more in ("launch.nproc=2 run.dir=run", "-m launch.nproc=1 seed=0 hydra.sweep.dir=sweep"):
        done = typed(f"{command} {more}", clone)
        assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()
    assert len([*tmp_path.glob("sweep/*/result.json")]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["recipe=mine.py", "recipe=rings"])
def test_the_recipe_of_ones_own_trains_with_the_commands_of_the_pages(recipe: str, tmp_path) -> None:
    write_own_recipe(tmp_path)
    command = next(command for command in COMMANDS if recipe in command)
    done = launch_forked(tmp_path, [*launcher_words(command), "tracker=none", "train.epochs=2"])
    assert done.returncode == 0, done.stderr
    assert "outer" in done.stdout, "the report of its classes"


@pytest.mark.slow
@pytest.mark.parametrize("command", TORCHRUN)
def test_commands_train(command, tmp_path) -> None:
    write_own_recipe(tmp_path)
    torchrun = shlex.split(command.partition("torchrun ")[2].partition("-m launcher")[0])
    words = [*torchrun, "-m", "launcher", *launcher_words(command), *SHORT]
    done = run(["-m", "torch.distributed.run", *words], tmp_path)
    assert done.returncode == 0, done.stderr
