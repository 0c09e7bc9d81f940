"""The process itself: `python -m launcher`, `torchrun -m launcher`, the command `launcher`.

Owns what must be set up before anything slow is imported: standard streams, signals that arrive
before there is anything to save, and the ties that end this process and its children with their parent.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    # torch reads it once, at its first tensor: large ones lie in huge pages, through which an update on a CPU
    # streams faster.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from launcher.os import signals

    signals.ignore_saving_signals()
    from launcher.os import lifetime, stdio

    stdio.prepare()
    lifetime.die_with_launcher(os.environ)
    lifetime.kill_forks_on_exit()
    try:
        from launcher import cli
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    exit_code = cli.main(argv)
    stdio.flush()
    # The interpreter collects garbage as it ends, among all objects of torch: 1.0 of 1.6 s on a busy machine,
    # for which another host's torchrun waits.
    gc.freeze()
    if exit_code > 128:
        signals.kill_self_with(exit_code - 128)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
