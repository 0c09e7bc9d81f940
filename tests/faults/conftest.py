"""What the fault tests compare with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.faults.launching import Ended, run


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Callable[..., Ended]:
    """The run of these words that nothing happens to; each is run once."""

    @cache
    def finished(*words: str, ranks: int = 1) -> Ended:
        ended = run(tmp_path_factory.mktemp("undisturbed") / "run", *words, ranks=ranks)
        assert ended.codes == [0] * ranks, ended
        return ended

    return finished
