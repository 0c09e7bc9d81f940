"""Programs that a process has executed end with it, and nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.parent import children_of, is_alive, state_of
from tests.faults.test_parent_mode import gone_within

SLEEP = "['sleep', '1000']"
DEAF = (
    "[sys.executable, '-S', '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)']"
)
STARTED = {
    "a program": f"note(subprocess.Popen({SLEEP}).pid)",
    "deaf to SIGTERM": f"note(subprocess.Popen({DEAF}).pid); time.sleep(0.3)",
    "a program's program": "subprocess.run(['sh', '-c', 'setsid sleep 1000 & echo > child-$!'])",
    "a daemon": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp('sh', ['sh', '-c', 'echo > child-$$; exec sleep 1000'])
            os._exit(0)
        os.wait()
    """,
    "spawn": """
        context = multiprocessing.get_context('spawn')
        child = context.Process(target=time.sleep, args=(1000,))
        child.start()
        note(child.pid)
        note(multiprocessing.resource_tracker._resource_tracker._pid)
    """,
    "a forkserver's": """
        context = multiprocessing.get_context('forkserver')
        child = context.Process(target=time.sleep, args=(1000,))
        child.start()
        note(child.pid)
        note(multiprocessing.forkserver._forkserver._forkserver_pid)
    """,
}
PROCESS = """
import multiprocessing.forkserver, multiprocessing.resource_tracker, multiprocessing.shared_memory
import os, signal, subprocess, sys, time
from pathlib import Path
from launcher.process import guardian, lifetime

def note(pid):
    open(f"child-{pid}", "w").close()

if __name__ == "__main__":
    FIRST
    guardian.start(lifetime.ParentDeathSignal().hangup)
    STARTED
    while not list(Path().glob("child-*")):
        time.sleep(0.01)
    print("started", flush=True)
    sys.stdin.readline()
    END
"""
ENDS = {"done": "os._exit(0)", "failed": "raise SystemExit(1)"}


class Process:
    """A small program that starts others under the eye of a guardian."""

    def __init__(self, directory: Path, started: str, end: str = "done", first: str = "pass") -> None:
        self._directory = directory
        text = textwrap.indent(textwrap.dedent(started).strip(), "    ").strip()
        program = directory / "process.py"
        code = PROCESS.replace("FIRST", first).replace("STARTED", text).replace("END", ENDS[end])
        program.write_text(code)
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        assert self._stdout.readline() == "started\n"
        self.started = [int(path.name.partition("-")[2]) for path in directory.glob("child-*")]
        assert all(map(is_alive, self.started))
        (self.guardian,) = (pid for pid in self._of_the_program() if pid != self._process.pid)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._stdin.close()
        self._stdout.close()
        for pid in [*self.started, self.guardian]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)

    def _of_the_program(self) -> Iterator[int]:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self._directory / "process.py").encode() in path.read_bytes().split(b"\0")[:2]:
                    yield int(path.parent.name)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Let it end by itself; its exit code."""
        self._stdin.close()
        return self._process.wait(10)


def left_after(pids: list[int], timeout_s: float) -> list[str]:
    """Those that are still there, with what each of them waits for in the kernel."""
    if gone_within(pids, timeout_s):
        return []
    left = [pid for pid in pids if is_alive(pid)]
    return [f"{pid}: {state_of(pid)} {Path(f'/proc/{pid}/wchan').read_text()}" for pid in left]


@pytest.mark.parametrize("what", STARTED)
def test_programs_end_with_what_started_them(tmp_path: Path, what) -> None:
    with Process(tmp_path, STARTED[what]) as process:
        process.kill()
        assert left_after([*process.started, process.guardian], 10) == []


@pytest.mark.parametrize(("end", "code"), [("done", 0), ("failed", 1)])
def test_they_do_so_at_every_end(tmp_path: Path, end, code) -> None:
    with Process(tmp_path, STARTED["a program"], end) as process:
        assert process.end() == code
        assert left_after([*process.started, process.guardian], 10) == []


def test_what_they_share_is_freed(tmp_path: Path) -> None:
    """Signals that cannot be caught would leave it in /dev/shm until the machine's next start."""
    share = """
        shared = multiprocessing.shared_memory.SharedMemory(create=True, size=64)
        Path("name").write_text(shared.name)
        note(multiprocessing.resource_tracker._resource_tracker._pid)
    """
    with Process(tmp_path, share) as process:
        memory = Path("/dev/shm") / (tmp_path / "name").read_text()
        assert memory.exists()
        process.kill()
        assert left_after([*process.started, process.guardian], 10) == []
    assert not memory.exists()


def test_a_guardian_holds_nothing_and_hears_nothing(tmp_path: Path) -> None:
    with Process(tmp_path, STARTED["a program"]) as process:
        guardian = Path(f"/proc/{process.guardian}")
        (held,) = (guardian / "fd").iterdir()
        assert os.readlink(held).startswith("pipe:")
        assert os.readlink(guardian / "cwd") == "/"
        assert os.getsid(process.guardian) != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(process.guardian, number)
        process.kill()
        assert left_after([*process.started, process.guardian], 10) == []


def test_a_wait_for_all_children_does_not_wait_for_the_guardian(tmp_path: Path) -> None:
    wait = """
        try:
            os.wait()
        except ChildProcessError:
            note(os.getpid())
    """
    with Process(tmp_path, wait) as process:
        assert len(process.started) == 1


def test_a_process_that_ignores_sigchld_has_one_too(tmp_path: Path) -> None:
    """As what started it may have left it."""
    ignore = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    with Process(tmp_path, STARTED["a program"], first=ignore) as process:
        process.kill()
        assert left_after([*process.started, process.guardian], 10) == []


def test_a_process_that_ends_at_once_on_a_busy_machine_has_one_too(tmp_path: Path) -> None:
    """Before it has closed what ties forks to the process, the guardian would be killed with it."""
    late = "mask = signal.pthread_sigmask; signal.pthread_sigmask = lambda *w: (time.sleep(0.3), mask(*w))"
    with Process(tmp_path, STARTED["a program"], first=late) as process:
        process.kill()
        assert left_after([*process.started, process.guardian], 10) == []


def test_another_launchers_programs_are_left_alone(tmp_path: Path) -> None:
    """Also those of one that was started by this one's program; they end with either."""
    nested = f"""
        inner = os.path.join(os.getcwd(), "inner.py")
        Path(inner).write_text("import subprocess, sys, time;"
            "from launcher.process import guardian, lifetime;"
            "guardian.start(lifetime.ParentDeathSignal().hangup);"
            "open('child-' + str(subprocess.Popen({SLEEP}).pid), 'w'); time.sleep(1000)")
        subprocess.Popen([sys.executable, inner])
    """
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with Process(tmp_path / "one", STARTED["a program"]) as one, Process(tmp_path / "other", nested) as other:
        one.kill()
        assert left_after([*one.started, one.guardian], 10) == []
        assert all(map(is_alive, other.started))
        other.kill()
        assert left_after([*other.started, other.guardian], 10) == []


def test_what_has_moved_to_a_job_of_its_own_is_left_alone(tmp_path: Path, job: Path) -> None:
    """A batch system copies the environment of a recipe that submits its successor."""
    with Process(tmp_path, STARTED["a program"]) as process:
        (moved,) = process.started
        (job / "cgroup.procs").write_text(str(moved))
        process.kill()
        assert left_after([process.guardian], 10) == []
        assert is_alive(moved)


@pytest.fixture
def job() -> Iterator[Path]:
    """A control group, where this process may make one."""
    path = Path(f"/sys/fs/cgroup/pids/test-guardian-{os.getpid()}")
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control groups: {error}")
    yield path
    deadline = time.monotonic() + 15
    while (path / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    path.rmdir()


@pytest.mark.parametrize("with_its_parent", [False, True])
def test_a_process_that_is_stopped_for_long_is_ended_unless_its_parent_is_stopped_too(
    tmp_path: Path, with_its_parent
) -> None:
    program = tmp_path / "process.py"
    asked = "guardian.end_if_stopped(1.0)\n    note(0)"
    program.write_text(
        PROCESS.replace("FIRST", "pass").replace("STARTED", asked).replace("END", ENDS["done"])
    )
    shell = subprocess.Popen(
        ["sh", "-c", f"{sys.executable} {program}; true"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "started\n"
        (process,) = children_of(shell.pid)
        for pid in (process, shell.pid)[: 1 + with_its_parent]:
            os.kill(pid, signal.SIGSTOP)
        if with_its_parent:
            time.sleep(4)
            assert is_alive(process)
        else:
            assert gone_within([process], 10)
    finally:
        for pid in (*children_of(shell.pid), shell.pid):
            os.kill(pid, signal.SIGKILL)
        shell.communicate()
