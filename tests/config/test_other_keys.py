"""What people type who know another program is answered with what does the same here, and that is tried."""

from __future__ import annotations

import re

import pytest

from launcher.config.composition import Request
from launcher.config.other_keys import KEYS, PRECISIONS, SENTENCES, advice_for
from launcher.config.resolve import compose_jobs
from launcher.errors import ConfigError

SAMPLES = {"schedule": "cosine", "optim": "adamw", "tracker": "none", "schedule.warmup_fraction": "0.1"}
SAMPLES |= {
    "train.compile": "true",
    "train.activation_checkpointing": "true",
    "train.label_smoothing": "0.1",
    "checkpoint.resume": "true",
    "run.dir": "x",
}
WORDS = [(override, word) for override, words in KEYS.items() for word in words.split()]
SAID = [word for words in SENTENCES.values() for word in words.split()]


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        compose_jobs(Request(("recipe=resnet18", *overrides)))
    return str(refused.value)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("override", "word"), WORDS)
def test_the_override_that_is_advised_is_accepted(override: str, word: str) -> None:
    value = SAMPLES.get(override.partition("=")[0], "true" if override.startswith("precision") else "2")
    told = problem(f"{word}={value}")
    assert told.startswith(f"{word}={value}: there is no such key. Write ")
    advised = told.rpartition("Write ")[2].removesuffix(".")
    assert advised == override.format(value=value)
    compose_jobs(Request(("recipe=resnet18", advised)))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("word", SAID)
def test_a_word_without_a_single_key_is_answered_by_a_sentence_with_the_keys(word: str) -> None:
    told = problem(f"{word}=4")
    keys = re.findall(
        r"(data\.batch_size|data\.micro_batch_size|schedule\.warmup_fraction|launch\.nproc)", told
    )
    assert keys
    assert "Nearest" not in told
    for advised in re.findall(r"Write (\S+=4)\b", told):
        compose_jobs(Request(("recipe=resnet18", advised)))


@pytest.mark.parametrize(("theirs", "ours"), PRECISIONS.items())
def test_a_precision_of_another_program_has_its_name_here(theirs: str, ours: str) -> None:
    assert f"Write precision={ours}." in problem(f"precision={theirs}")
    (config,) = compose_jobs(Request(("recipe=resnet18", f"precision={ours}")))
    assert config.precision.name == ours


def test_the_key_that_was_typed_is_not_advised() -> None:
    assert advice_for("data.num_workers", "2") == ""


def test_what_is_off_is_fp32_and_a_section_of_another_program_is_left_out() -> None:
    assert "Write precision=fp32." in problem("fp16=false")
    assert "Write precision=amp_fp16." in problem("mixed_precision=16-mixed")
    assert "Write precision=bf16." in problem("mixed_precision=bf16")
    assert "Write train.epochs=3." in problem("trainer.max_epochs=3")


@pytest.mark.parametrize(("typed", "resume"), [("true", "auto"), ("false", "never")])
def test_resume_takes_true_and_false(typed: str, resume: str) -> None:
    (config,) = compose_jobs(Request(("recipe=resnet18", f"checkpoint.resume={typed}")))
    assert config.checkpoint.resume == resume


def test_a_tuple_of_python_is_answered_with_a_list_that_is_accepted() -> None:
    told = problem("optim=adamw", "optim.betas=(0.9,0.95)")
    advised = re.findall(r"'(.*)'", told)[-1]
    (config,) = compose_jobs(Request(("recipe=resnet18", "optim=adamw", advised)))
    assert config.optim.options["betas"] == [0.9, 0.95]
