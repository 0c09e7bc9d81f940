"""What runs next, what a job's end means, and when a sweep stops: with a launcher that runs nothing."""

from __future__ import annotations

import dataclasses
import errno
import json
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from launcher.commands.sweep import exit_code_of
from launcher.config.schema import SweepConfig
from launcher.errors import ConfigError
from launcher.os.signals import StopSignal
from launcher.run_dir.pruning import PRUNE
from launcher.run_dir.records import write_result
from launcher.run_dir.result import Failure
from launcher.sweep.asha import Pruner
from launcher.sweep.launchers import JobEvent
from launcher.sweep.progress import SweepProgress
from launcher.sweep.scheduler import Scheduler
from launcher.sweep.search import Searching
from launcher.sweep.state import JobState, SweepJob, SweepState, recover
from tests.configs import composed


class Scripted:
    """Ends one job at each look, with the exit codes that a test lists for its number; 0 after them."""

    def __init__(self, room: int, **codes: Sequence[int]) -> None:
        self.room, self.codes = room, {int(key[1:]): [*listed] for key, listed in codes.items()}
        self.running: dict[int, Path] = {}
        self.stopped: dict[int, bool] = {}
        self.saved: list[int] = []
        self.most = 0
        self.order: list[int] = []
        self.on_poll: Callable[[], None] = lambda: None

    def has_capacity(self, job: SweepJob) -> bool:
        return len(self.running) < self.room

    def submit(self, job: SweepJob, directory: Path) -> None:
        self.running[job.number] = directory
        self.order.append(job.number)
        self.most = max(self.most, len(self.running))

    def poll(self, wait_s: float) -> Sequence[JobEvent]:
        self.on_poll()
        if not self.running:
            return []
        number, directory = next(iter(self.running.items()))
        del self.running[number]
        codes = self.codes.get(number)
        code = 75 if number in self.stopped else codes.pop(0) if codes else 0
        if code:
            directory.mkdir(exist_ok=True)
            write_result(directory, Failure("failed", code, f"reason {number}\nmore"))
        return [JobEvent(number, code)]

    def stop(self, job: SweepJob, at_once: bool = False) -> None:
        self.stopped[job.number] = at_once

    def save(self, job: SweepJob) -> None:
        self.saved.append(job.number)

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *error: object) -> None: ...


class Run:
    """A scheduler with its parts, run to its end."""

    def __init__(
        self,
        directory: Path,
        launcher: Scripted,
        number: int,
        on_poll: Callable[[Run], None] | None = None,
        **keys: object,
    ) -> None:
        stop = dataclasses.replace(composed().sweep.stop, **keys.pop("stop", {}))  # type: ignore[arg-type]
        settings: SweepConfig = dataclasses.replace(composed().sweep, stop=stop, **keys)  # type: ignore[arg-type]
        jobs = [SweepJob(each, f"{each}_seed={each}", (f"seed={each}",)) for each in range(number)]
        self.directory, self.launcher, self.record = directory, launcher, SweepState(jobs, ())
        self.signals = StopSignal()
        if on_poll is not None:
            launcher.on_poll = lambda: on_poll(self)
        self.progress = SweepProgress(directory, jobs, alone=False)
        self.settings = settings
        self.record.write(directory)
        self.again()

    def again(self) -> None:
        self.scheduler = Scheduler(
            self.directory,
            self.record,
            self.launcher,
            self.settings,
            self.progress,
            self.signals,
        )
        self.scheduler.run()

    @property
    def states(self) -> list[str]:
        recorded = json.loads((self.directory / "sweep.json").read_text())["jobs"]
        assert [job["state"] for job in recorded] == [job.state for job in self.record.jobs]
        return [job.state for job in self.record.jobs]


def test_there_is_always_as_much_running_as_there_is_room_for(tmp_path) -> None:
    run = Run(tmp_path, Scripted(3), 10)
    assert run.states == ["done"] * 10
    assert (run.launcher.most, run.launcher.order) == (3, [*range(10)])


def test_jobs_that_end_at_once_are_not_stopped_for_the_failure_of_one(tmp_path) -> None:
    class AllAtOnce(Scripted):
        def poll(self, wait_s: float) -> Sequence[JobEvent]:
            return [change for _ in [*self.running] for change in super(AllAtOnce, self).poll(wait_s)]

        def stop(self, job: SweepJob, at_once: bool = False) -> None:
            super().stop(job, at_once)
            assert job.number in self.running, "the launcher has forgotten it"

    run = Run(tmp_path, AllAtOnce(2, n0=[7]), 4, on_failure="stop")
    assert run.states == ["failed", "done", "waiting", "waiting"]


def test_a_job_that_fails_is_told_at_once_and_the_others_run(tmp_path, capsys) -> None:
    run = Run(tmp_path, Scripted(1, n1=[7]), 3)
    assert run.states == ["done", "failed", "done"]
    lines = capsys.readouterr().err
    assert "job 2 of 3 failed" in lines
    assert "exit 7: reason 1" in " ".join(lines.split())
    assert run.record.jobs[1].exit == 7


def test_a_failure_can_stop_the_sweep(tmp_path) -> None:
    run = Run(tmp_path, Scripted(2, n0=[7]), 4, on_failure="stop")
    assert run.states == ["failed", "stopped", "waiting", "waiting"]
    assert run.launcher.stopped == {1: False}
    assert "sweep.on_failure=stop" in run.scheduler.reason


@pytest.mark.parametrize(
    ("retries", "codes", "state", "attempts"),
    [
        (0, [1], "failed", 1),
        (1, [1], "done", 2),
        (2, [137, 6, 1], "failed", 3),
        (2, [5, 5], "failed", 1),  # diverged: another attempt would too
        (2, [2, 2], "failed", 1),  # the config
    ],
)
def test_a_job_that_failed_is_tried_again(tmp_path, retries, codes, state, attempts) -> None:
    run = Run(tmp_path, Scripted(2, n0=codes), 2, retries=retries)
    assert run.states == [state, "done"]
    assert run.record.jobs[0].attempts == attempts


def test_a_signal_stops_all_jobs_and_the_next_process_runs_the_rest(tmp_path) -> None:
    def interrupt(run: Run) -> None:
        if run.signals.stop is None:
            run.signals.handler(signal.SIGINT)

    run = Run(tmp_path, Scripted(2), 4, on_poll=interrupt)
    assert run.states == ["done", "stopped", "waiting", "waiting"]
    assert run.launcher.stopped == {1: False}
    run.launcher.on_poll, run.launcher.stopped, run.signals = lambda: None, {}, StopSignal()
    recover(run.record, tmp_path)
    run.again()
    assert run.states == ["done"] * 4
    assert [job.attempts for job in run.record.jobs] == [1, 2, 1, 1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_request_to_save_reaches_the_jobs_that_run_and_stops_none(tmp_path, number) -> None:
    def ask(run: Run) -> None:
        if len(run.launcher.order) == 3:
            run.signals.handler(number)

    run = Run(tmp_path, Scripted(2), 4, on_poll=ask)
    assert run.launcher.saved == [2]  # job 1 has ended with that look, and job 3 has not started
    assert run.states == ["done"] * 4


def test_a_second_interrupt_kills_them(tmp_path) -> None:
    def interrupt(run: Run) -> None:
        run.signals.handler(signal.SIGINT)
        run.signals._stopped_s = -10.0  # not the same keystroke, which several processes may pass on

    run = Run(tmp_path, Scripted(3), 3, on_poll=interrupt)
    assert run.launcher.stopped == {1: False, 2: True}
    assert exit_code_of(run.record, run.scheduler, ()) == 75  # all had saved
    run.record.jobs[2].exit = 137
    assert exit_code_of(run.record, run.scheduler, ()) == 130


def test_a_killed_process_leaves_a_record_from_which_the_next_continues(tmp_path) -> None:
    class Killed(Exception): ...

    def kill(run: Run) -> None:
        if len(run.launcher.order) == 3:
            raise Killed

    with pytest.raises(Killed):
        Run(tmp_path, Scripted(2), 4, on_poll=kill)
    record = SweepState.read(tmp_path)
    assert [job.state for job in record.jobs] == ["done", "running", "running", "waiting"]
    (tmp_path / record.jobs[1].name).mkdir()
    (tmp_path / record.jobs[1].name / "result.json").write_text('{"state": "done", "metric": 0.5}')
    recover(record, tmp_path)
    assert [job.state for job in record.jobs] == ["done", "done", "waiting", "waiting"]
    assert record.jobs[1].metric == 0.5


def test_of_the_jobs_that_failed_all_but_those_that_diverged_run_again(tmp_path) -> None:
    run = Run(tmp_path, Scripted(1, n0=[5], n1=[1]), 2)
    recover(run.record, tmp_path)
    assert [job.state for job in run.record.jobs] == ["failed", "waiting"]


def test_a_pruned_job_frees_its_place_and_is_no_failure(tmp_path) -> None:
    class OfOne(Pruner):
        def to_prune(self, running: Iterable[SweepJob]) -> list[SweepJob]:
            return [job for job in running if job.number == 1 and not (tmp_path / "1" / PRUNE).exists()]

    run_launcher = Scripted(2, n1=[11])
    jobs = [SweepJob(number, str(number), ()) for number in range(3)]
    (tmp_path / "1").mkdir()
    record = SweepState(jobs, ())
    progress = SweepProgress(tmp_path, jobs, alone=False)
    pruner = OfOne(tmp_path, 1, [])
    scheduler = Scheduler(tmp_path, record, run_launcher, composed().sweep, progress, StopSignal(), pruner)
    scheduler.run()
    assert [job.state for job in jobs] == ["done", "pruned", "done"]
    assert run_launcher.stopped == {}, "the job ends by the request in its folder"


def test_the_jobs_of_a_grid_start_in_shuffled_order_where_they_are_pruned(tmp_path) -> None:
    """Of a grid that is ordered from bad to good, each job would be better than those before it."""
    orders = []
    for _ in range(2):
        jobs, launcher = [SweepJob(number, str(number), ()) for number in range(9)], Scripted(1)
        progress, pruner = SweepProgress(tmp_path, jobs, alone=False), Pruner(tmp_path, 1, [])
        record, settings = SweepState(jobs, ()), composed().sweep
        Scheduler(tmp_path, record, launcher, settings, progress, StopSignal(), pruner).run()
        orders.append(launcher.order)
    assert sorted(orders[0]) == [*range(9)] != orders[0]
    assert orders[0] == orders[1], "a sweep that continues has the same order"


def test_a_trial_that_diverges_stops_no_search(tmp_path) -> None:
    class Two(Searching):
        def __init__(self, jobs: list[SweepJob]) -> None:
            self.jobs = jobs

        def next(self) -> SweepJob | None:
            number = len(self.jobs)
            self.jobs += [SweepJob(number, str(number), ())] if number < 2 else []
            return next((job for job in self.jobs if job.state == JobState.WAITING), None)

    jobs: list[SweepJob] = []
    settings = dataclasses.replace(composed().sweep, on_failure="stop")
    record, progress = SweepState(jobs, ()), SweepProgress(tmp_path, jobs, alone=False)
    scheduler = Scheduler(
        tmp_path, record, Scripted(1, n0=[5]), settings, progress, StopSignal(), None, Two(jobs)
    )
    scheduler.run()
    assert [job.state for job in jobs] == ["failed", "done"]
    assert exit_code_of(record, scheduler, (5,)) == 0


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ("failed", "job 1 of 1 failed after 0:02, exit 1: it broke. See rank0.log; output: "),
        ("waiting", "job 1 of 1 failed after 0:02 and runs again, exit 1: it broke. See rank0.log; output: "),
        ("stopped", "job 1 of 1 stopped after 0:02"),
    ],
)
def test_the_line_of_a_job_that_is_not_done_reads_as_one_sentence(tmp_path, capsys, state, line) -> None:
    job = SweepJob(0, "0", (), state=state, exit=1, error="it broke. See rank0.log.")
    job.attempts, job.seconds = 1, 2.0
    SweepProgress(tmp_path, [job], alone=False).ended(job)
    assert f"sweep: {line}" in " ".join(capsys.readouterr().err.split())


def test_a_job_that_cannot_be_asked_to_end_runs_on(tmp_path) -> None:
    class OfAll(Pruner):
        def to_prune(self, running: Iterable[SweepJob]) -> list[SweepJob]:
            return [*running]

    jobs = [SweepJob(number, str(number), ()) for number in range(3)]  # whose folders do not exist
    progress, pruner = SweepProgress(tmp_path, jobs, alone=False), OfAll(tmp_path, 1, [])
    launcher, settings = Scripted(2), composed().sweep
    Scheduler(tmp_path, SweepState(jobs, ()), launcher, settings, progress, StopSignal(), pruner).run()
    assert [job.state for job in jobs] == ["done"] * 3


def test_the_record_of_200_jobs_is_small(tmp_path) -> None:
    lines = [f"key.number{number}.of.a.section=value{number}" for number in range(12)]
    jobs = [
        SweepJob(number, "x" * 100, lines, devices=["GPU-" + "0" * 36] * 8, error="e" * 200)
        for number in range(200)
    ]
    SweepState(jobs, lines).write(tmp_path)
    assert (tmp_path / "sweep.json").stat().st_size < 1_000_000


def test_a_full_disk_ends_the_sweep_and_the_next_process_runs_the_rest(tmp_path, monkeypatch) -> None:
    write, launcher = SweepState.write, Scripted(1)

    def full(record: SweepState, directory: Path, durable: bool = False) -> None:
        if launcher.order == [0, 1]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(record, directory, durable)

    monkeypatch.setattr(SweepState, "write", full)
    with pytest.raises(OSError, match="No space left"):
        Run(tmp_path, launcher, 3)
    assert launcher.stopped == {1: False}, "it is asked to save"
    assert launcher.running == {}, "and has ended"
    launcher.stopped.clear()
    monkeypatch.undo()
    record = SweepState.read(tmp_path)
    recover(record, tmp_path)
    progress = SweepProgress(tmp_path, record.jobs, alone=False)
    Scheduler(tmp_path, record, launcher, composed().sweep, progress, StopSignal()).run()
    assert [job.state for job in record.jobs] == ["done"] * 3


def test_jobs_of_a_search_that_are_refused_are_told_and_too_many_end_it(tmp_path, capsys) -> None:
    class Refused(Searching):
        def __init__(self, jobs: list[SweepJob], good: int) -> None:
            self.jobs, self.good = jobs, good

        def next(self) -> SweepJob | None:
            number = len(self.jobs)
            job = SweepJob(number, str(number), ())
            if number != self.good:
                job.state, job.exit, job.error = JobState.FAILED, 2, "no such value"
            self.jobs.append(job)
            return job

    jobs: list[SweepJob] = []
    record, progress = SweepState(jobs, ()), SweepProgress(tmp_path, jobs, alone=True)
    launcher, search = Scripted(2), Refused(jobs, 3)
    scheduler = Scheduler(tmp_path, record, launcher, composed().sweep, progress, StopSignal(), None, search)
    with pytest.raises(ConfigError, match=r"20 jobs .* in a row cannot run\. The last: no such value"):
        scheduler.run()
    assert [job.state for job in jobs] == [*["failed"] * 3, "stopped", *["failed"] * 20]
    assert "sweep: job 3 of 3 failed, exit 2: no such value\n" in capsys.readouterr().err
    recover(record, tmp_path)
    assert [job.state for job in record.left] == ["waiting"], "the others were not to be had"
