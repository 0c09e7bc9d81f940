"""Values of the environment: used where the user asks, never published."""

from __future__ import annotations

import pytest
import yaml

from launcher.config.composition import Request
from launcher.config.resolve import compose_jobs
from launcher.config.schema import Config, from_dict, to_dict
from launcher.run_dir.records import config_yaml
from tests.config.test_composition import OWN_RECIPE, own_tree, problems

CANARY = "canary-value-of-the-environment"


def composed(*overrides: str, **settings) -> Config:
    (config,) = compose_jobs(Request(("recipe=resnet18", *overrides), **settings))
    return config


@pytest.mark.parametrize(
    ("override", "value", "read"),
    [
        ("tracker.group=${oc.env:MINE}", CANARY, CANARY),
        ("tracker.group=${oc.env:MINE}", "${seed}", "${seed}"),
        ("tracker.group='${oc.env:MINE, other}'", None, "other"),
        ("tracker.group=${oc.env:MINE}", "3", "3"),
        ("train.max_steps=${oc.env:MINE}", "2", 2),
        ("optim.lr=${oc.env:MINE}", "1e-3", 1e-3),
        ("train.deterministic=${oc.env:MINE}", "true", True),
        ("seed='${oc.decode:${oc.env:MINE}}'", "3", 3),
        ('data.share="${oc.decode:${oc.env:MINE}}"', "[0.25,0.75]", [0.25, 0.75]),
        ("train.max_steps=${oc.env:MINE,null}", None, None),
    ],
)
def test_a_variable_has_the_type_of_its_key(monkeypatch, override, value, read) -> None:
    if value is not None:
        monkeypatch.setenv("MINE", value)
    config = composed(override)
    section, _, key = override.partition("=")[0].partition(".")
    used = getattr(config, section)
    used = getattr(used, key) if key else used
    assert (used, type(used)) == (read, type(read))
    assert from_dict(to_dict(config)) == config


def test_a_variable_in_a_file_has_the_type_of_its_key(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MINE", "2")
    train = "train: {max_steps: '${oc.env:MINE}', epochs: '${oc.decode:${oc.env:MINE}}'}\n"
    tree = own_tree(tmp_path, f"{OWN_RECIPE}{train}tracker: {{group: '${{oc.env:MINE}}'}}\n")
    (config,) = compose_jobs(Request(("recipe=mine",), config_dir=tree))
    assert (config.train.max_steps, config.train.epochs, config.tracker.group) == (2, 2, "2")


def test_a_variable_that_is_no_number_is_refused_where_one_is_needed(monkeypatch) -> None:
    monkeypatch.setenv("MINE", "two")
    text = problems("recipe=resnet18", "train.max_steps=${oc.env:MINE}")
    assert text.startswith("train.max_steps=two: must be ")


def test_the_files_of_a_run_have_the_value(monkeypatch) -> None:
    monkeypatch.setenv("MINE", CANARY)
    config = composed("tracker.group=${oc.env:MINE}", "tracker.run_name=run-${tracker.group}")
    assert config.tracker.run_name == f"run-{CANARY}"
    assert yaml.safe_load(config_yaml(config))["tracker"]["group"] == CANARY


def test_a_variable_that_is_not_set_is_named_with_its_key(monkeypatch) -> None:
    monkeypatch.delenv("MINE", raising=False)
    text = problems("recipe=resnet18", "seed=${oc.env:MINE}")
    assert text.startswith("seed: ")
    assert "'MINE' not found" in text


@pytest.mark.parametrize("override", ["seed=${oc.env:A},${oc.env:B}", "tracker.group=a,${oc.env:A}"])
def test_a_swept_value_does_not_come_from_the_environment(monkeypatch, override) -> None:
    monkeypatch.setenv("A", CANARY)
    monkeypatch.setenv("B", CANARY)
    text = problems("recipe=resnet18", override, multirun=True)
    assert "a swept value cannot be ${oc.env:...}" in text
    assert CANARY not in text
