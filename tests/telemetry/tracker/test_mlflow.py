"""Runs in MLflow: on a real server on loopback, and in plain files without one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import PreemptedError
from launcher.telemetry.tracker import ConfusionMatrix, Picture, RunInfo, Text, Tracker
from launcher.telemetry.tracker.mlflow_tracker import DEFAULTS
from launcher.telemetry.tracker.registry import make

pytest.importorskip("mlflow", reason="needs MLflow: pip install mlflow-skinny")
HAS_SERVER = all(importlib.util.find_spec(name) for name in ("flask", "sqlalchemy", "huey", "aiohttp"))
# Of mlflow and the libraries that it loads.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in DEFAULTS.items():  # which the tracker sets
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_MLFLOW_TELEMETRY_SESSION_ID", "")
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    if not HAS_SERVER:
        pytest.skip("needs a server of MLflow: pip install mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = f"sqlite:///{tmp_path}/mlflow.db"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", store, "--artifacts-destination", str(tmp_path / "artifacts")]
    with open(tmp_path / "server.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--workers", "1"], cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 150
    try:
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                assert process.poll() is None, (tmp_path / "server.log").read_text()
                assert time.monotonic() < until, "the server did not start"
                time.sleep(0.2)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def run_of(directory: Path, run_id: str = "ab12cd34") -> RunInfo:
    config = {"optim": {"lr": 0.1}, "seed": 3, "recipe": {"name": "x" * 9000}}
    return RunInfo(directory, "a name", run_id, "a project", config, "a group", ("a tag",), "notes")


def write(tracker: Tracker, directory: Path) -> None:
    from PIL import Image

    tracker.start(run_of(directory))
    tracker.log(1, {"train/loss": 0.5, "scale/value": 65536.0, "scale/overflow_ranks": "0, 1"})
    tracker.log(2, {"train/loss": 0.25})
    tracker.media(2, "eval/classification_report", Text("a report"))
    tracker.media(2, "eval/confusion_matrix", ConfusionMatrix(["a", "b"], [[3, 0], [1, 1]]))
    Image.new("RGB", (4, 3)).save(directory / "picture.png")
    tracker.media(2, "after_evaluation/picture", Picture(str(directory / "picture.png")))


def check(uri: str, directory: Path) -> None:
    """What another program reads of a run that was preempted and resumed."""
    import mlflow

    client: Any = mlflow.MlflowClient(tracking_uri=uri)
    tracker = make("mlflow")
    write(tracker, directory)
    tracker.finish(PreemptedError.exit_code)
    experiment = client.get_experiment_by_name("a project").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "KILLED"
    resumed = make("mlflow")
    resumed.start(run_of(directory))
    resumed.log(3, {"train/loss": 0.125})
    resumed.finish(0)
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("a name", "FINISHED")
    found = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "train/loss")]
    assert found == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert run.data.metrics["scale/value"] == 65536.0
    assert (run.data.params["optim.lr"], run.data.params["seed"]) == ("0.1", "3")
    assert run.data.tags["group"] == "a group"
    assert client.list_artifacts(run.info.run_id, "after_evaluation")[0].path.endswith("picture.png")
    named = {each.path for each in client.list_artifacts(run.info.run_id, "eval")}
    assert named == {"eval/classification_report-00000002.txt", "eval/confusion_matrix-00000002.json"}


@pytest.mark.slow
def test_a_server_has_the_run_and_continues_it_when_it_resumes(server: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    check(server, tmp_path)


def test_without_a_server_the_run_is_in_mlruns(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    check((tmp_path / "mlruns").as_uri(), tmp_path)
