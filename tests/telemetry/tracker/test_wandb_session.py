"""Real wandb runs: what the file of an offline one holds, and that wandb cannot stop or delay training.

Each runs in a process of its own, as a training run would, with no terminal.
"""

import contextlib
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.run_dir.atomic import read_json
from launcher.telemetry.tracker.mode import NO_KEY
from tests.limits import at_most
from tests.run_dir.test_records import CANARY
from tests.telemetry.tracker.http_server import Server, closed_port

ROOT = Path(__file__).parents[3]

TRAIN = """
import json, os, signal, subprocess, sys, threading, time
from launcher.telemetry import open_telemetry
from contextlib import ExitStack
from pathlib import Path
from launcher.run_dir.claim import open_run_dir
from launcher.telemetry.tracker.sink import TrackerTimeouts
from tests.run_dir.test_records import sample_config
from tests.telemetry.made import made

plan = json.loads(sys.argv[1])
slowest_s, closing_s, dirs, held = 0.0, [], [], ExitStack()

def is_on_disk(directory, name):
    found = Path(directory).glob("wandb/*/*.wandb")
    return any(name.encode() in path.read_bytes() for path in found)

for job in range(plan.get("jobs", 1)):
    wanted = sample_config(plan.get("dir", ""))
    config, _ = held.enter_context(open_run_dir(wanted, []))
    telemetry = open_telemetry(config, os.environ, TrackerTimeouts(*plan.get("patience", ())))
    telemetry.emit(made("start", 0, total_steps=plan["steps"]))
    for step in range(1, plan["steps"] + 1):
        began = time.monotonic()
        values = {"loss": job + 1 / step, "lr": 0.1, "scale": 65536.0 / step, "skipped": 0, "step_ms": 1.0}
        telemetry.emit(made("step", step, epoch=0, **values))
        slowest_s = max(slowest_s, time.monotonic() - began)
    telemetry.emit(made("eval", plan["steps"], epoch=0, val_loss=0.25, accuracy=0.975, samples=360))
    telemetry.emit(made("gradients", plan["steps"], zero_share=0.5, first_exponent=-24, histogram=[1, 2, 3]))
    gpu = {"index": 0, "uuid": "u", "power_w": 300.0}
    telemetry.emit(made("gpu", plan["steps"], power_w=300.0, gpus=[gpu]))
    texts, pictures = {"sample": "<b>"}, {"image": plan["picture"]} if plan.get("picture") else {}
    shown = {"texts": texts, "pictures": pictures, "numbers": {"width": 3}}
    telemetry.emit(made("after_evaluation", plan["steps"], **shown))
    table = [{"class": "a", "precision": 1.0, "support": 3}, {"class": "b", "precision": 0.5, "support": 2}]
    matrix = {"classes": ["a", "b"], "confusion_matrix": [[3, 0], [1, 1]]}
    telemetry.emit(made("report", plan["steps"], text="a report", table=table, **matrix))
    if plan.get("die"):
        until = time.monotonic() + 60
        while not is_on_disk(config.run.dir, plan["die"]) and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    state, code = plan.get("end", ["done", 0])
    telemetry.emit(made("end", plan["steps"], state=state, exit=code, metrics={"accuracy": 0.975}))
    began = time.monotonic()
    telemetry.close()
    closing_s.append(time.monotonic() - began)
    dirs.append(config.run.dir)

print("RESULT " + json.dumps({
    "dirs": dirs, "slowest_s": slowest_s, "closing_s": closing_s,
}))
"""


class Trained:
    """A finished process and what it said of itself."""

    def __init__(self, done, seconds):
        self.out, self.err, self.code, self.seconds = done.stdout, done.stderr, done.returncode, seconds
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        self.said = json.loads(lines[0].removeprefix("RESULT ")) if lines else {}
        self.dirs = [Path(directory) for directory in self.said.get("dirs", [])]

    @property
    def warnings(self):
        return [line for line in self.out.splitlines() if line.startswith("warning: ")]


def train(cwd, plan, **environ):
    """Runs TRAIN with no terminal and an environment without a trace of the machine's own wandb settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    home = {"HOME": str(cwd / "home"), "PYTHONPATH": str(ROOT), "UNUSED_SECRET": CANARY[::-1]}
    (cwd / "home").mkdir(exist_ok=True)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(plan)],
        cwd=cwd,
        env={**kept, **home, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return Trained(done, time.monotonic() - began)


def offline_records(run_directory):
    """The records of the only offline run below a run's directory, read with wandb's own protocol."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run_directory.glob("wandb/offline-run-*/run-*.wandb")
    for payload in transaction_log(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        yield record


def transaction_log(data, block_bytes=32768):
    """The payloads of a LevelDB-style log: a 7-byte file header, then blocks of (crc, length, kind, part)."""
    assert data[:4] == b":W&B"
    position, parts = 7, b""
    while position + 7 <= len(data):
        if block_bytes - position % block_bytes < 7:
            position += block_bytes - position % block_bytes
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += 7 + length
        parts += data[position - length : position]
        if kind in (1, 4):  # whole, last
            yield parts
            parts = b""


def history_of(records):
    """Per logged row, name -> value."""
    return [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """Two runs, one after the other in one process, without a key and without a terminal."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("offline")
    Image.new("RGB", (4, 3)).save(folder / "picture.png")
    return train(folder, {"steps": 20, "jobs": 2, "picture": str(folder / "picture.png")})


@pytest.mark.slow
def test_without_a_key_and_a_terminal_the_run_is_tracked_offline(offline):
    assert offline.code == 0, offline.err
    assert offline.err == "", "wandb says nothing by itself"
    assert offline.warnings == []
    assert f"tracker offline: {NO_KEY}" in offline.out
    assert f"wandb sync {offline.dirs[0]}/wandb/offline-run-*" in offline.out


@pytest.mark.slow
def test_the_offline_file_holds_config_losses_accuracy_and_loss_scale(offline):
    for job, directory in enumerate(offline.dirs):
        records = list(offline_records(directory))
        run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
        config = {update.key: json.loads(update.value_json) for update in run.config.update}
        assert config["model"]["name"] == "resnet18"
        assert config["model"]["stem"] == "small"
        assert config["optim"]["lr"] == 1e-3
        assert (run.project, run.run_group, list(run.tags)) == ("launcher", "g", ["a"])
        rows = history_of(records)
        steps = [row for row in rows if "train/loss" in row]
        assert [row["step"] for row in steps] == list(range(1, 21))
        assert [row["train/loss"] for row in steps] == [job + 1 / step for step in range(1, 21)]
        assert [row["scale/value"] for row in steps] == [65536.0 / step for step in range(1, 21)]
        assert [row["eval/accuracy"] for row in rows if "eval/accuracy" in row] == [0.975]
        assert [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [0]


def test_curves_are_drawn_over_the_logged_step(offline):
    records = offline_records(offline.dirs[0])
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    over_step = {metric.glob_name for metric in metrics if metric.step_metric == "step"}
    assert {"train/*", "scale/*", "eval/*", "time/*", "gpu/*", "gradients/*"} <= over_step


def test_what_was_shown_is_in_the_file(offline):
    """Histogram, text, picture, tables and GPU; each with the step at which it was logged."""
    rows = history_of(offline_records(offline.dirs[0]))
    found = {name: value for row in rows for name, value in row.items()}
    assert found["gradients/exponents._type"] == "histogram"
    assert found["gradients/exponents.values"] == [1, 2, 3]
    assert found["gradients/exponents.bins"] == [-24, -23, -22, -21]
    assert (found["gradients/zero_share"], found["gpu/0/power_w"]) == (0.5, 300.0)
    assert found["after_evaluation/width"] == 3
    files = Path(next(offline.dirs[0].glob("wandb/offline-run-*/files")))
    assert "&lt;b&gt;" in (files / found["after_evaluation/sample.path"]).read_text()
    assert (found["after_evaluation/image.width"], found["after_evaluation/image.height"]) == (4, 3)
    assert "a report" in (files / found["eval/classification_report.path"]).read_text()
    table = read_json(files / found["eval/classes.path"])
    assert table["columns"] == ["class", "precision", "support"]
    assert table["data"] == [["a", 1.0, 3], ["b", 0.5, 2]]
    (path,) = [found[name] for name in found if "confusion_matrix" in name and name.endswith(".path")]
    cells = [["a", "a", 3], ["a", "b", 0], ["b", "a", 1], ["b", "b", 1]]
    assert read_json(files / path)["data"] == cells
    assert all("step" in row for row in rows)


def test_wandb_records_host_and_packages_as_in_any_script(offline):
    records = list(offline_records(offline.dirs[0]))
    assert any(r.environment.host for r in records if r.WhichOneof("record_type") == "environment")
    assert list(offline.dirs[0].glob("wandb/offline-run-*/files/requirements.txt"))


@pytest.mark.parametrize(
    ("state", "code"), [pytest.param("diverged", 5, marks=pytest.mark.slow), ("preempted", 75)]
)
def test_wandb_gets_the_exit_code_of_the_run(tmp_path, state, code):
    trained = train(tmp_path, {"steps": 1, "end": [state, code]})
    records = list(offline_records(trained.dirs[0]))
    assert [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [code]
    assert any(r.WhichOneof("record_type") == "preempting" for r in records) == (state == "preempted")


def test_each_job_is_a_run_of_its_own_and_nothing_is_left_behind(offline):
    names = [next(directory.glob("wandb/offline-run-*")).name for directory in offline.dirs]
    assert len({name.rpartition("-")[2] for name in names}) == 2
    assert services_below(offline.dirs[0].parents[3]) == [], "wandb has ended its process"
    assert not (offline.dirs[0].parents[3] / "wandb").exists(), "nothing in the current directory"


def files_with(directory, needle):
    found = [path for path in directory.rglob("*") if path.is_file() and needle in path.read_bytes()]
    assert any(directory.rglob("*.wandb"))
    return found


@pytest.mark.parametrize("mode", [pytest.param("offline", marks=pytest.mark.slow), "online"])
def test_secrets_are_in_no_file(tmp_path, mode):
    """The canaries are the key and an unused variable."""
    with Server(lambda line: None) as server:
        trained = train(
            tmp_path,
            {"steps": 3, "patience": [1.0, 1.0]},
            WANDB_API_KEY=CANARY,
            WANDB_MODE=mode,
            WANDB_BASE_URL=server.url,
        )
    assert trained.code == 0, trained.err
    assert f"tracker {mode}" in trained.out
    if mode == "online":
        assert any(b"graphql" in request for request in server.requests), "it did try"
    for secret in (CANARY, CANARY[::-1]):
        assert files_with(trained.dirs[0], secret.encode()) == []
        assert secret not in trained.out + trained.err


@pytest.mark.slow
@pytest.mark.parametrize("listens", [True, False])
def test_a_server_that_does_not_answer_ends_in_an_offline_run_with_one_warning(tmp_path, listens):
    with Server(lambda line: None) as server:
        url = server.url if listens else f"http://127.0.0.1:{closed_port()}"
        trained = train(
            tmp_path, {"steps": 5, "patience": [2.0, 6.0]}, WANDB_API_KEY=CANARY, WANDB_BASE_URL=url
        )
    assert trained.code == 0, trained.err
    assert len(trained.warnings) == 1
    assert "wandb could not start online" in trained.warnings[0]
    assert "wandb sync" in trained.warnings[0]
    assert trained.said["slowest_s"] < at_most(0.5)
    assert trained.said["closing_s"][0] < at_most(6)
    assert trained.seconds < at_most(15)
    rows = history_of(offline_records(trained.dirs[0]))
    assert len([row for row in rows if "train/loss" in row]) == 5, "nothing that was logged meanwhile is lost"


@pytest.mark.slow
def test_a_killed_run_has_its_rows_on_disk_and_takes_its_service_with_it(tmp_path):
    """Within seconds of their logging: wandb by itself would write them after 15 s or 32 kB."""
    trained = train(tmp_path, {"steps": 5, "die": "eval/accuracy"})
    assert trained.code == -9
    (path,) = tmp_path.rglob("run-*.wandb")
    rows = history_of(offline_records(path.parents[2]))
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5]
    until = time.monotonic() + 30
    while services_below(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert services_below(tmp_path) == []


def services_below(directory):
    """wandb services that work in the directory, whoever their parent is by now."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd") == str(directory) and "wandb" in (process / "comm").read_text():
                found.append(process.name)
    return found
