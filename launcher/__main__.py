"""The process itself: `python -m launcher`, `torchrun -m launcher`, the command `launcher`.

Owns what must be settled before anything slow is imported: streams that cannot fail a run, a SIGUSR1 that
kills nothing, and the ties by which this process and its children end with what started them.
"""

import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to save, while there is nothing to save yet
    from launcher import guardian, streams, ties

    streams.make_unfailing()
    ties.end_with_torchrun(os.environ)
    guardian.start(ties.Leash().hangup)
    try:
        from launcher import cli
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
