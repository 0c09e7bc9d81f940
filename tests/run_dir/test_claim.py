"""The directory of a run: distinct, held by one process at a time, gone on with by the same run only."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launcher.config.schema import Config
from launcher.errors import ConfigError, StorageError
from launcher.run_dir import differences, records
from launcher.run_dir.claim import open_run_dir
from launcher.run_dir.discarding import overrides_to_resume, record_discarded
from tests.run_dir.test_records import sample_config


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Default directories go below the current one."""
    monkeypatch.chdir(tmp_path)


def prepared(config: Config, overrides: Sequence[str]) -> Config:
    """The config with its directory, which is let go again at once."""
    with open_run_dir(config, overrides) as (claimed, _):
        return claimed


def test_a_run_without_a_place_gets_a_new_one_below_its_recipe(tmp_path):
    first = Path(prepared(sample_config(), []).run.dir)
    second = Path(prepared(sample_config(), []).run.dir)
    assert first != second
    assert first.is_absolute()
    assert first.parent == second.parent == tmp_path / "outputs" / "resnet18"
    assert time.strptime(first.name[:-5], "%Y%m%d-%H%M%S")
    assert int(first.name[-4:], 16) >= 0


START = """
import os, sys, time
from pathlib import Path
from launcher.config.schema import from_dict
from launcher.errors import ConfigError
from launcher.run_dir.claim import open_run_dir
from launcher.telemetry.event_log import EventLog
from tests.run_dir.test_records import sample_config
print("ready", flush=True)
sys.stdin.read()
try:
    with open_run_dir(sample_config(sys.argv[1]), []) as (config, _):
        print(config.run.dir, flush=True)
        end = time.monotonic() + 60
        while sys.argv[1] and len(list(Path().glob("refused-*"))) < 2 and time.monotonic() < end:
            time.sleep(0.01)
except ConfigError as error:
    print("refused:", error)
    Path(f"refused-{os.getpid()}").touch()
"""


@pytest.mark.parametrize(
    ("directory", "num_distinct"), [pytest.param("", 3, marks=pytest.mark.slow), ("mine", 1)]
)
def test_three_processes_at_once_in_one_folder(tmp_path, directory, num_distinct):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", START, directory]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) for _ in range(3)]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.close()
        process.stdin = None
    answers = [process.communicate(timeout=100)[0].strip() for process in started]
    made = {answer for answer in answers if not answer.startswith("refused:")}
    assert len(made) == num_distinct
    assert sum(answer.startswith("refused:") for answer in answers) == 3 - num_distinct


@pytest.mark.parametrize("left", ["config.yaml", "status.json"])
def test_files_of_somebody_else_are_not_written_over(tmp_path, left):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / left).write_text("mine")
    with pytest.raises(
        ConfigError, match=f"holds no run, and files that one would write over: {left}"
    ) as refusal:
        prepared(sample_config(str(tmp_path / "old")), [])
    assert refusal.value.exit_code == 2
    assert [file.name for file in (tmp_path / "old").iterdir()] == [left]
    assert (tmp_path / "old" / left).read_text() == "mine"


def test_a_run_without_its_config_is_resumed_from_its_checkpoints(tmp_path):
    """They say themselves of which run they are."""
    config = sample_config(str(tmp_path / "mine"))
    prepared(config, ["seed=0"])
    (tmp_path / "mine" / "config.yaml").unlink()
    (tmp_path / "mine" / "checkpoints" / "step-00000005").mkdir(parents=True)
    prepared(config, ["seed=0"])
    assert (tmp_path / "mine" / "config.yaml").exists()
    (tmp_path / "mine" / "status.json").unlink()  # as by a disk that was full
    prepared(config, ["seed=0"])


def two_epochs(directory: Path) -> Config:
    config = sample_config(str(directory))
    return replace(config, train=replace(config.train, epochs=2))


def leave_result(directory: Path, **values: object) -> None:
    result = {"state": "done", "steps": 20, "steps_per_epoch": 10, "metric_name": "accuracy", "metric": 0.5}
    (directory / "result.json").write_text(json.dumps(result | values))


def test_the_same_run_is_gone_on_with_and_described_anew(tmp_path):
    config = sample_config(str(tmp_path / "mine"))
    prepared(config, ["seed=0"])
    faster = replace(config, optim=replace(config.optim, lr=0.5))
    with open_run_dir(faster, ["optim.lr=0.5"]) as (_, finished):
        assert finished == ""
    assert "lr: 0.5" in (tmp_path / "mine" / "config.yaml").read_text()
    assert (tmp_path / "mine" / "overrides.txt").read_text() == "optim.lr=0.5\n"


@pytest.mark.parametrize(
    ("state", "steps", "done"), [("done", 20, True), ("done", 19, False), ("failed", 20, False)]
)
def test_a_run_is_finished_when_it_has_the_steps_that_are_asked_for(tmp_path, state, steps, done):
    config = two_epochs(tmp_path / "mine")
    prepared(config, [])
    leave_result(tmp_path / "mine", state=state, steps=steps)
    before = (tmp_path / "mine" / "status.json").read_bytes()
    with open_run_dir(config, []) as (_, finished):
        assert bool(finished) == done
        if done:
            assert "20 steps: accuracy 0.5" in finished
            assert (tmp_path / "mine" / "status.json").read_bytes() == before


def test_a_finished_run_goes_on_where_more_epochs_are_asked_for(tmp_path):
    config = two_epochs(tmp_path / "mine")
    prepared(config, [])
    leave_result(tmp_path / "mine")
    with open_run_dir(replace(config, train=replace(config.train, epochs=3)), []) as (_, finished):
        assert finished == ""
    with open_run_dir(replace(config, train=replace(config.train, epochs=3, max_steps=20)), []) as (
        _,
        finished,
    ):
        assert finished


def test_a_finished_run_that_was_trained_otherwise_is_named_with_what_differs(tmp_path):
    config = two_epochs(tmp_path / "mine")
    prepared(config, [])
    leave_result(tmp_path / "mine")
    before = (tmp_path / "mine" / "config.yaml").read_bytes()
    other = replace(
        config,
        optim=replace(config.optim, lr=0.5),
        data=replace(config.data, options=config.data.options | {"crop": 3}),
        train=replace(config.train, tf32=not config.train.tf32),
    )
    with pytest.raises(
        ConfigError, match=r"done, after 20 steps: accuracy 0\.5\..* other settings"
    ) as refusal:
        prepared(other, [])
    text = str(refusal.value)
    assert f"optim.lr is {config.optim.lr} there and 0.5 here" in text
    assert "data.crop is missing there and 3 here" in text
    assert "train.tf32 is true there and false here" in text
    assert "To train longer, raise train.epochs." in text
    many = {f"augment_{place}": place for place in range(1, 7)}
    data = replace(other.data, options=other.data.options | many)
    with pytest.raises(
        ConfigError, match=r"; data\.augment_\d is missing there and \d here and 1 more\. To train"
    ):
        prepared(replace(other, data=data), [])
    assert (tmp_path / "mine" / "config.yaml").read_bytes() == before
    with open_run_dir(replace(other, train=replace(other.train, epochs=3)), []) as (_, finished):
        assert finished == "", "as before, a run that is not done resumes with other settings"


def test_settings_without_a_part_in_training_leave_a_finished_run_done(tmp_path):
    config = two_epochs(tmp_path / "mine")
    prepared(config, [])
    leave_result(tmp_path / "mine")
    tree = (tmp_path / "mine" / "config.yaml").read_text()
    (tmp_path / "mine" / "config.yaml").write_text(
        tree.replace("  micro_batch_size: null", "  micro_batch_size: 4")
    )
    fewer = replace(
        config.train,
        epochs=1,
        log_every_steps=3,
        compile=True,
        activation_checkpointing=True,
        eval_every_steps=7,
    )
    data, launch = replace(config.data, num_workers=7), replace(config.launch, nproc=2, log_level="debug")
    with open_run_dir(replace(config, train=fewer, data=data, launch=launch), []) as (_, finished):
        assert "the run is done, after 20 steps" in finished


def test_every_section_of_the_config_either_has_a_part_in_training_or_none():
    """A new section or key is to be decided on: see launcher/run_dir/differences.py."""
    sections = set(yaml.safe_load(records.config_yaml(sample_config())))
    learned_from = {"seed", "recipe", "train", "schedule", "reduce_lr_on_plateau", "ema", "optim", "model"}
    learned_from |= {"data", "precision", "ddp"}
    assert sections == learned_from | set(differences.OTHER_SECTIONS)


def trained(config: Config, *overrides: str) -> Path:
    """The directory of a run that has written a checkpoint."""
    directory = Path(prepared(config, overrides).run.dir)
    (directory / "checkpoints" / "step-00000001").mkdir(parents=True)
    return directory


def test_another_run_is_refused_and_nothing_of_it_changed(tmp_path):
    config = sample_config(str(tmp_path / "mine"))
    mine = trained(config, "seed=0")
    before = (mine / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"holds another run: seed is 0 there and 4 here.*overrides\.txt"):
        prepared(replace(config, seed=4), [])
    other = replace(config, seed=4, optim=replace(config.optim, lr=0.5))
    lr = f"optim.lr is {config.optim.lr} there and 0.5 here"
    with pytest.raises(ConfigError, match=rf"another run: seed is 0 there and 4 here; {lr}\. Give the over"):
        prepared(other, [])
    assert (mine / "config.yaml").read_bytes() == before
    assert (mine / "overrides.txt").read_text() == "seed=0\n"


def test_the_refusal_names_the_command_that_begins_anew(tmp_path):
    config = sample_config(str(tmp_path / "mine"))
    mine = trained(config)
    with pytest.raises(ConfigError, match=r"from the beginning there: .* with checkpoint\.resume=never"):
        prepared(replace(config, seed=4), [])
    (mine / "result.json").write_text("{}")
    anew = replace(config, seed=4, checkpoint=replace(config.checkpoint, resume="never"))
    assert prepared(anew, ["seed=4"]).checkpoint.resume == "never"
    assert (mine / "overrides.txt").read_text() == "seed=4\n"
    assert not (mine / "result.json").exists()


@pytest.mark.parametrize("count", ["SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"])
@pytest.mark.parametrize("resume", ["never", "link/checkpoints/step-00000001"])
def test_a_restarted_command_begins_anew_until_it_has_set_the_checkpoints_aside(
    tmp_path, monkeypatch, count, resume
):
    mine = trained(sample_config(str(tmp_path / "mine")))
    (tmp_path / "link").symlink_to(mine)
    config = sample_config(str(tmp_path / "link"))
    resume = resume if resume == "never" else str((tmp_path / resume).resolve())  # as it is composed
    anew = replace(config, checkpoint=replace(config.checkpoint, resume=resume))
    record_discarded(mine)
    assert prepared(anew, []).checkpoint.resume == resume, "by an earlier command"
    monkeypatch.setenv(count, "1")
    assert prepared(anew, []).checkpoint.resume == resume, "killed before it had read a checkpoint"
    record_discarded(mine)
    for _ in range(2):
        assert prepared(anew, []).checkpoint.resume == "auto"


def test_the_overrides_that_resume_a_run_undo_its_order_to_begin_anew(tmp_path):
    """Once it has: before that the same command begins where the user said."""
    assert overrides_to_resume(tmp_path) == f"run.dir={tmp_path}"
    record_discarded(tmp_path)
    assert overrides_to_resume(tmp_path) == f"run.dir={tmp_path} checkpoint.resume=auto"


@pytest.mark.parametrize("name", ["result.json", "report.html"])
def test_a_directory_with_files_that_a_run_would_write_over_is_refused_and_left_as_it_is(tmp_path, name):
    place = tmp_path / "mine" / name
    place.parent.mkdir(parents=True)
    place.write_text("keep")
    (tmp_path / "mine" / "train.py").touch()
    before = set(os.listdir(tmp_path / "mine"))
    with pytest.raises(ConfigError, match=f"that one would write over: {place.name}. Give a new name"):
        prepared(sample_config(str(tmp_path / "mine")), [])
    assert set(os.listdir(tmp_path / "mine")) == before


@pytest.mark.parametrize(
    "left", [[], ["notes.txt", "slurm-12.out"], [".lock", "logs", ".config.yaml.abcd.tmp"]]
)
def test_a_directory_without_such_files_may_become_a_run(tmp_path, left):
    (tmp_path / "mine").mkdir()
    for name in left:
        (tmp_path / "mine" / name).mkdir() if name in ("logs",) else (tmp_path / "mine" / name).touch()
    assert prepared(sample_config(str(tmp_path / "mine")), []).run.dir == str(tmp_path / "mine")


def test_a_run_may_hold_files_of_its_recipe_and_be_reached_by_a_link(tmp_path):
    prepared(sample_config(str(tmp_path / "mine")), [])
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert prepared(sample_config(str(tmp_path / "link")), []).run.dir == str(tmp_path / "link")


def test_a_file_is_no_directory_of_a_run(tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ConfigError, match="mine is a file"):
        prepared(sample_config(str(tmp_path / "mine")), [])
    assert (tmp_path / "mine").read_text() == "keep"


@pytest.mark.parametrize("place", ["/dev/null/run", "/proc/no-such-place/run"])
def test_a_place_that_cannot_be_written_is_named_with_the_cause(place):
    with pytest.raises(StorageError) as refusal:
        prepared(sample_config(place), [])
    assert refusal.value.exit_code == 8
    assert place in str(refusal.value)
    assert "Not a directory" in str(refusal.value) or "No such file" in str(refusal.value)
    assert "run.dir=DIR" in str(refusal.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only directory")
def test_a_read_only_directory_is_a_storage_error(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(StorageError, match="Permission denied"):
        prepared(sample_config(str(tmp_path / "locked" / "run")), [])
