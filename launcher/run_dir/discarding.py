"""Whether a command discards steps of the run in its directory, and whether it has done so.

`checkpoint.resume=never`, or the run's own checkpoint, holds until the checkpoints of later steps are set
aside. From then on a restart of the same command resumes from the newest, as with `auto`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launcher.config.messages import directory_override
from launcher.run_dir.records import CHECKPOINTS

AUTO, NEVER = "auto", "never"  # values of checkpoint.resume; any other is a path
DISCARDED = ".discarded"  # file of a run: its command has set the later checkpoints aside
RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def discards_steps(resume: str, run_dir: Path) -> bool:
    """Whether this value of checkpoint.resume makes the run repeat steps of its own."""
    if resume in (AUTO, NEVER):
        return resume == NEVER
    path, own = Path(resume).resolve(), run_dir.resolve()  # either may lead through a link
    return path in (own, own / CHECKPOINTS) or path.parent == own / CHECKPOINTS


def record_discarded(run_dir: Path) -> None:
    """Record that the later checkpoints are set aside. Raises OSError."""
    (run_dir / DISCARDED).touch()


def has_discarded(run_dir: Path) -> bool:
    """Whether this command, before it was restarted, has set the later checkpoints aside."""
    return (run_dir / DISCARDED).exists()


def is_restart(environ: Mapping[str, str]) -> bool:
    """Whether torchrun or Slurm has started this command before."""
    return any(environ.get(name, "0") != "0" for name in RESTART_COUNTS)


def resume_after(resume: str, run_dir: Path, restarted: bool) -> str:
    """What checkpoint.resume means to this start of the command, which may be a restart."""
    return AUTO if restarted and discards_steps(resume, run_dir) and has_discarded(run_dir) else resume


def overrides_to_resume(run_dir: Path) -> str:
    """What to add to the command of this run, so that it resumes what it has saved."""
    again = directory_override("run.dir", run_dir)
    return f"{again} checkpoint.resume=auto" if has_discarded(run_dir) else again
