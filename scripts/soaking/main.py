"""A soak test of parent mode: real faults at random times; the final bits must equal an undisturbed run's.

    scripts/soak [--minutes 10] [--seed 1] [--nproc 2] [--keep DIR] [--json FILE] [--quick]

First the tiny recipe beside this file is trained once undisturbed. Then each round trains it from the start,
while every few seconds a process is killed, suspended or asked to stop, a file is damaged, or the disk is
filled. Each round must end with exit code 0 and the same digest, with intact files and without orphaned
processes. The seed determines the faults and their targets, but not their exact times. The recipe's data
contains NaN batches, so both kinds of run skip steps.

Exit code 0 if all faults were survived. Otherwise 1: the failed check is printed, and the round's directory
is kept. CPU only; only the ranks listen, on the loopback device. As root, a small file system is filled up
too; it is mounted in a private mount namespace and disappears with this process.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from launcher.run_dir.records import CHECKPOINTS
from scripts.bench.machine import machine
from scripts.soaking.checks import Expected, expected_of, problems_of_run
from scripts.soaking.faults import AT_THE_END, FAULTS, QUICK, fill_disk, limit_files
from scripts.soaking.run import ROUND_LIMIT_S, Failed, Finished, Plan, Run

STEPS, QUICK_STEPS = 600, 150
PAUSE_S, QUICK_PAUSE_S = (0.2, 2.5), (0.0, 0.3)  # between a new checkpoint and the next fault
MAX_FAULTS = 60  # in one round
LAST_STEPS = 100  # the disk is not filled later: a run that cannot save its last checkpoint warns and ends
DISK = "32m"
CLONE_NEWNS = 0x20000


@dataclass
class Tally:
    """The faults injected so far, and their outcomes."""

    rounds: int = 0
    restarts: int = 0
    skipped: int = 0
    injected: dict[str, int] = field(default_factory=dict)
    survived: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # to the next step
    story: list[str] = field(default_factory=list)  # of this round

    def begin_round(self) -> None:
        self.rounds += 1
        self.story.clear()

    def tell(self, text: str) -> None:
        self.story.append(text)
        print(text, flush=True)

    @property
    def num_faults(self) -> int:
        return sum(self.injected.values())

    def survive(self, name: str, seconds: float | None) -> None:
        self.injected[name] = self.injected.get(name, 0) + 1
        self.survived[name] = self.survived.get(name, 0) + 1
        if seconds is not None:
            self.seconds.setdefault(name, []).append(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    # A folder of its own also within --keep: runs that an earlier call left there would be resumed, not made.
    directory = Path(tempfile.mkdtemp(prefix="soak-", dir=options.keep)).absolute()
    plan = Plan(options.nproc, QUICK_STEPS if options.quick else STEPS)
    can_mount = not options.quick and mount_for_ourselves()
    left_out = {AT_THE_END} if can_mount else {AT_THE_END, "a full disk"}
    faults = [name for name in (QUICK if options.quick else FAULTS) if name not in left_out]
    print("; ".join(f"{key} {value}" for key, value in machine().items()), flush=True)
    tally, seed = Tally(), options.seed
    deadline = time.monotonic() + 60 * options.minutes
    try:
        expected = undisturbed(plan, directory / "undisturbed")
        print(f"undisturbed: {expected.steps} steps, digest {expected.digest[:16]}", flush=True)
        for number in itertools.count(1):
            seed = options.seed + number - 1
            one_round(plan, directory / f"round-{number}", seed, faults, expected, tally, deadline, options)
            if options.quick or time.monotonic() > deadline:
                break
    except Failed as failure:
        print(table(tally))
        print(f"soak: failed in round {tally.rounds} (seed {seed}): {failure}")
        print(f"injected faults: {'; '.join(tally.story) or 'nothing'}")
        print(f"directory: {directory}")
        return 1
    if options.keep is None:
        shutil.rmtree(directory)
    if options.json is not None:
        found = {"machine": machine(), "minutes": options.minutes, "digest": expected.digest, **asdict(tally)}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(table(tally))
    print(
        f"soak: {tally.num_faults} faults in {tally.rounds} rounds, all survived, "
        f"digest {expected.digest[:16]} equal in all"
    )
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="no new fault after this many minutes (10)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the first round; each round adds one (1)"
    )
    parser.add_argument("--nproc", type=int, default=2, help="workers (2)")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep all runs, in a new folder of this directory"
    )
    parser.add_argument("--json", type=Path, help="where to write what was injected and survived")
    parser.add_argument("--quick", action="store_true", help="one short round, to test this program")
    return parser.parse_args(argv)


def undisturbed(plan: Plan, directory: Path) -> Expected:
    with Run(plan, directory, f"{os.getpid()}-0", ROUND_LIMIT_S) as run:
        wait_for_the_end(run)
        expected = expected_of(run.run_dir)
        problems = problems_of_run(run.run_dir, expected, ())
    if problems or run.told():
        raise Failed(f"the undisturbed run: {'; '.join(problems) or run.told()}")
    return expected


def one_round(
    plan: Plan,
    directory: Path,
    seed: int,
    faults: Sequence[str],
    expected: Expected,
    tally: Tally,
    deadline: float,
    options: argparse.Namespace,
) -> None:
    """One disturbed run, from its start to its end. Raises Failed."""
    tally.begin_round()
    random = Random(seed)
    mark = f"{os.getpid()}-{tally.rounds}"
    began = time.monotonic()
    with (
        small_disk(directory / "run" / CHECKPOINTS, wanted="a full disk" in faults),
        Run(plan, directory, mark, ROUND_LIMIT_S) as run,
    ):
        pauses = QUICK_PAUSE_S if options.quick else PAUSE_S
        try:
            newest = 0
            for name in drawn(faults, random, once=options.quick):
                run.wait_for_checkpoint_after(newest)
                time.sleep(random.uniform(*pauses))
                newest = max(newest, run.newest_checkpoint())
                if time.monotonic() > deadline or is_too_late(name, newest, plan):
                    break
                inject(name, run, random, tally, began)
            inject(AT_THE_END, run, random, tally, began)
        except Finished:
            pass
        refuse_differences(run, expected)
    tally.restarts += run.restarts
    tally.skipped += len(expected.skipped)
    seconds = time.monotonic() - began
    print(f"round {tally.rounds} (seed {seed}): done after {seconds:.0f} s, the same digest", flush=True)
    if options.keep is None:
        shutil.rmtree(directory)


def refuse_differences(run: Run, expected: Expected) -> None:
    """Raise Failed where the disturbed run did not end as the undisturbed one, or restarted otherwise."""
    problems = problems_of_run(run.run_dir, expected, run.damaged)
    lines = run.restart_lines()
    if len(lines) != run.restarts:
        problems.append(f"{run.restarts} restarts were expected, but: {lines}")
    if problems:
        raise Failed("; ".join(problems))


def drawn(faults: Sequence[str], random: Random, once: bool) -> Iterator[str]:
    """All faults in random order, repeatedly in new random orders."""
    for _ in range(1 if once else -(-MAX_FAULTS // len(faults))):
        yield from random.sample(faults, len(faults))


def is_too_late(name: str, step: int, plan: Plan) -> bool:
    return FAULTS[name] in (fill_disk, limit_files) and step > plan.steps - LAST_STEPS


def inject(name: str, run: Run, random: Random, tally: Tally, began: float) -> None:
    """Inject one fault and check its outcome. Raises Failed, and Finished after a successful end."""
    when = f"round {tally.rounds}, {time.monotonic() - began:5.1f} s: {name}"
    run.hurt = False
    try:
        seconds = FAULTS[name](run, random)
    except Finished:
        if run.hurt:
            tally.survive(name, None)
            tally.tell(f"{when}: the run ended")
        raise
    except Failed:
        tally.injected[name] = tally.injected.get(name, 0) + 1
        tally.tell(f"{when}: FAILED")
        raise
    tally.survive(name, seconds)
    tally.tell(f"{when}: {seconds:.1f} s to the next step")


def wait_for_the_end(run: Run) -> None:
    try:
        run.until(lambda: False, "the run has finished all its steps", limit_s=ROUND_LIMIT_S)
    except Finished:
        return


def mount_for_ourselves() -> bool:
    """Enter a private mount namespace. False where that is not permitted."""
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(CLONE_NEWNS):
        return False
    if subprocess.run(["mount", "--make-rprivate", "/"], check=False, capture_output=True).returncode:
        return False
    with tempfile.TemporaryDirectory() as place:
        if subprocess.run(
            ["mount", "-t", "tmpfs", "soak", place], check=False, capture_output=True
        ).returncode:
            return False
        subprocess.run(["umount", place], check=True)
    return True


@contextmanager
def small_disk(directory: Path, wanted: bool) -> Iterator[None]:
    """A small file system at `directory`; its content is copied there at the end."""
    if not wanted:
        yield
        return
    directory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "soak", str(directory)], check=True)
    try:
        yield
    finally:
        saved = directory.with_name(f"{directory.name}-saved")
        shutil.copytree(directory, saved)
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
        directory.rmdir()
        saved.rename(directory)


def table(tally: Tally) -> str:
    """One line per kind of fault, then the totals."""
    lines = [f"{'fault':52} {'injected':>8} {'survived':>8} {'median s':>8} {'longest s':>9}"]
    for name in FAULTS:
        if name in tally.injected:
            times = tally.seconds.get(name, [])
            median = f"{statistics.median(times):8.1f} {max(times):9.1f}" if times else f"{'':18}"
            survived = tally.survived.get(name, 0)
            lines.append(f"{name:52} {tally.injected[name]:8} {survived:8} {median}")
    every = [seconds for times in tally.seconds.values() for seconds in times]
    if every:
        number = f"{tally.num_faults:8} {sum(tally.survived.values()):8}"
        lines.append(f"{'all':52} {number} {statistics.median(every):8.1f} {max(every):9.1f}")
    lines.append(
        f"{tally.rounds} rounds, {tally.restarts} restarts of the workers; "
        f"{tally.skipped} steps skipped (NaN batches, overflows), "
        "the same as in the undisturbed run"
    )
    lines.append("seconds: from the fault to the next step, including the time of a stop or a sleep")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
