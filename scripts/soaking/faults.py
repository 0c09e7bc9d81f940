"""The faults: each one is injected from outside, and its expected outcome is awaited.

Every function takes the run and a random generator, and returns the seconds from the fault to the next step.
It raises Failed where the run does not react as specified, and Finished where the run has ended meanwhile.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from launcher.run_dir.atomic import write_text
from launcher.run_dir.records import CHECKPOINTS
from scripts.soaking.run import (
    HANG_TIMEOUT_S,
    PREEMPTED,
    ROUND_LIMIT_S,
    Failed,
    Finished,
    Run,
    is_scheduled,
    state_of,
)

Fault = Callable[[Run, Random], float]
FILE_LIMIT_BYTES = 1_200_000  # less than the weights, more than any other file
FILLER = "filler"
NOT_SAVED = 128 + signal.SIGTERM  # stopped before a checkpoint was written


def kill_worker(run: Run, random: Random) -> float:
    return lose_worker(run, random, signal.SIGKILL)


def stop_worker(run: Run, random: Random) -> float:
    return lose_worker(run, random, signal.SIGSTOP)


def lose_worker(run: Run, random: Random, how: signal.Signals) -> float:
    victim = random.choice(run.all_workers())
    hurt_s = run.signal(victim, how)
    run.wait_for_restart(victim)
    return run.recovery_s(hurt_s)


def kill_worker_twice(run: Run, random: Random) -> float:
    """Kill a worker, and again while the new workers start, between fork and first steps."""
    before = run.all_workers()
    victim = random.choice(before)
    run.signal(victim, signal.SIGKILL)
    run.wait_for_restart(victim)
    run.until(lambda: len(run.workers()) == len(before), "all new workers are running")
    victim = random.choice(run.workers())
    time.sleep(random.uniform(0, 0.6))
    hurt_s = run.signal(victim, signal.SIGKILL)
    run.wait_for_restart(victim)
    return run.recovery_s(hurt_s)


def kill_in_a_save(run: Run, random: Random) -> float:
    """Kill the leader as soon as an unfinished checkpoint exists."""
    leader = run.all_workers()[0]
    folder = run.run_dir / CHECKPOINTS
    deadline = time.monotonic() + 30
    while not any(name.startswith(".unfinished-") for name in os.listdir(folder)):
        if time.monotonic() > deadline:
            raise Failed("no checkpoint was written for 30 s")
        if run.parent.poll() is not None:
            run.finish_or_fail(run.exit_code())
        time.sleep(0.0005)
    time.sleep(random.uniform(0, 0.005))
    hurt_s = run.signal(leader, signal.SIGKILL)
    run.wait_for_restart(leader)
    return run.recovery_s(hurt_s)


def kill_parent(run: Run, random: Random) -> float:
    hurt_s = run.signal(run.parent.pid, signal.SIGKILL)
    return _go_on_after_kill(run, hurt_s)


def kill_at_the_end(run: Run, random: Random) -> float:
    """Kill the parent or a worker after the last step has been done and saved. No further step follows."""
    run.until(lambda: run.newest_checkpoint() == run.plan.steps, "all steps are done", ROUND_LIMIT_S)
    time.sleep(random.uniform(0, 1))
    victim = random.choice([run.parent.pid, *run.workers()])
    run.signal(victim, signal.SIGKILL)
    if victim != run.parent.pid:
        run.wait_for_restart(victim)
    elif (code := run.exit_code()) == -signal.SIGKILL:
        run.start()
    else:
        run.finish_or_fail(code)
    run.until(lambda: False, "the run is done")
    raise AssertionError


def pause_worker(run: Run, random: Random) -> float:
    """Suspend a worker for less than `hang_timeout_s`: the run must not restart."""
    workers = run.all_workers()
    victim = random.choice(workers)
    hurt_s = run.signal(victim, signal.SIGSTOP)
    time.sleep(random.uniform(0.1, 0.5) * HANG_TIMEOUT_S)
    continued_s = run.signal(victim, signal.SIGCONT)
    return continued_s - hurt_s + run.undisturbed_s(continued_s, workers)


def slow_rank(run: Run, random: Random) -> float:
    """Make a rank sleep in user code for less than `hang_timeout_s`: the run must not restart."""
    workers = run.all_workers()
    marker = run.directory / f"slow-rank{random.randrange(len(workers))}"
    seconds = random.uniform(0.1, 0.5) * HANG_TIMEOUT_S
    write_text(marker, str(seconds))
    run.hurt = True
    run.until(lambda: not marker.exists(), "the rank has read its sleep file")
    asleep_s = seconds / 2
    return asleep_s + run.undisturbed_s(time.time() + asleep_s, workers)


def ask_parent_to_stop(run: Run, random: Random) -> float:
    return _stopped(run, run.signal(run.parent.pid, signal.SIGTERM))


def ask_worker_to_stop(run: Run, random: Random) -> float:
    """SIGTERM to one worker: all ranks must stop after the same step."""
    return _stopped(run, run.signal(random.choice(run.all_workers()), signal.SIGTERM))


def ask_to_stop_and_kill(run: Run, random: Random) -> float:
    """Kill a worker while the run stops: the run resumes, whether it was saved or not."""
    victim = random.choice(run.all_workers())
    run.signal(run.parent.pid, signal.SIGTERM)
    time.sleep(random.uniform(0, 0.3))
    hurt_s = run.signal(victim, signal.SIGKILL)
    return _stopped_somehow(run, hurt_s, (PREEMPTED, NOT_SAVED))


def ask_to_stop_in_start(run: Run, random: Random) -> float:
    """SIGTERM to a new parent, before the first steps of its workers."""
    run.signal(run.parent.pid, signal.SIGKILL)
    if (code := run.exit_code()) != -signal.SIGKILL:
        run.finish_or_fail(code)
    run.start()
    time.sleep(random.uniform(0.1, 4))
    asked_s = run.signal(run.parent.pid, signal.SIGTERM)
    return _stopped_somehow(run, asked_s, (PREEMPTED, NOT_SAVED, -signal.SIGTERM))


def ask_to_save(run: Run, random: Random) -> float:
    """SIGUSR1 to the parent or a worker: an unscheduled checkpoint must follow."""
    workers = run.all_workers()
    target = random.choice([run.parent.pid, *workers])
    asked_s = run.signal(target, signal.SIGUSR1)

    def saved() -> bool:
        return any(not is_scheduled(event["step"]) for event in run.since(asked_s, "checkpoint"))

    for _ in range(4):  # it may coincide with a scheduled one
        try:
            run.until(saved, "a requested checkpoint", limit_s=8)
            break
        except Failed:
            run.signal(target, signal.SIGUSR1)
    else:
        raise Failed(f"pid {target} received four requests for a checkpoint and wrote none")
    return run.undisturbed_s(asked_s, workers)


def damage_newest(run: Run, random: Random) -> float:
    """Flip a bit, truncate or delete a file, then kill: the run must resume from the older checkpoint.

    The leader is suspended first, so that the damaged checkpoint remains the newest.
    """
    folder = run.run_dir / CHECKPOINTS
    run.until(lambda: len(list(folder.glob("step-*"))) >= 2, "two checkpoints exist")
    workers = run.all_workers()
    run.signal(workers[0], signal.SIGSTOP)
    run.until(lambda: _is_stopped(workers[0]), "the leader is stopped", limit_s=10)
    first, second = sorted(folder.glob("step-*"), reverse=True)[:2]
    run.damaged.append(first.name)
    damage(random.choice(sorted(first.iterdir())), random)
    if random.random() < 0.5:
        hurt_s = run.signal(workers[0], signal.SIGKILL)
        run.wait_for_restart(workers[0])
        seconds = run.recovery_s(hurt_s)
    else:
        hurt_s = run.signal(run.parent.pid, signal.SIGKILL)
        seconds = _go_on_after_kill(run, hurt_s)
    taken = [event["path"] for event in run.since(hurt_s, "restart")]
    if not taken or Path(taken[0]).name != second.name:
        raise Failed(f"{first.name} was damaged and {second.name} intact, but the run resumed from {taken}")
    return seconds


def damage(file: Path, random: Random) -> None:
    """Damage the file in place, in one of three ways."""
    size_bytes = file.stat().st_size
    how = random.choice(("flip", "cut", "remove"))
    if how == "remove":
        file.unlink()
    elif how == "cut":
        os.truncate(file, random.randrange(size_bytes))
    else:
        with open(file, "r+b") as opened:
            opened.seek(place := random.randrange(size_bytes))
            byte = opened.read(1)[0]
            opened.seek(place)
            opened.write(bytes([byte ^ 1 << random.randrange(8)]))


def fill_disk(run: Run, random: Random) -> float:
    """Fill the disk until the run warns: it must continue, and save again later."""
    workers = run.all_workers()
    filler = run.run_dir / CHECKPOINTS / FILLER
    hurt_s, run.hurt = time.time(), True
    try:
        _fill(filler)
        run.until(lambda: _could_not_save(run, hurt_s), "the run says that it cannot save")
        time.sleep(random.uniform(0, 1))
    finally:
        filler.unlink(missing_ok=True)
    return _saves_again(run, hurt_s, workers)


def limit_files(run: Run, random: Random) -> float:
    """Limit the leader's file size below that of the weights, for a while."""
    workers = run.all_workers()
    hurt_s, run.hurt = time.time(), True
    try:
        before = resource.prlimit(workers[0], resource.RLIMIT_FSIZE)
        resource.prlimit(workers[0], resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, before[1]))
        run.until(lambda: _could_not_save(run, hurt_s), "the run says that it cannot save")
        resource.prlimit(workers[0], resource.RLIMIT_FSIZE, before)
    except ProcessLookupError:  # it has ended
        run.until(lambda: False, "the run is done")
    return _saves_again(run, hurt_s, workers)


AT_THE_END = "SIGKILL of any process after the last step"  # once in each round
FAULTS: dict[str, Fault] = {
    "SIGKILL of a worker": kill_worker,
    "SIGKILL of a worker, and again while it restarts": kill_worker_twice,
    "SIGKILL of the leader within a save": kill_in_a_save,
    "SIGKILL of the parent": kill_parent,
    "SIGSTOP of a worker for good": stop_worker,
    "SIGSTOP of a worker for less than a stall": pause_worker,
    "a slow rank": slow_rank,
    "SIGTERM to the parent": ask_parent_to_stop,
    "SIGTERM to one worker": ask_worker_to_stop,
    "SIGTERM to the parent, and SIGKILL of a worker": ask_to_stop_and_kill,
    "SIGTERM to the parent while it starts": ask_to_stop_in_start,
    "SIGUSR1": ask_to_save,
    "damage to the newest checkpoint, and a kill": damage_newest,
    "a full disk": fill_disk,  # where one can be mounted
    "a limit on the size of files": limit_files,
    AT_THE_END: kill_at_the_end,
}
QUICK = (
    "SIGKILL of a worker",
    "damage to the newest checkpoint, and a kill",
    "SIGTERM to one worker",
    "a limit on the size of files",
)


def _go_on_after_kill(run: Run, hurt_s: float) -> float:
    code = run.exit_code()
    if code == 0:
        raise Finished
    if code != -signal.SIGKILL:
        raise Failed(f"the parent was killed, but its exit code is {code}")
    return _given_again(run, hurt_s)


def _stopped(run: Run, asked_s: float) -> float:
    """Expect exit 75 and a checkpoint of the last step; then run the same command again."""
    code = run.exit_code()
    if code == 0:  # it was already done
        raise Finished
    if code != PREEMPTED:
        raise Failed(f"the run was asked to stop, but its exit code is {code}")
    status, newest = run.status(), run.newest_checkpoint()
    if (status["state"], status["exit"], status["step"]) != ("stopped", PREEMPTED, newest):
        raise Failed(f"status.json of the stopped run, whose newest checkpoint is {newest}: {status}")
    return _given_again(run, asked_s)


def _stopped_somehow(run: Run, asked_s: float, codes: tuple[int, ...]) -> float:
    code = run.exit_code()
    if code not in codes:
        run.finish_or_fail(code)
    return _given_again(run, asked_s)


def _given_again(run: Run, since_s: float) -> float:
    """Run the same command; returns the seconds from the fault to its first step."""
    given_s = time.time()
    run.start()
    return given_s - since_s + run.recovery_s(given_s)


def _is_stopped(pid: int) -> bool:
    """Apply to all threads, including the one that writes checkpoints."""
    try:
        return all(state_of(int(task)) == "T" for task in os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return False


def _fill(file: Path) -> None:
    with open(file, "wb", buffering=0) as filler:
        for size_bytes in (1 << 20, 1 << 12):
            try:
                while True:
                    filler.write(bytes(size_bytes))
            except OSError:
                continue


def _could_not_save(run: Run, since_s: float) -> bool:
    return any("cannot be written" in event["text"] for event in run.since(since_s, "warning"))


def _saves_again(run: Run, hurt_s: float, workers: list[int]) -> float:
    freed_s = time.time()
    run.until(lambda: run.since(freed_s, "checkpoint"), "the run saves again")
    return run.undisturbed_s(hurt_s, workers)
