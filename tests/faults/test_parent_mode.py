"""Parent mode with real workers that crash, hang or ignore signals."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from textwrap import indent

import pytest

from launcher.os.signals import ONE_REQUEST_S
from tests.faults.parent import BUFFERED, ENDLESS, Parent, is_alive, state_of, write_recipe
from tests.limits import at_most

pytestmark = pytest.mark.timeout(60)
LONG = "train.epochs=100000"


def gone_within(pids: list[int], timeout_s: float) -> bool:
    deadline = time.monotonic() + at_most(timeout_s)
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


def error_of(parent: Parent) -> str:
    """The one error that it printed."""
    (line,) = [line for line in parent.stderr.splitlines() if line.startswith("error:")]
    return line


def assert_written_down(parent: Parent, exit_code: int) -> None:
    """The run's files say the same as the exit code."""
    status, result = parent.json("status.json"), parent.json("result.json")
    assert (status["state"], status["exit"]) == ("failed", exit_code)
    assert (result["state"], result["exit"]) == ("failed", exit_code)
    assert f"error: {result['error']}" in parent.stderr


# A run that nothing happens to


def test_a_run_ends_with_its_result_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    with Parent(tmp_path, "train.epochs=2") as parent:
        assert parent.end() == 0
        assert parent.stderr == ""
        assert parent.stdout.count("workers 2 (2 x CPU") == 1
        assert parent.stdout.count(BUFFERED) == 1
        assert parent.json("result.json")["world_size"] == 2
        assert parent.json("status.json")["state"] == "done"
        assert {path.name for path in (parent.run_dir / "logs").iterdir()} == {"rank0.log", "rank1.log"}


# G1: a crashed worker ends or restarts the job at once


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_at_once_and_is_named(tmp_path: Path, rank) -> None:
    write_recipe(tmp_path, ENDLESS)
    with Parent(tmp_path, LONG, nproc=3) as parent:
        victim = parent.rank(rank)
        others = [pid for pid in parent.workers() if pid != victim]
        assert len(others) == 2
        os.kill(victim, signal.SIGKILL)
        assert gone_within(others, 2)
        assert parent.end() == 1
        place = r"in (compute|communication|update|report) of step \d+"
        assert re.match(
            rf"error: rank {rank} was killed by SIGKILL \(pid {victim}\) {place}\.", error_of(parent)
        )
        assert_written_down(parent, 1)
        assert parent.json("status.json")["total_steps"], "what the leader wrote about the way stays"


@pytest.mark.slow
def test_a_rank_that_raises_alone_is_the_culprit_and_not_who_lost_it(tmp_path: Path) -> None:
    write_recipe(tmp_path, "if step == 5 and RANK == 2: raise DataError('a fault on purpose')")
    with Parent(tmp_path, LONG, "launch.max_restarts=3", nproc=3) as parent:
        assert parent.end() == 7
        assert error_of(parent) == "error: rank 2 failed: a fault on purpose"
        assert "restart" not in parent.stderr, "bad data stay bad"
        assert_written_down(parent, 7)


@pytest.mark.parametrize("code", [0, pytest.param(3, marks=pytest.mark.slow), 75])
def test_a_rank_that_leaves_without_a_word_has_not_succeeded(tmp_path: Path, code) -> None:
    write_recipe(tmp_path, f"if step == 5 and RANK == 1: os._exit({code})")
    with Parent(tmp_path, LONG) as parent:
        assert parent.end() == 1
        how = rf"ended with exit code {code} and no error, in compute of step 5"
        assert re.match(rf"error: rank 1 \(pid \d+\) {how}", error_of(parent))


# Restarts, and G3: crash loops stop


def test_a_crash_is_mended_by_a_restart_from_the_newest_checkpoint_and_ends_bit_equal(tmp_path: Path) -> None:
    words, results = ("train.epochs=10", "checkpoint.every_steps=2", "launch.max_restarts=2"), []
    for name, kills in (("whole", 0), ("killed", 2)):
        (tmp_path / name).mkdir()
        write_recipe(tmp_path / name, ENDLESS)
        with Parent(tmp_path / name, *words) as parent:
            for attempt in range(kills):
                os.kill(parent.rank(1, attempt), signal.SIGKILL)
            assert parent.end() == 0
            results.append(parent.json("result.json"))
            assert parent.json("status.json")["state"] == "done"
    first, second = [line for line in parent.stderr.splitlines() if line.startswith("restart")]
    assert first.startswith("restart 1 of 2: rank 1 was killed by SIGKILL (pid ")
    assert second.startswith("restart 2 of 2: ")
    assert second.endswith(" (checkpoint)"), second
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["steps"] == results[1]["steps"] == 40


@pytest.mark.slow
def test_the_last_crash_says_what_was_restarted_and_how_to_resume(tmp_path: Path) -> None:
    write_recipe(tmp_path, "if step == 5 and RANK == 1: os._exit(9)")
    with Parent(tmp_path, LONG, "launch.max_restarts=1", "run.dir=run") as parent:
        assert parent.end() == 1
        assert parent.stderr.count("restart 1 of 1: rank 1 (pid ") == 1
        again = f"the same command with run.dir={tmp_path}/run begins anew. Restarted 1 time"
        assert error_of(parent).endswith(f"There is no checkpoint: {again} (launch.max_restarts=1).")


def test_an_error_of_the_recipe_is_not_restarted(tmp_path: Path) -> None:
    write_recipe(tmp_path, "if step == 5 and RANK == 1: raise RuntimeError('a fault on purpose')")
    with Parent(tmp_path, LONG, "launch.max_restarts=3") as parent:
        assert parent.end() == 1
        assert "restart" not in parent.stderr
        assert error_of(parent).startswith("error: rank 1 failed: the recipe's loss")
        assert_written_down(parent, 1)


@pytest.mark.slow
def test_a_crash_loop_stops_after_three_attempts_without_a_checkpoint(tmp_path: Path) -> None:
    write_recipe(tmp_path, "if step == 5 and RANK == 1: os.kill(os.getpid(), signal.SIGKILL)")
    with Parent(tmp_path, LONG, "launch.max_restarts=50") as parent:
        assert parent.end() == 10
        assert parent.stderr.count("restart ") == 2
        assert error_of(parent).startswith("error: the workers were started 3 times in a row and have failed")
        assert "The last time rank 1 was killed by SIGKILL" in error_of(parent)
        assert_written_down(parent, 10)


@pytest.mark.slow
def test_checkpoints_are_progress(tmp_path: Path) -> None:
    publish = "os.makedirs(f'run/checkpoints/step-{GENERATION + 1:08}')"
    write_recipe(tmp_path, f"if step == 5 and RANK == 1:\n    {publish}\n    os._exit(1)")
    with Parent(tmp_path, LONG, "run.dir=run", "checkpoint.resume=never", "launch.max_restarts=3") as parent:
        assert parent.end(30) == 1
        assert parent.stderr.count("restart ") == 3
        assert "resuming from step 3 (checkpoint)" in parent.stderr


@pytest.mark.slow
def test_a_run_begins_anew_after_a_crash_before_its_checkpoints_were_set_aside(tmp_path: Path) -> None:
    write_recipe(tmp_path, in_build="if GENERATION == 0: os._exit(1)")
    old = tmp_path / "run" / "checkpoints" / "step-00000100"
    old.mkdir(parents=True)
    words = ("train.epochs=1", "run.dir=run", "checkpoint.resume=never", "launch.max_restarts=1")
    with Parent(tmp_path, *words) as parent:
        assert parent.end(30) == 0
        assert parent.stderr.count("restart ") == 1
    assert [path.name for path in old.parent.glob("*-00000100")] == ["replaced-step-00000100"]


# G11: ignored requests to stop still end


DEAF = (
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + ENDLESS
)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_workers_that_ignore_a_request_to_stop_are_killed_at_the_grace(tmp_path: Path, number, code) -> None:
    write_recipe(tmp_path, DEAF)
    with Parent(tmp_path, LONG, "launch.grace_s=1", "launch.max_restarts=3") as parent:
        parent.rank(0)
        asked = time.monotonic()
        parent.signal(number)
        assert parent.end() == code
        assert 1 <= time.monotonic() - asked < at_most(3)
        assert error_of(parent).startswith(
            f"error: stopped by {number.name} before a checkpoint could be written: rank 0 (pid "
        )
        assert "rank 1" in error_of(parent)
        again = f"There is no checkpoint: the same command with run.dir={parent.run_dir} begins anew."
        assert again in error_of(parent)
        assert_written_down(parent, code)


CRASHES_ONCE_SAVED = """
import logging
class Crash(logging.Handler):
    def emit(self, record):
        if "on request; checkpoint saved" in record.getMessage():
            os.kill(os.getpid(), signal.SIGSEGV)
logging.getLogger("launcher").addHandler(Crash())
"""


def test_a_crash_after_the_checkpoint_of_a_stop_is_no_good_end(tmp_path: Path) -> None:
    """A rank that dies without an exit record was taken for one that was killed once all was saved."""
    write_recipe(tmp_path, ENDLESS, f"if RANK == 1:\n{indent(CRASHES_ONCE_SAVED, '    ')}")
    with Parent(tmp_path, LONG, "launch.max_restarts=3") as parent:
        parent.rank(1)
        parent.signal(signal.SIGTERM)
        assert parent.end() == 143
        assert error_of(parent).startswith(
            "error: stopped by SIGTERM after the last checkpoint: rank 1 was killed by SIGSEGV"
        )
        assert "To resume from step " in error_of(parent)
        assert_written_down(parent, 143)


@pytest.mark.slow
def test_a_stopped_worker_is_killed_at_the_grace(tmp_path: Path) -> None:
    write_recipe(tmp_path, ENDLESS)
    with Parent(tmp_path, LONG, "launch.grace_s=1") as parent:
        os.kill(parent.rank(1), signal.SIGSTOP)
        parent.signal(signal.SIGTERM)
        assert parent.end() == 143


@pytest.mark.slow
def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    note = "signal.signal(signal.SIGINT, lambda *_: open(f'told-{RANK}', 'w').close())"
    write_recipe(tmp_path, f"{note}; signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])\n{ENDLESS}")
    with Parent(tmp_path, LONG, "launch.grace_s=600") as parent:
        parent.rank(0)
        parent.signal(signal.SIGINT)
        parent.signal(signal.SIGINT)  # the same request: a terminal and a script both pass it on
        parent.wait_until((tmp_path / "told-0").exists, 15, "the parent has passed the first one on")
        time.sleep(ONE_REQUEST_S)
        assert len(parent.workers()) == 2
        parent.signal(signal.SIGINT)
        assert parent.end() == 130


@pytest.mark.slow
def test_a_hangup_stops_like_sigterm(tmp_path: Path) -> None:
    write_recipe(tmp_path, ENDLESS)
    with Parent(tmp_path, LONG) as parent:
        parent.rank(0), parent.rank(1)
        parent.signal(signal.SIGHUP)
        assert parent.end() == 75
        step = parent.json("status.json")["step"]
        assert (parent.run_dir / "checkpoints" / f"step-{step:08d}").is_dir()


@pytest.mark.slow
def test_a_request_to_save_reaches_the_workers(tmp_path: Path) -> None:
    note = "signal.signal(signal.SIGUSR1, lambda *_: open(f'saved-{RANK}', 'w').close())"
    write_recipe(tmp_path, f"{note}; signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])\n{ENDLESS}")
    with Parent(tmp_path, LONG) as parent:
        parent.rank(0), parent.rank(1)
        parent.signal(signal.SIGUSR1)
        files = [tmp_path / "saved-0", tmp_path / "saved-1"]
        parent.wait_until(lambda: all(file.exists() for file in files), 15, "both ranks were told")
        assert len(parent.workers()) == 2


# G12: a hung rank is found by name


HANGS = {
    "an endless sleep": "time.sleep(1000)",
    "a call that holds the interpreter": "lock = LIBC.pthread_mutex_lock; lock(MUTEX), lock(MUTEX)",
    # The parent continues it to have its stacks written: it must not have left the place by then.
    "SIGSTOP": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1000)",
}


@pytest.mark.parametrize(
    "hang", [pytest.param(name, marks=[pytest.mark.slow] if "sleep" in name else []) for name in HANGS]
)
def test_a_hung_rank_is_named_with_its_phase_and_all_stacks(tmp_path: Path, hang) -> None:
    write_recipe(tmp_path, f"{ENDLESS}\nif step == 7 and RANK == 1: open('hung', 'w').close(); {HANGS[hang]}")
    with Parent(tmp_path, LONG, "launch.hang_timeout_s=2", nproc=3) as parent:
        parent.wait_until((tmp_path / "hung").exists, 15, "rank 1 hangs")
        hung = time.monotonic()
        assert parent.end() == 6
        assert time.monotonic() - hung < at_most(2 + 2)
        place = r" at \S+:\d+, in in_step"
        if hang == "SIGSTOP":  # another thread than the stopped one may write the stacks
            place = rf" \(stopped by SIGSTOP\)({place})?"
        assert re.match(
            rf"error: rank 1 \(pid \d+\) hangs: in compute of step 7 for 2 s{place}"
            r"; stacks of all ranks: \S+\. launch\.hang_timeout_s says how long a rank may be without ",
            error_of(parent),
        )
        assert_written_down(parent, 6)
        stacks = [(parent.run_dir / "logs" / f"stacks-rank{rank}.txt").read_text() for rank in range(3)]
        assert all("most recent call first" in text for text in stacks)
        assert "in in_step" in stacks[1]
        assert "in in_step" not in stacks[0] + stacks[2]


@pytest.mark.slow
def test_a_hang_in_evaluation_and_in_the_first_step_is_found_too(tmp_path: Path) -> None:
    """The trial of the metrics before the first step is no evaluation after one, whoever looks at it."""
    write_recipe(tmp_path, "if step == 1 and RANK == 0: time.sleep(1000)")
    recipe = (tmp_path / "tiny.py").read_text()
    slow_trial = "    if not network.training: time.sleep(0.3)\n    if network.training:"
    (tmp_path / "tiny.py").write_text(recipe.replace("    if network.training:", slow_trial))
    with Parent(tmp_path, LONG, "launch.hang_timeout_s=1", "launch.init_timeout_s=8") as parent:
        assert parent.end() == 6
        assert 8 < time.monotonic() - parent.began < at_most(16)
        assert "rank 0 (pid" in error_of(parent)
        assert "in compute of step 1 for" in error_of(parent)


@pytest.mark.slow
def test_a_stopped_parent_takes_no_rank_for_hung(tmp_path: Path) -> None:
    """Ctrl-Z and fg stop and continue the parent and its workers together."""
    write_recipe(tmp_path, ENDLESS)
    with Parent(tmp_path, LONG, "launch.hang_timeout_s=2") as parent:
        parent.rank(0)
        everyone = [parent.pid, *parent.workers()]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(parent.pid, signal.SIGCONT)
        time.sleep(0.5)  # the parent looks before its workers have moved
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        time.sleep(1)
        assert parent.workers() == everyone[1:]


# G13: start-up cannot deadlock


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGKILL, 1, r"rank 1 was killed by SIGKILL \(pid \d+\) while "),
        (
            signal.SIGSTOP,
            6,
            r"rank 1 \(pid \d+\) hangs: while (starting|meeting the other ranks) for \d s \(stopped",
        ),
    ],
)
def test_a_rank_that_does_not_come_up_is_named(tmp_path: Path, number, code, text) -> None:
    write_recipe(tmp_path)
    with Parent(tmp_path, LONG, f"launch.init_timeout_s={at_most(2)}") as parent:
        while len(parent.workers()) < 2:
            time.sleep(0.0005)
        os.kill(parent.workers()[1], number)
        began = time.monotonic()
        assert parent.end() == code
        assert time.monotonic() - began < at_most(4)
        assert re.match(f"error: {text}", error_of(parent))


# G14: no orphans


@pytest.mark.slow
def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    write_recipe(tmp_path, DEAF)
    with Parent(tmp_path, LONG) as parent:
        workers = [parent.rank(0), parent.rank(1)]
        os.kill(workers[1], signal.SIGSTOP)
        parent.signal(signal.SIGKILL)
        assert gone_within(workers, 2), [state_of(pid) for pid in workers]


# G21, G22: jobs on one machine do not meet, and nothing listens off it


@pytest.mark.slow
def test_three_at_once_in_one_folder_finish_in_folders_of_their_own(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    words = ("train.epochs=2",)
    with (
        Parent(tmp_path, *words, name="a") as a,
        Parent(tmp_path, *words, name="b") as b,
        Parent(tmp_path, *words, name="c") as c,
    ):
        assert [each.end(40) for each in (a, b, c)] == [0, 0, 0]
    runs = list((tmp_path / "outputs" / "resnet18").iterdir())
    assert len(runs) == 3
    assert all('"done"' in (run / "result.json").read_text() for run in runs)


def test_nothing_listens_off_the_machine(tmp_path: Path) -> None:
    write_recipe(tmp_path, ENDLESS)
    with Parent(tmp_path, LONG) as parent:
        parent.rank(0)
        listening = {address for pid in (parent.pid, *parent.workers()) for address in listening_of(pid)}
        assert listening, "Gloo's own sockets are found"
        assert all(address in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for address in listening), listening


def listening_of(pid: int) -> set[str]:
    """The addresses on which a process listens, from the kernel's table."""
    import ipaddress

    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                found.add(str(ipaddress.ip_address(words)))
    return found


# Sweeps


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_job_whose_rank_was_killed(tmp_path: Path) -> None:
    write_recipe(
        tmp_path,
        "if step == 5 and RANK == 1 and not os.path.exists('killed'):\n"
        "    open('killed', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)",
    )
    words = ("-m", "train.epochs=2", "seed=0,1", "hydra.sweep.dir=sweep")
    with Parent(tmp_path, *words) as parent:
        assert parent.end() == 1
        assert parent.stderr.count("was killed by SIGKILL") == 1
        assert "sweep: 1 of 2 jobs done" in parent.stdout
    states = [path.read_text() for path in sorted((tmp_path / "sweep").glob("*/result.json"))]
    assert ['"done"' in text for text in states] == [False, True]


@pytest.mark.slow
def test_a_sweep_that_is_asked_to_stop_starts_no_further_job(tmp_path: Path) -> None:
    write_recipe(tmp_path, DEAF)
    with Parent(tmp_path, "-m", LONG, "seed=0,1", "hydra.sweep.dir=sweep", "launch.grace_s=0.5") as parent:
        parent.rank(0)
        parent.signal(signal.SIGTERM)
        assert parent.end() == 143
        assert "sweep: job 1 of 2" in parent.stdout
        assert "sweep: job 2 of 2" not in parent.stdout
