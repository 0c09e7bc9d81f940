"""Fails a test, or a module of tests, that leaves something behind which later tests would meet.

Owns what counts as left behind: processes, threads, environment variables, the default process group, and
files in the clone. Each test is compared with the moment before it, after its fixtures are gone; each module
likewise, with its own fixtures. What is found is also put in order, so that the one at fault fails alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
GRACE_S = 2.0  # what is about to end is no leak
END_S = 30.0  # for one that was killed to end beside other work: it is reported once
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
WATCHED = ("launcher", "conf", "recipes", "tests", "scripts")
CACHES = ("__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis", ".venv", ".git")
SET_BY_OTHERS = {
    "PYTEST_CURRENT_TEST",
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # by the first import of sklearn
    # By the first use of torch's compiler:
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"),
    *("TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH"),
    "TORCHINDUCTOR_COMPILE_THREADS",  # by a worker, for as long as its process lives
}
_REPORTED: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # once is enough; a thread cannot be ended


@dataclass(frozen=True)
class Moment:
    """What there was before a test."""

    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    environ: dict[str, str]

    @staticmethod
    def now() -> Moment:
        return Moment(frozenset(processes()), frozenset(threading.enumerate()), dict(os.environ))

    def left_behind(self) -> list[str]:
        """One line for each kind of thing that was not there at this moment."""
        kinds = (self._processes, self._threads, self._variables, _process_group)
        return [line for kind in kinds if (line := kind())]

    def _processes(self) -> str:
        known = self.processes | _processes_of_the_compiler()
        left = _after_grace(lambda: {pid for pid in processes() - known if not _reaped(pid)})
        names = {pid: _command(pid) for pid in left}
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _after_grace(lambda: {pid for pid in left if not _reaped(pid)}, END_S)
        return f"processes: {names}. Wait for each, and kill it in a finally." if names else ""

    def _threads(self) -> str:
        # Gloo's threads are the C++ library's own: they outlive the group of a process, and are not listed.
        known = self.threads | set(_REPORTED) | _threads_of_the_compiler()
        left = _after_grace(lambda: {thread for thread in threading.enumerate() if not thread.daemon} - known)
        _REPORTED.update(left)
        return f"threads: {sorted(thread.name for thread in left)}. Join each." if left else ""

    def _variables(self) -> str:
        now = dict(os.environ)
        changed = {key for key in now | self.environ if now.get(key) != self.environ.get(key)} - SET_BY_OTHERS
        for name in changed:
            os.environ.pop(name, None)
            if name in self.environ:
                os.environ[name] = self.environ[name]
        if not changed:
            return ""
        return (
            f"changed environment variables: {sorted(changed)}. Use monkeypatch.setenv."  # values may be keys
        )


def _threads_of_the_compiler() -> set[threading.Thread]:
    """Of torch's pool, which lasts as long as the process."""
    compiler = sys.modules.get("torch._inductor.async_compile")
    pool = compiler.AsyncCompile.pool if compiler else None
    return set(pool()._threads) if pool and pool.cache_info().currsize else set()


def _processes_of_the_compiler() -> set[int]:
    """Of torch's pool, which the first Triton kernel starts. Without it every later kernel would fail."""
    compiler = sys.modules.get("torch._inductor.async_compile")
    pools = compiler._pool_set if compiler else ()
    return {pool.process.pid for pool in pools if hasattr(pool, "process")}


def _process_group() -> str:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return ""
    dist.destroy_process_group()
    return "an initialised default process group. Call destroy_process_group() in a finally."


def processes() -> set[int]:
    """The children of this process and of multiprocessing's fork server, without those two servers.

    This process adopts what its descendants leave behind (PR_SET_CHILD_SUBREAPER), so orphans are among them.
    """
    servers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    found = _children(os.getpid())
    for pid in servers & found:
        found |= _children(pid)
    return found - servers


def _children(pid: int) -> set[int]:
    """Of all its threads; none where the kernel does not list them."""
    found: set[int] = set()
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    return found


def _reaped(pid: int) -> bool:
    """True for a process that has ended; of an adopted one nobody else would take the exit code."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
            return False
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return True


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:200]
    return "ended"


def _after_grace(find: Callable[[], set[T]], grace_s: float | None = None) -> set[T]:
    """What is still found after a while; at once if there is nothing."""
    deadline = time.monotonic() + (GRACE_S if grace_s is None else grace_s)  # a test shortens GRACE_S
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def files(root: Path) -> set[str]:
    """The paths of a clone's own folders and of its top level, without caches."""
    found = set(_entries(root, recursive=False))
    for name in WATCHED:
        found |= set(_entries(root / name, recursive=True))
    return found


def _entries(folder: Path, recursive: bool) -> Iterator[str]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in CACHES or entry.name.endswith(".egg-info"):
                continue
            yield entry.path
            if recursive and entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path), recursive)


@pytest.fixture(autouse=True)
def no_leak_of_a_test() -> Iterator[None]:
    """Set up before and torn down after all other fixtures of the test."""
    before = Moment.now()
    yield
    left = before.left_behind()
    if left:
        pytest.fail("this test left behind\n" + "\n".join(left), pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def no_leak_of_a_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """The files, too: too slow to look for after each test."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    root = request.config.rootpath
    before, files_before = Moment.now(), files(root)
    yield
    left = before.left_behind()
    new = sorted(os.path.relpath(path, root) for path in files(root) - files_before)
    if new:
        left.append(
            f"files in the clone: {new}, if not an editor or a module beside it. Write below tmp_path."
        )
    if left:
        pytest.fail(f"the tests of {request.path.name} left behind\n" + "\n".join(left), pytrace=False)
