"""A key that is gone answers with what does the same now, on the command line and in a file."""

from __future__ import annotations

import pytest

from launcher.config import other_keys
from launcher.config.messages import unknown_key
from launcher.config.resolve import Request, compose_jobs
from launcher.config.schema import constraints
from launcher.errors import ConfigError


@pytest.mark.parametrize("path", ["old.key", "old.section.key"])
def test_a_removed_key_says_what_to_do_instead(monkeypatch, path):
    table = {"old.key": "Use new.key.", "old.section": "Use new.key."}
    monkeypatch.setattr(other_keys, "REMOVED_KEYS", table)
    assert unknown_key(f"{path}=1", path, ["old.keys"]) == f"{path}=1: this key is gone. Use new.key."


@pytest.mark.parametrize(
    ("path", "said"),
    [("old.key", "It is called new.key now."), ("old", "Its keys are called new.key, new.other now.")],
)
def test_a_renamed_key_or_section_says_what_it_is_called_now(monkeypatch, path, said):
    monkeypatch.setattr(other_keys, "RENAMED_KEYS", {"old.key": "new.key", "old.last": "new.other"})
    assert unknown_key(f"{path}=1", path, ["old.keys"]) == f"{path}=1: this key is gone. {said}"


@pytest.mark.parametrize("multirun", [False, True])
def test_a_setting_of_sweeps_that_is_gone_is_not_asked_for_a_sweep(multirun):
    for setting, said in (("sweep.stop.hours=3", "timeout 8h"), ("sweep.patience=1", "sweep.grace_period")):
        with pytest.raises(ConfigError, match=rf"{setting}: this key is gone\. .*{said}"):
            compose_jobs(Request(("recipe=resnet18", setting), multirun=multirun))
    if not multirun:
        with pytest.raises(ConfigError, match=r"sweep\.retries=1: only a sweep has this setting\. Add -m"):
            compose_jobs(Request(("recipe=resnet18", "sweep.retries=1")))


def test_a_renamed_key_has_the_name_of_one_that_there_is():
    assert set(other_keys.RENAMED_KEYS.values()) <= constraints().keys()
    assert not other_keys.RENAMED_KEYS.keys() & constraints().keys()


def test_no_removed_key_is_one_that_there_is():
    assert not other_keys.REMOVED_KEYS.keys() & constraints().keys()
