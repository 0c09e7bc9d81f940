"""Which events of a run a tracker has, so that a resumed run sends it those that a killed attempt did not.

Owns one small file per tracker, `trackers/NAME.json`. It names the tracker's id of the run, before the
tracker starts, and the time of the newest event that the tracker has written. The file is some seconds
behind: after a kill a tracker may receive events twice, but misses none that metrics.jsonl has.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path

from launcher.run_dir.atomic import make_folder, read_json, write_json
from launcher.run_dir.records import TRACKERS
from launcher.telemetry.event_log import happened, time_of
from launcher.telemetry.events import PERIODIC, DecisionEvent
from launcher.telemetry.stream import Record

WRITTEN_S = 6.0  # until every tracker has written what it was given: wandb takes 1 s, TensorBoard's file 5 s
NOTABLE_S = 60.0  # of a run whose events a tracker lacks; ten times WRITTEN_S, which every killed run lacks
LIMIT = 500  # periodic events of a killed attempt that are kept in memory: half of a tracker's queue
NOT_SENT = ("start", "end")
OF_WANDB = ("online", "offline")  # what its decision says


def lacking(run_dir: Path, decisions: Iterable[DecisionEvent], last_event_s: float) -> dict[str, float]:
    """How many of the last seconds of a killed run each tracker lacks, by its name; inf for all of them.

    Without those that lack a few seconds, as most do. `decisions` are the run's events of that name.
    """
    modes = [event.facts.get("mode") for event in decisions if event.topic == "tracker"]
    names = dict.fromkeys("wandb" if mode in OF_WANDB else mode for mode in modes if isinstance(mode, str))
    lags = {
        name: last_event_s - (_recorded(path_of(run_dir, name))[1] or -inf)
        for name in names
        if name != "none"
    }
    return {name: lag_s for name, lag_s in lags.items() if lag_s >= NOTABLE_S}


def path_of(run_dir: Path, name: str) -> Path:
    return run_dir / TRACKERS / f"{name}.json"


def tracked_before(run_dir: Path, names: Iterable[str]) -> str:
    """The id by which these trackers know the run; "" if none does."""
    return next((run_id for name in names if (run_id := _recorded(path_of(run_dir, name))[0])), "")


class Delivery:
    """The events that the tracker of one run has.

    `after` gives the events of earlier attempts after a time. Without a file the tracker has
    none of them. So too if the file is of another `run_id`. `every`: of more than
    `LIMIT` periodic events each `every`-th of its kind is kept.
    """

    def __init__(self, path: Path, run_id: str, after: Callable[[float], Iterable[Record]]) -> None:
        self._path = path
        self._run_id = run_id
        before, until = _recorded(path)
        self._until = until if before == run_id else 0.0  # `time` of an event
        if before != run_id:
            self._write()
        self._missing, self.every = _thinned(after(self._until))
        self._latest = self._mark = self._until
        self._marked_s = time.monotonic()

    def missing(self, step: int, evaluates_again: bool) -> list[Record]:
        """The events of earlier attempts that the tracker lacks, if the run resumes after `step`. Once."""
        missing, self._missing = self._missing, []
        return [
            event
            for event in missing
            if event["event"] not in NOT_SENT and happened(event, step, evaluates_again)
        ]

    def record(self, event: Record) -> None:
        """Call it after the tracker has been given the event."""
        self._latest = max(self._latest, time_of(event))
        now_s = time.monotonic()
        if now_s - self._marked_s >= WRITTEN_S:
            self._advance(self._mark)
            self._mark, self._marked_s = self._latest, now_s

    def finish(self) -> None:
        """Call it after the tracker has written everything."""
        self._advance(self._latest)

    def _advance(self, until: float) -> None:
        if until > self._until:
            self._until = until
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # then more is sent again
            make_folder(self._path.parent)
            write_json(self._path, {"run_id": self._run_id, "time": self._until})


def _thinned(events: Iterable[Record]) -> tuple[list[Record], int]:
    """The events, of periodic ones each n-th of its kind so that no more than `LIMIT` are held; and n."""
    kept: list[tuple[int, Record]] = []  # with the number of the event among its kind; 0 if it is kept anyway
    every, periodic, seen = 1, 0, Counter[str]()
    for event in events:
        number = 0
        if (kind := event["event"]) in PERIODIC:
            seen[kind] += 1
            number = seen[kind]
        if number % every:
            continue
        kept.append((number, event))
        periodic += number > 0
        while periodic > LIMIT:
            every *= 2
            kept = [(number, event) for number, event in kept if number % every == 0]
            periodic = sum(number > 0 for number, _ in kept)
    return [event for _, event in kept], every


def _recorded(path: Path) -> tuple[str, float]:
    """The run and the time in the file; 0 without a valid one."""
    try:
        found = read_json(path)
        return str(found["run_id"]), float(found["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0.0
