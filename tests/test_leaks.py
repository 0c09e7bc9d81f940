"""Each check of tests/leaks.py on small test files that leave something behind, and on one that does not."""

from __future__ import annotations

import multiprocessing.forkserver
from collections.abc import Callable

import pytest
import torch.distributed  # noqa: F401  # a module that an inner session is the first to import is unloaded again

from tests import leaks
from tests.ranks.harness import forkserver

pytest_plugins = ["pytester"]

HEAD = """
import os, subprocess, threading, time
import pytest
import torch.distributed as dist
from pathlib import Path
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.ranks.harness import forkserver
"""
SLEEPING = r"processes: \{\d+: 'sleep 100'\}"
LEAKS = {
    "an orphan": ("subprocess.run(['sh', '-c', 'sleep 100 & '])", SLEEPING),
    "a process of the fork server": (
        "forkserver().Process(target=time.sleep, args=(100,)).start()",
        r"processes: \{\d+: .*multiprocessing.forkserver",
    ),
    "a thread": (
        "threading.Thread(target=time.sleep, args=(3.0,), name='busy').start()",
        r"threads: \['busy'\]",
    ),
    "a variable": ("os.environ['OURS'] = 'secret'", r"changed environment variables: \['OURS'\]"),
    "a process group": (
        "dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=2)",
        "an initialised default process group",
    ),
}
Check = Callable[[str], pytest.RunResult]


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """Started here, for the rest of the session: within an inner session it would inherit its HOME."""
    forkserver()
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def check(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Runs test code in a session of its own, in this process, which has paid for the imports."""
    monkeypatch.setattr(leaks, "GRACE_S", 0.1)
    (pytester.path / "conf").mkdir()

    def run(code: str) -> pytest.RunResult:
        pytester.makepyfile(HEAD + code)
        return pytester.runpytest_inprocess("-p", "tests.leaks", "-p", "no:cacheprovider", "-Wignore")

    return run


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("leak", "line"), LEAKS.values(), ids=LEAKS)
def test_what_a_test_leaves_behind_fails_that_test_alone(check: Check, leak: str, line: str) -> None:
    result = check(f"def test_guilty():\n    {leak}\n\ndef test_next():\n    pass\n")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.re_match_lines(
        [".*ERROR at teardown of test_guilty.*", "this test left behind", line + ".*"]
    )
    assert "secret" not in result.stdout.str()


@pytest.mark.parametrize("path", ["left.txt", "conf/data/left.yaml", "outputs"])
def test_files_in_the_clone_fail_the_module_that_left_them(check: Check, path: str) -> None:
    code = f"path = Path({path!r}); path.parent.mkdir(exist_ok=True); path.touch()"
    result = check(f"def test_guilty():\n    {code}\n")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.re_match_lines(["the tests of .* left behind", rf"files in the clone: .*'{path}'.*"])
