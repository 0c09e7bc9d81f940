"""Trackers besides wandb: what their own readers find in what they wrote."""

from __future__ import annotations

import csv
import importlib.util
import re
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.config.schema import Config
from launcher.errors import ConfigError
from launcher.telemetry.event_log import read_events
from launcher.telemetry.tracker import ConfusionMatrix, Histogram, Picture, RunInfo, Table, Text, Tracker
from launcher.telemetry.tracker.registry import make, refuse_unknown
from tests.configs import composed
from tests.forked import launch_forked
from tests.telemetry.tracker.tiny import RECIPE, YAML

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "launcher" / "telemetry" / "README.md").read_text()
OWN = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S) if "@tracker" in code)


def config_with(*names: str) -> Config:
    return composed("tracker.name=[" + ",".join(names) + "]")


def write_all(made: Tracker, folder: Path) -> None:
    from PIL import Image

    Image.new("RGB", (4, 3)).save(folder / "picture.png")
    config = {"optim": {"lr": 0.1}, "git": {"commit": "c0ffee"}}
    run = RunInfo(folder, "a name", "an-id", "a project", config, notes="some notes")
    made.start(run)
    made.log(1, {"train/loss": 0.5, "scale/value": 65536, "scale/overflow_ranks": "0, 1"})
    made.log(2, {"train/loss": 0.25})
    made.media(2, "eval/classification_report", Text("a report"))
    made.media(2, "gradients/exponents", Histogram([1, 2, 3], [-3, -2, -1, 0]))
    made.media(2, "after_evaluation/picture", Picture(str(folder / "picture.png")))
    made.media(2, "eval/classes", Table(("class", "f1"), [("a|b", 1.0)]))
    made.media(2, "eval/confusion_matrix", ConfusionMatrix(["a", "b"], [[3, 0], [1, 1]]))
    made.finish(0)


def test_event_files_are_what_tensorboard_reads(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_all(make("tensorboard"), tmp_path)
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]
    assert found.Scalars("scale/value")[0].value == 65536
    (histogram,) = found.Histograms("gradients/exponents")
    assert list(histogram.histogram_value.bucket) == [1, 2, 3]
    assert list(histogram.histogram_value.bucket_limit) == [-2, -1, 0]
    (picture,) = found.Images("after_evaluation/picture")
    assert (picture.width, picture.height) == (4, 3)
    assert picture.encoded_image_string == (tmp_path / "picture.png").read_bytes()

    def text(name: str) -> str:
        (event,) = found.Tensors(f"{name}/text_summary")
        return event.tensor_proto.string_val[0].decode()

    assert "a report" in text("eval/classification_report")
    assert "c0ffee" in text("config")
    assert "some notes" in text("notes")


@pytest.mark.slow
def test_the_tracker_of_the_readme_runs_beside_the_others(tmp_path: Path) -> None:
    """As its lines stand, in a whole run with three trackers at once."""
    pytest.importorskip("tensorboard")
    assert len(OWN.splitlines()) <= 25
    (tmp_path / "own" / "recipe").mkdir(parents=True)
    (tmp_path / "own" / "recipe" / "tiny.yaml").write_text(YAML)
    (tmp_path / "mine.py").write_text(RECIPE + OWN)
    words = ["recipe=tiny", "recipes.path=mine.py", "--config-dir", "own", "train.max_steps=2", "run.dir=run"]
    names = "tracker.name=[csv,tensorboard,wandb]"
    done = launch_forked(tmp_path, [*words, names, "train.log_every_steps=1"], HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout
    events = read_events(tmp_path / "run" / "metrics.jsonl")
    found = [each["text"] for each in events if each["event"] == "decision" and each["topic"] == "tracker"]
    assert found[:2] == ["csv", f"tensorboard in {tmp_path}/run/trackers/tensorboard"]
    with (tmp_path / "run" / "trackers" / "csv" / "values.csv").open() as file:
        lines = list(csv.reader(file))
    assert [step for step, name, _ in lines if name == "train/loss"] == ["1", "2"]
    assert list((tmp_path / "run" / "trackers" / "tensorboard").glob("events.out.*"))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


def test_unknown_trackers_are_refused_with_the_nearest_names(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tracker\.name=tensorbord: must be one of .* Nearest: tensorboard"
    ):
        refuse_unknown(config_with("wandb", "tensorbord").tracker)
    (tmp_path / "mine.py").write_text("for name in ():\n    tracker(name)\n")
    config = composed("tracker.name=mine", f"recipes.path={tmp_path}/mine.py")
    with pytest.raises(ConfigError, match=r'registers with @tracker\("mine"\)'):
        refuse_unknown(config.tracker)


def test_a_missing_package_is_found_before_the_first_job_of_a_sweep(monkeypatch, tmp_path, capsys) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name)
    )
    monkeypatch.chdir(tmp_path)
    assert main(["recipe=resnet18", "data=synthetic", "tracker=none,tensorboard", "--multirun"]) == 2
    assert "pip install tensorboard" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
