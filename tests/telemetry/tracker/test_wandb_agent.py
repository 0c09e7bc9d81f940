"""Values of wandb's agent, written and read by wandb's and Hydra's own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args
from wandb.sdk.lib.config_util import save_config_file_from_dict

from launcher.config.messages import literal
from launcher.errors import ConfigError
from launcher.telemetry.tracker.wandb_agent import refuse_sweep, sweep_of_agent, with_typed_values

FORMS = ("args_no_hyphens", "args_append_hydra", "args_override_hydra", "args")
VALUES = {
    "optim.clip_norm": None,
    "train.compile": False,
    "train.deterministic": True,
    "seed": 3,
    "optim.lr": 1e-05,
    "optim.weight_decay": "5e-4",
    "recipe": "resnet18",
    "tracker.run_name": 'it\'s [a] {b: c}, "d"=\\e, null',
    "tracker.notes": "null",
    "tracker.tags": ["a b", "c,d", "true"],
    "optim.groups": [{"match": ["fc.*", "*.bias"], "lr_scale": 10, "frozen": False}],
    "data": {"batch_size": 8, "augment": {"scale": 0.2, "crop": None}},
    "model.options": {},
}
READ = {
    **{key: value for key, value in VALUES.items() if key != "data"},
    "optim.weight_decay": 5e-4,  # YAML reads what was meant as a number as text
    "data.batch_size": 8,
    "data.augment.scale": 0.2,
    "data.augment.crop": None,
}


def agents_words(directory: Path, form: str, values: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """What the agent writes on the command line, and the variables that it sets."""
    # Values reach the agent as JSON.
    args = json.loads(json.dumps({key: {"value": value} for key, value in values.items()}))
    file = directory / "config-run.yaml"
    save_config_file_from_dict(str(file), args)
    words: list[str] = create_sweep_command_args({"args": args})[form]
    return words, {"WANDB_SWEEP_ID": "s1", "WANDB_SWEEP_PARAM_PATH": str(file)}


def read(words: list[str]) -> dict[str, Any]:
    parsed = OverridesParser.create().parse_overrides(words)
    assert not any(override.is_sweep_override() for override in parsed)
    return {override.key_or_group: override.value() for override in parsed}


@pytest.mark.parametrize("form", FORMS)
def test_every_type_of_value_arrives_as_it_was_chosen(form: str, tmp_path: Path) -> None:
    words, environ = agents_words(tmp_path, form, VALUES)
    found = with_typed_values(["tracker=none", *words, "-c", "job"], environ)
    assert (found[0], found[-2:]) == ("tracker=none", ["-c", "job"])
    assert read(found[:-2]) == {"tracker": "none"} | READ
    assert {key: type(value) for key, value in read(found[1:-2]).items()} == {
        key: type(value) for key, value in READ.items()
    }


# 1e-3 is the exception: see above.
TEXTS = st.text(max_size=9).map(lambda text: f"{text} " if "e" in text.lower() else text)


@given(TEXTS | st.floats(allow_nan=False) | st.integers() | st.lists(TEXTS, max_size=3))
def test_hydra_reads_the_literal_of_a_value_as_that_value(value: Any) -> None:
    found = OverridesParser.create().parse_override(f"key={literal(value)}").value()
    assert found == value
    assert type(found) is type(value)


def test_without_an_agent_words_stay_as_they_are(tmp_path: Path) -> None:
    words, environ = agents_words(tmp_path, FORMS[0], VALUES)
    assert with_typed_values(words, {"WANDB_SWEEP_ID": "s1"}) == words
    refuse_sweep({})
    assert sweep_of_agent(environ) == "s1"


def test_a_sweep_within_a_sweep_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_sweep({"WANDB_SWEEP_ID": "s1", "WANDB_SWEEP_PARAM_PATH": "file"})
    assert "-m under wandb agent (sweep s1)" in str(caught.value)
