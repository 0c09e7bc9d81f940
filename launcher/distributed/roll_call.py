"""Collects through the store where each rank of a job is, once one of them has waited too long.

Owns the keys of request and answers, and the conclusion. A rank that does not answer hangs while holding the
GIL, was stopped, or is gone. Imports no torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from launcher.distributed.env import numbered
from launcher.distributed.heartbeat import FINISHING, Beat, where

if TYPE_CHECKING:
    import torch.distributed as dist

ANSWER_S = 4.0  # for all ranks, whose watchdogs look for a question every second
POLL_EVERY_S = 0.1  # of the answers, which come within the second between two polls of a watchdog
# Phases before the end of the first step that may be long and in which no rank waits for another.
LOCAL = frozenset({"starting", "loading data", "building the model", "restoring", "data", "compute"})
LIMITS = "launch.stall_s (before the end of the first step launch.init_timeout_s) says how long ranks wait."


class RollCall:
    """One rank's part in the roll calls of a job. Every method raises DistError if the store is gone."""

    def __init__(self, store: dist.Store, job: str, rank: int, world_size: int) -> None:
        from torch.distributed import PrefixStore

        self._store = PrefixStore(f"job/{job}/roll_call", store)
        self._rank, self._world_size = rank, world_size
        self._answered = 0

    def answer(self, beat: Beat) -> None:
        """Record where this rank is, if another has asked since the last call."""
        number = int(self._store.get("number")) if self._store.check(["number"]) else 0
        if number > self._answered:
            self._answered = number
            self._store.set(f"{number}/{self._rank}", json.dumps(asdict(beat)))

    def ask(self, beat: Beat) -> dict[int, Beat | None]:
        """Where each rank is, by rank: None if it has left the job. Ranks that do not answer are missing."""
        self._store.add("number", 1)
        self.answer(beat)
        deadline, found = time.monotonic() + ANSWER_S, self._found()
        while len(found) < self._world_size and time.monotonic() < deadline:
            time.sleep(POLL_EVERY_S)
            self.answer(beat)  # two ranks that ask at the same time both use the later roll call
            found = self._found()
        return found

    def leave(self) -> None:
        """Record that this rank has left the job and will not answer."""
        self._store.set(f"left/{self._rank}", "")

    def _found(self) -> dict[int, Beat | None]:
        found: dict[int, Beat | None] = {}
        for rank in range(self._world_size):
            key = f"{self._answered}/{rank}"
            if self._store.check([key]):
                found[rank] = Beat(**json.loads(self._store.get(key)))
            elif self._store.check([f"left/{rank}"]):
                found[rank] = None
        return found


def missing(places: Mapping[int, Beat | None], world_size: int) -> list[int]:
    """The ranks that have not answered."""
    return [rank for rank in range(world_size) if rank not in places]


def who_stalls(places: Mapping[int, Beat | None], world_size: int, under_way: bool) -> str:
    """Which ranks the others wait for, as an error; empty if no rank waits for another.

    `under_way` after the first step. Before it, ranks that all load or build do not wait for each other.
    """
    if silent := missing(places, world_size):
        others = "; ".join(f"rank {rank} is {where(beat)}" for rank, beat in places.items() if beat)
        return f"{numbered(silent)} does not answer: it hangs, was stopped, or is gone ({others}). {LIMITS}"
    behind = last_ranks(places)
    beat = next(iter(behind.values()))
    place = f"{where(beat)} for {max(each.age_s for each in behind.values()):.0f} s"
    present = [each for each in places.values() if each is not None]
    if len(behind) == len(present) and beat.phase in (FINISHING if under_way else LOCAL | FINISHING):
        return ""
    if len(behind) < world_size:
        return f"{numbered(list(behind))} hangs: {place}. {LIMITS}"
    return f"all ranks wait {place}: the network or a device stalls. {LIMITS}"


def last_ranks(places: Mapping[int, Beat | None]) -> dict[int, Beat]:
    """The ranks that answered and are behind all others, or all if they are at the same place."""
    beats = {rank: beat for rank, beat in places.items() if beat is not None}
    last = min(beat.order for beat in beats.values())
    return {rank: beat for rank, beat in beats.items() if beat.order == last}
