"""What holds for all tests: what they may not leave behind, which see a GPU, no deadline in hypothesis.

The GPUs of a machine belong to the tests that are marked for them: all others run as on a machine without.
Which of the two a session is has to be settled before CUDA is initialised, once for the whole process.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings

from launcher.os.signals import HANDLED
from tests.leaks import no_leak_of_a_module, no_leak_of_a_test

__all__ = ["no_leak_of_a_module", "no_leak_of_a_test"]  # of every test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--folder-times", action="store_true", help="print how long each folder took")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """By folder the seconds of its tests with their fixtures, of all processes together."""
    if not config.getoption("--folder-times"):
        return
    seconds: Counter[str] = Counter()
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        folder = "/".join(getattr(report, "nodeid", "").partition("::")[0].split("/")[:2])
        seconds[folder] += getattr(report, "duration", 0.0)  # type: ignore[assignment]
    terminalreporter.section("seconds by folder, of all processes together")
    for folder, taken in seconds.most_common():
        terminalreporter.write_line(f"{taken:8.1f} {folder}")


# No test is about how long one example takes, which beside other work is anything.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

# Before torch is imported, here and in the processes that tests start: OpenMP's idle threads sleep. With more
# threads than cores, as always beside xdist, those that spin take the cores of the ones they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as the launcher sets it where it uses the package

# A shell starts a background job with the first two ignored, nohup any program with the third, and every
# process that a test starts would inherit that.
for name in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(name) is signal.SIG_IGN:
        signal.signal(name, signal.default_int_handler if name is signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _signal_handlers_restored() -> Iterator[None]:
    """A run that a signal has stopped leaves signals ignored: its process is about to end."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


NEEDS_GPU = ("gpu", "gpus2")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is `sampled`, each `every`-th case from `first` on is in the default set."""
    met: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is None:
            continue
        test = item.nodeid.partition("[")[0]
        if met[test] % mark.kwargs["every"] != mark.kwargs.get("first", 0):
            item.add_marker(pytest.mark.slow)
        met[test] += 1


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hide the GPUs unless every test of this session is one of those that need them."""
    gpu = [item for item in session.items if any(item.get_closest_marker(mark) for mark in NEEDS_GPU)]
    if len(gpu) == len(session.items):
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes that tests start, too
    for item in gpu:
        item.add_marker(
            pytest.mark.skip(reason="other tests of this session hide the GPUs: run tests/gpu alone")
        )
