"""The files that describe a run: complete, and free of what is nobody's business."""

import contextlib
import dataclasses
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from launcher.config.codec import decoded
from launcher.config.schema import Config, RunConfig, to_dict
from launcher.run_dir import records
from launcher.run_dir.atomic import read_json
from launcher.run_dir.result import Failure, Result
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


def test_the_config_is_written_as_people_type_it(tmp_path):
    config = sample_config(str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    records.write_metadata(config, ["recipe=resnet18", "optim=adamw"])
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    own = {"stem": "small", "zero_init_residual": True}
    start = {"init_from": None, "init_from_strict": True, "init_from_sha256": None}
    assert written["model"] == {"name": "resnet18", "sync_bn": False, **start, **own}
    assert written["data"]["num_samples"] == 2048
    assert written["data"]["augment"] == {"random_crop_padding": 0, "random_horizontal_flip": False}
    assert written["run"] == {"dir": str(tmp_path / "run")}
    assert (written["optim"]["name"], written["optim"]["betas"]) == ("adamw", [0.9, 0.999])
    assert list(written) == list(to_dict(config))
    assert (tmp_path / "run" / "overrides.txt").read_text() == "recipe=resnet18\noptim=adamw\n"
    assert read_json(tmp_path / "run" / "status.json")["state"] == "starting"


def test_the_environment_file_has_versions_and_no_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    monkeypatch.setenv("UNUSED_SECRET", CANARY)
    records.write_environment(tmp_path, ["cpu", "cpu"])
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
    for content, end in (("one", ""), ("two", "-dirty")):
        (tmp_path / "file").write_text(content)
        records.write_environment(tmp_path, [])
        assert re.fullmatch(f"[0-9a-f]{{40}}{end}", read_json(tmp_path / "env.json")["git"])


@pytest.mark.parametrize("script", ["sleep 60", "exit 3"])
def test_a_git_that_hangs_or_fails_is_left_out(tmp_path, monkeypatch, script):
    (tmp_path / "git").write_text(f"#!/bin/sh\n{script.replace('sleep', 'exec sleep')}\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(records, "GIT_TIMEOUT_S", 0.2)
    began = time.monotonic()
    records.write_environment(tmp_path, [])
    assert time.monotonic() - began < 30, "it sleeps for 60 s"
    assert read_json(tmp_path / "env.json")["git"] is None


def test_each_rank_has_its_log_while_it_runs(tmp_path):
    log = logging.getLogger("launcher")
    before = (log.level, list(log.handlers))
    with records.rank_log(tmp_path, 0), records.rank_log(tmp_path, 11):
        log.info("to both")
    log.info("to none")
    for rank in (0, 11):
        lines = (tmp_path / "logs" / f"rank{rank}.log").read_text().splitlines()
        assert len(lines) == 1
        assert lines[0].endswith("INFO launcher: to both")
    assert (log.level, list(log.handlers)) == before


def test_the_result_replaces_an_older_one(tmp_path):
    records.write_result(tmp_path, Failure("failed", 1, "no space"))
    done = {"state": "done", "exit": 0, "metric": 0.98, "metrics": {"loss": float("inf")}}
    records.write_result(tmp_path, decoded(Result, done))
    assert read_json(tmp_path / "result.json")["metrics"] == {"loss": float("inf")}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_neither_torch_nor_wandb_is_imported():
    modules = (
        "launcher.telemetry, launcher.run_dir.records, launcher.telemetry.tracker.mode, launcher.report.page"
    )
    heavy = ("torch", "wandb", "matplotlib", "tqdm")
    check = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_log_that_cannot_be_written_hides_no_error(tmp_path, capfd):
    """A limit on the size of files stands for a full disk: write() fails in the middle of a record."""
    with pytest.raises(ValueError, match="the error in hand"):
        fail_without_room(tmp_path)
    assert "fits" in (tmp_path / "logs" / "rank1.log").read_text()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: ")  # the limit holds for this file too


def fail_without_room(directory):
    log = logging.getLogger("launcher")
    with records.rank_log(directory, 1):
        log.info("fits")
        with small_files(100):
            log.error("x" * 200)
            log.error("y" * 200)
            raise ValueError("the error in hand")


@contextlib.contextmanager
def small_files(limit_bytes):
    """write() beyond so many bytes of a file fails with EFBIG in this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
