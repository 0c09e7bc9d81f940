"""The process itself: `python -m launcher`, `torchrun -m launcher`, the command `launcher`.

Owns what must be set up before anything slow is imported: standard streams, signals that arrive
before there is anything to save, and the ties that end this process and its children with their parent.
"""

from __future__ import annotations  # an older Python, too, has to read this file

import gc
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("torch", "hydra", "numpy", "safetensors")  # no command trains or reads a run without them
SCRIPT = Path(__file__).parents[1] / "scripts" / "run"  # of a clone


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    if problem := _problem_of_environment(sys.argv[1:] if argv is None else argv):
        print(f"error: {problem}", file=sys.stderr)
        return 3
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


def _problem_of_environment(argv: Sequence[str]) -> str:
    """What this Python lacks to run the launcher, with the command to type instead; empty if nothing."""
    version = sys.version_info[:2]
    missing = [name for name in NEEDED if find_spec(name) is None]
    if (3, 11) <= version < (3, 14) and not missing:
        return ""
    rule = f"is {version[0]}.{version[1]}, and 3.11 to 3.13 are supported"
    problem = f"the Python {sys.executable} {'lacks ' + ', '.join(missing) if missing else rule}."
    if not SCRIPT.is_file():
        return f"{problem} Install the launcher with its dependencies into a Python 3.11 to 3.13."
    script = min(str(SCRIPT), os.path.relpath(SCRIPT), key=len)
    return f"{problem} This command sets up an environment first: {shlex.join([script, *argv])}"


if __name__ == "__main__":
    sys.exit(main())
