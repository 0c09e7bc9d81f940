"""Programs as processes forked from one that has imported everything: they start in 0.1 s rather than in 3.

What such a program does not prove is its own start: imports, the interpreter's options, torchrun.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.ranks.harness import forkserver, leave_out_pictures


class Forked:
    """A running `work(*args)` in a directory, with an environment and output of its own; killed on exit."""

    def __init__(
        self, work: Callable[..., object], *args: object, directory: Path, environ: Mapping[str, str]
    ) -> None:
        self._output = tempfile.TemporaryDirectory()
        paths = [Path(self._output.name, name) for name in ("stdout", "stderr")]
        for path in paths:
            path.touch()
        self._stdout, self._stderr = paths
        self._process = forkserver().Process(target=_be, args=(work, args, directory, dict(environ), paths))
        self._process.start()

    def __enter__(self) -> Forked:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._process.join()
        self._process.close()
        self._output.cleanup()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float = 60) -> int:
        """The exit code, negative for a signal; AssertionError if it runs for longer."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"it did not end within {timeout_s} s\n{self.stdout}\n{self.stderr}"
        return code

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()


def _be(
    work: Callable[..., object],
    args: Sequence[object],
    directory: Path,
    environ: Mapping[str, str],
    paths: Sequence[Path],
) -> None:
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    for descriptor, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # the server's own may be closed
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    work(*args)


def _launcher(words: Sequence[str]) -> None:
    from launcher.__main__ import main

    leave_out_pictures()
    sys.exit(main(list(words)))


def be_script(path: Path, words: Sequence[str]) -> None:
    """Be `python path words...`."""
    sys.argv = [str(path), *words]
    runpy.run_path(str(path), run_name="__main__")


def launch_forked(
    directory: Path, words: Sequence[str], timeout_s: float = 60, **environ: str
) -> subprocess.CompletedProcess[str]:
    """`python -m launcher words...` in `directory`, without wandb's variables but for those of `environ`.

    It draws no pictures; all else that a run writes is there.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    kept |= {"OMP_NUM_THREADS": "1"} | environ
    with Forked(_launcher, words, directory=directory, environ=kept) as launcher:
        code = launcher.wait(timeout_s)
        return subprocess.CompletedProcess(words, code, launcher.stdout, launcher.stderr)
