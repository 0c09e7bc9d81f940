"""A key that is gone answers with what does the same now, on the command line and in a file."""

from __future__ import annotations

import pytest

from launcher.config import removed_keys
from launcher.config.messages import unknown_key
from launcher.config.schema import rules


@pytest.mark.parametrize("path", ["old.key", "old.section.key"])
def test_a_removed_key_says_what_to_do_instead(monkeypatch, path):
    table = {"old.key": "Use new.key.", "old.section": "Use new.key."}
    monkeypatch.setattr(removed_keys, "REMOVED_KEYS", table)
    assert unknown_key(f"{path}=1", path, ["old.keys"]) == f"{path}=1: this key is gone. Use new.key."


def test_no_removed_key_is_one_that_there_is():
    assert not removed_keys.REMOVED_KEYS.keys() & rules().keys()
