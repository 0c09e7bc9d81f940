"""The process itself: `python -m launcher`, `torchrun -m launcher`, the command `launcher`.

Owns what must be set up before anything slow is imported: streams that cannot fail a run, signals that arrive
before there is anything to save, and the ties that end this process and its children with their parent.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    _take_early_signals()
    from launcher.distributed import stranded
    from launcher.process import guardian, lifetime, streams

    streams.make_unfailing()
    lifetime.end_with_torchrun(os.environ)
    guardian.start(lifetime.ParentDeathSignal().hangup)
    try:
        from launcher import cli
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    exit_code = cli.main(argv)
    if exit_code:
        stranded.watch(os.environ)
    return exit_code


def _take_early_signals() -> None:
    """Handle signals that arrive while nothing is trained: a job installs its own handlers."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to save, while there is nothing to save
    if "RANK" in os.environ:
        return  # the parent reports it, and a handler would have to wait for store calls
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit as the signal would, with a reason. An exception might not pass through an import."""
    text = (
        f"error: stopped by {signal.Signals(number).name} while nothing was trained; no progress is lost. "
        "To start or resume, run the same command again.\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
