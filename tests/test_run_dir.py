"""The directory of a run: distinct, claimed once, complete, and free of what is nobody's business."""

import dataclasses
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from launcher.config import Config, RunConfig, to_dict
from launcher.errors import ConfigError, StorageError
from launcher.telemetry import run_dir
from launcher.telemetry.files import read_json
from tests.configs import composed

CANARY = "c0ffee" * 6 + "c0ff"


def sample_config(directory: str = "") -> Config:
    """A config with options of the model and of the data set."""
    words = ("model.stem=small", "data=synthetic", "optim=adamw", "tracker.group=g", "tracker.tags=[a]")
    return dataclasses.replace(composed(*words), run=RunConfig(directory))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Default directories go below the current one."""
    monkeypatch.chdir(tmp_path)


def test_a_run_without_a_place_gets_a_new_one_below_its_recipe(tmp_path):
    first = Path(run_dir.prepare(sample_config(), []).run.dir)
    second = Path(run_dir.prepare(sample_config(), []).run.dir)
    assert first != second
    assert first.is_absolute()
    assert first.parent == second.parent == tmp_path / "outputs" / "resnet18"
    assert time.strptime(first.name[:-5], "%Y%m%d-%H%M%S")
    assert int(first.name[-4:], 16) >= 0


def test_a_name_that_is_taken_is_left_alone(tmp_path, monkeypatch):
    digits = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(
        run_dir.secrets, "token_hex", lambda n: next(digits) if n == 2 else os.urandom(n).hex()
    )
    monkeypatch.setattr(run_dir.time, "strftime", lambda _: "20300101-000000")
    names = [Path(run_dir.prepare(sample_config(), []).run.dir).name for _ in range(2)]
    assert names == ["20300101-000000-aaaa", "20300101-000000-bbbb"]


def test_the_search_for_a_name_ends(monkeypatch):
    monkeypatch.setattr(run_dir.secrets, "token_hex", lambda n: "0" * 2 * n)
    monkeypatch.setattr(run_dir.time, "strftime", lambda _: "20300101-000000")
    run_dir.prepare(sample_config(), [])
    with pytest.raises(StorageError, match=r"run\.dir=DIR"):
        run_dir.prepare(sample_config(), [])


def test_many_starts_at_once_get_directories_of_their_own():
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: run_dir.prepare(sample_config(), []).run.dir, range(48)))
    assert len(set(made)) == 48


def test_of_many_that_want_one_directory_exactly_one_gets_it(tmp_path):
    def attempt(number):
        try:
            return run_dir.prepare(sample_config(str(tmp_path / "mine")), [f"seed={number}"])
        except ConfigError as error:
            return error

    for _ in range(10):
        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(attempt, range(8)))
        winners = [outcome for outcome in outcomes if isinstance(outcome, Config)]
        assert len(winners) == 1
        for file in (tmp_path / "mine").iterdir():
            file.unlink()


START = """
import sys, time
from pathlib import Path
from launcher.errors import ConfigError
from launcher.telemetry.run_dir import prepare
from tests.test_run_dir import sample_config
print("ready", flush=True)
sys.stdin.read()
try:
    print(prepare(sample_config(sys.argv[1]), []).run.dir)
except ConfigError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(("directory", "num_distinct"), [("", 3), ("mine", 1)])
def test_three_processes_at_once_in_one_folder(tmp_path, directory, num_distinct):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", START, directory]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) for _ in range(3)]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.close()
        process.stdin = None
    answers = [process.communicate(timeout=30)[0].strip() for process in started]
    made = {answer for answer in answers if not answer.startswith("refused:")}
    assert len(made) == num_distinct
    assert sum(answer.startswith("refused:") for answer in answers) == 3 - num_distinct


@pytest.mark.parametrize("left", ["config.yaml", "status.json"])
def test_a_directory_that_holds_a_run_is_refused(tmp_path, left):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / left).write_text("mine")
    with pytest.raises(ConfigError, match=r"already holds a run.*Choose another") as refusal:
        run_dir.prepare(sample_config(str(tmp_path / "old")), [])
    assert refusal.value.exit_code == 2
    assert [file.name for file in (tmp_path / "old").iterdir()] == [left]
    assert (tmp_path / "old" / left).read_text() == "mine"


def test_a_directory_with_other_files_may_become_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("keep")
    assert run_dir.prepare(sample_config(str(tmp_path)), []).run.dir == str(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "keep"


def test_a_file_in_place_of_the_directory_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        run_dir.prepare(sample_config(str(tmp_path / "file")), [])


@pytest.mark.parametrize("place", ["/dev/null/run", "/proc/no-such-place/run"])
def test_a_place_that_cannot_be_written_is_named_with_the_cause(place):
    with pytest.raises(StorageError) as refusal:
        run_dir.prepare(sample_config(place), [])
    assert refusal.value.exit_code == 8
    assert place in str(refusal.value)
    assert "Not a directory" in str(refusal.value) or "No such file" in str(refusal.value)
    assert "run.dir=DIR" in str(refusal.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only directory")
def test_a_read_only_directory_is_a_storage_error(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(StorageError, match="Permission denied"):
        run_dir.prepare(sample_config(str(tmp_path / "locked" / "run")), [])


def test_the_config_is_written_as_people_type_it(tmp_path):
    config = run_dir.prepare(sample_config(str(tmp_path / "run")), ["recipe=resnet18", "optim=adamw"])
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    own = {"stem": "small", "zero_init_residual": True}
    assert written["model"] == {"name": "resnet18", "sync_bn": False, **own}
    assert written["data"]["num_samples"] == 2048
    assert written["data"]["augment"] == {"crop_padding": 0, "flip": False}
    assert written["run"] == {"dir": str(tmp_path / "run")}
    assert written["optim"] == to_dict(config)["optim"]
    assert list(written) == list(to_dict(config))
    assert (tmp_path / "run" / "overrides.txt").read_text() == "recipe=resnet18\noptim=adamw\n"
    assert read_json(tmp_path / "run" / "status.json")["state"] == "starting"


def test_the_environment_file_has_versions_and_no_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    monkeypatch.setenv("UNUSED_SECRET", CANARY)
    run_dir.write_environment(tmp_path, ["cpu", "cpu"])
    written = read_json(tmp_path / "env.json")
    assert written["devices"] == ["cpu", "cpu"]
    assert written["packages"]["torch"]
    assert written["packages"]["hydra-core"]
    assert written["git"] is None, "the current directory is no clone"
    text = (tmp_path / "env.json").read_text()
    assert CANARY not in text
    assert os.uname().nodename not in text.split('"platform"')[0]


def test_the_commit_and_whether_files_differ_from_it_are_recorded(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@e"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    for content, changed in (("one", False), ("two", True)):
        (tmp_path / "file").write_text(content)
        run_dir.write_environment(tmp_path, [])
        state = read_json(tmp_path / "env.json")["git"]
        assert (len(state["commit"]), state["changed"]) == (40, changed)


@pytest.mark.parametrize("script", ["sleep 60", "exit 3"])
def test_a_git_that_hangs_or_fails_is_left_out(tmp_path, monkeypatch, script):
    (tmp_path / "git").write_text(f"#!/bin/sh\n{script.replace('sleep', 'exec sleep')}\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(run_dir, "GIT_TIMEOUT_S", 0.2)
    began = time.monotonic()
    run_dir.write_environment(tmp_path, [])
    assert time.monotonic() - began < 5
    assert read_json(tmp_path / "env.json")["git"] is None


def test_each_rank_has_its_log_while_it_runs(tmp_path):
    log = logging.getLogger("launcher")
    before = (log.level, list(log.handlers))
    with run_dir.rank_log(tmp_path, 0), run_dir.rank_log(tmp_path, 11):
        log.info("to both")
    log.info("to none")
    for rank in (0, 11):
        lines = (tmp_path / "logs" / f"rank{rank}.log").read_text().splitlines()
        assert len(lines) == 1
        assert lines[0].endswith("INFO launcher: to both")
    assert (log.level, list(log.handlers)) == before


def test_the_result_replaces_an_older_one(tmp_path):
    run_dir.write_result(tmp_path, {"state": "failed"})
    run_dir.write_result(tmp_path, {"state": "done", "metric": 0.98, "metrics": {"loss": float("inf")}})
    assert read_json(tmp_path / "result.json")["metrics"] == {"loss": float("inf")}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_neither_torch_nor_wandb_is_imported():
    modules = (
        "launcher.telemetry, launcher.telemetry.run_dir, launcher.telemetry.tracking, launcher.report.page"
    )
    heavy = ("torch", "wandb", "matplotlib", "tqdm")
    check = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert done.stdout.strip() == "[]", done.stderr
