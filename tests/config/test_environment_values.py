"""Values of the environment: used where the user asks, never published."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from launcher.config.composition import Request
from launcher.config.resolve import compose_jobs
from launcher.config.schema import Config, from_dict, to_dict
from launcher.run_dir.records import config_yaml
from tests.config.test_composition import OWN_RECIPE, own_tree, problems
from tests.forked import launch_forked
from tests.process.test_shortage import RECIPE, YAML
from tests.telemetry.tracker.test_wandb_session import offline_records

CANARY = "canary-value-of-the-environment"


def composed(*overrides: str, **settings) -> Config:
    (config,) = compose_jobs(Request(("recipe=resnet18", *overrides), **settings))
    return config


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("override", "value", "read", "recorded"),
    [
        ("tracker.group=${oc.env:MINE}", CANARY, CANARY, "${oc.env:MINE}"),
        ("tracker.group=a-${oc.env:MINE}-b", CANARY, f"a-{CANARY}-b", "a-${oc.env:MINE}-b"),
        ("tracker.group=${oc.env:MINE}", "3", "3", "${oc.env:MINE}"),
        ("tracker.group=${oc.env:MINE}", "${seed}", "${seed}", "${oc.env:MINE}"),
        ("tracker.group='${oc.env:MINE, other}'", None, "other", "${oc.env:MINE, other}"),
        ("tracker.tags=[a,'${oc.env:MINE}']", CANARY, ("a", CANARY), ["a", "${oc.env:MINE}"]),
        ("seed=${oc.env:MINE}", "3", 3, "${oc.env:MINE}"),
        ("seed=${oc.env:MINE,5}", None, 5, "${oc.env:MINE,5}"),
        ("optim.lr=${oc.env:MINE}", "1e-2", 0.01, "${oc.env:MINE}"),
        ("train.deterministic=${oc.env:MINE}", "true", True, "${oc.env:MINE}"),
        ("launch.nproc=${oc.env:MINE}", "auto", "auto", "${oc.env:MINE}"),
        ("train.max_steps=${oc.env:MINE,null}", None, None, "${oc.env:MINE,null}"),
    ],
)
def test_the_run_has_the_value_and_the_files_the_key(monkeypatch, override, value, read, recorded) -> None:
    if value is not None:
        monkeypatch.setenv("MINE", value)
    config = composed(override)
    section, _, key = override.partition("=")[0].partition(".")
    used = getattr(config, section)
    assert (getattr(used, key) if key else used) == read
    written = yaml.safe_load(config_yaml(config))
    assert (written[section][key] if key else written[section]) == recorded
    assert "from_environment" not in written
    assert from_dict(to_dict(config)) == config
    assert CANARY not in config_yaml(config)


def test_a_key_that_refers_to_another_one_is_recorded_by_the_variable_too(monkeypatch) -> None:
    monkeypatch.setenv("MINE", CANARY)
    config = composed("tracker.group=${oc.env:MINE}", "tracker.run_name=run-${tracker.group}")
    assert config.tracker.run_name == f"run-{CANARY}"
    assert CANARY not in config_yaml(config)


def test_a_model_of_ones_own_gets_a_number(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WIDTH", "64")
    text = OWN_RECIPE.replace("width: 32", "width: '${oc.env:WIDTH}'")
    (config,) = compose_jobs(Request(("recipe=mine",), own_tree(tmp_path, text)))
    assert config.model.options == {"width": 64}
    assert "${oc.env:WIDTH}" in config_yaml(config)


@pytest.mark.parametrize("override", ["seed=${oc.env:A},${oc.env:B}", "tracker.group=a,${oc.env:A}"])
def test_a_swept_value_does_not_come_from_the_environment(monkeypatch, override) -> None:
    monkeypatch.setenv("A", CANARY)
    monkeypatch.setenv("B", CANARY)
    text = problems("recipe=resnet18", override, multirun=True)
    assert "a swept value cannot be ${oc.env:...}" in text
    assert CANARY not in text


def run(directory: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (directory / "own" / "recipe").mkdir(parents=True, exist_ok=True)
    text = YAML + "tracker: {group: '${oc.env:MY_GROUP}', mode: offline}\n"
    (directory / "own" / "recipe" / "tiny.yaml").write_text(text)
    (directory / "mine.py").write_text(RECIPE.replace("{build}", "pass"))
    fixed = ["recipe=tiny", "recipes.path=mine.py", "--config-dir=own", "train.max_steps=2"]
    return launch_forked(directory, [*fixed, *words], HOME=str(directory), **environ)


@pytest.mark.slow
def test_the_value_is_in_no_file_but_where_it_is_used(tmp_path) -> None:
    """The group's name has to reach wandb as its group; its copy of the config has the key."""
    done = run(tmp_path, "run.dir=run", MY_GROUP=CANARY)
    assert done.returncode == 0, done.stderr
    found = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    holding = {file.name for file in found if CANARY.encode() in file.read_bytes()}
    assert all(name.endswith(".wandb") or name.startswith("debug") for name in holding)
    record = next(r.run for r in offline_records(tmp_path / "run") if r.WhichOneof("record_type") == "run")
    assert record.run_group == CANARY
    tracker = next(update.value_json for update in record.config.update if update.key == "tracker")
    assert "${oc.env:MY_GROUP}" in tracker
    assert CANARY not in tracker
    assert CANARY not in done.stdout + done.stderr
    again = run(tmp_path, "run.dir=run")
    assert again.returncode == 2
    assert "the environment variable MY_GROUP is not set" in again.stderr
