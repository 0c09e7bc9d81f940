"""The stream of events of a run, and the rule that telemetry never stops training.

Owns the order in which sinks receive an event, the thread that writes the events of steps, and the handling
of a sink that fails: what it cannot write is lost, and counted, with one warning to the others. Knows no file
format and no tracker. Receives plain numbers, no tensors.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from launcher.errors import described
from launcher.telemetry.events import DecisionEvent, Event, WarningEvent

# Event, time (unix seconds), step (updates attempted so far), and the event's fields.
Record = Mapping[str, Any]

LIMIT = 10_000  # periodic events that may wait, while a disk does not answer: about 10 MB


class Sink(Protocol):
    """Receives events. May raise any exception: the event is then lost for this sink.

    Inherit it for the methods that a sink has no use for.
    """

    name: str  # as shown in warnings

    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...

    def on_step(self, epoch: int, step: int) -> None:
        """Take a step that lies between two `step` events."""
        return

    def truncate_after(self, step: int, evaluates_again: bool) -> None:
        """Go back to where the run resumes, if events of earlier processes are kept."""
        return


class Telemetry(AbstractContextManager["Telemetry"]):
    """Sends every event to every sink. Without sinks (on all ranks but 0) it does nothing, at no cost.

    May be called from any thread. No method raises because of a sink.

    With `every_s`, a thread writes periodic events and positions that often, so that they cost the caller an
    append. All other events are written before `emit` returns, after those that wait: what a checkpoint, an
    evaluation or the end of the run relies on is in the files.
    """

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        every_s: float | None = None,
    ) -> None:
        self._sinks = list(sinks)
        self._step = 0
        self._lock = threading.RLock()  # a tracker warns from its own thread
        self._waiting: deque[Event] = deque(maxlen=LIMIT)
        self._position: tuple[int, int] | None = None  # the latest that `on_step` was given
        self._draining = False
        self._failures: Counter[str] = Counter()  # by name of the sink: writes that failed
        self._closing = threading.Event()
        self._writer: threading.Thread | None = None
        if every_s is not None:
            self._writer = threading.Thread(
                target=self._write, args=(every_s,), name="telemetry", daemon=True
            )
        if self._writer is not None:
            self._writer.start()

    @property
    def step(self) -> int:
        """The step of the latest event."""
        return self._step

    def add(self, sink: Sink) -> None:
        """Later events go to this sink as well. It is closed before the sinks added earlier."""
        with self._lock:
            self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Send an event to all sinks."""
        self._step = max(self._step, event.step)  # a sampler's event may be of an earlier step
        if not self._sinks:
            return
        if self._writer is not None and event.is_periodic:
            self._waiting.append(event)
            return
        with self._lock:
            self._drain()
            self._hand_out(event)

    def flush(self) -> None:
        """Write what waits. Called before a checkpoint, so that a run that resumes from it has all events."""
        with self._lock:
            self._drain()

    def decision(self, topic: str, text: str, /, **facts: object) -> None:
        """A choice made by the program, with its reason: one line on the console."""
        self.emit(DecisionEvent(self._step, topic=topic, text=text, facts=facts))

    def warn(self, text: str) -> None:
        """A warning to all sinks; `step` is that of the latest event."""
        self.emit(WarningEvent(self._step, text=text))

    def on_step(self, epoch: int, step: int) -> None:
        """Called for every step at little cost: advances the bar and status.json, writes no event."""
        if not self._sinks:
            return
        self._position = (epoch, step)
        if self._writer is None:
            self.flush()

    def truncate_after(self, step: int, evaluates_again: bool) -> None:
        """The run resumes after `step`: events of later steps are dropped.

        With `evaluates_again`, the evaluation after `step` is dropped too.
        """
        with self._lock:
            self._drain()
            for sink in self._sinks:
                self._attempt(sink, partial(sink.truncate_after, step, evaluates_again))

    def close(self) -> None:
        """Close all sinks, the last added first, so that its errors still reach the others."""
        writer, self._writer = self._writer, None
        if writer is not None:
            self._closing.set()
            writer.join()
        self.flush()
        for name, count in list(self._failures.items()):
            if count > 1:
                self.warn(f"{name} could not be written {count:,} times: it is not complete.")
        while self._sinks:
            self.flush()
            # Not under the lock: a tracker's thread may need it for a warning while `close` waits.
            self._attempt(self._sinks[-1], self._sinks[-1].close)
            with self._lock:
                self._sinks.pop()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, every_s: float) -> None:
        while not self._closing.wait(every_s):
            if self._waiting or self._position is not None:
                self.flush()

    def _drain(self) -> None:
        """Hand out what waits, in order; the caller holds the lock."""
        if self._draining:
            return  # the warning about a sink that has just failed
        self._draining = True
        try:
            while self._waiting:
                self._hand_out(self._waiting.popleft())
        finally:
            self._draining = False
        position, self._position = self._position, None
        if position is not None:
            for sink in self._sinks:
                self._attempt(sink, partial(sink.on_step, *position))

    def _hand_out(self, event: Event) -> None:
        for sink in self._sinks:
            self._attempt(sink, partial(sink.write, event), event)

    def _attempt(self, sink: Sink, action: Callable[[], None], event: Event | None = None) -> None:
        """Call a method of a sink; with an `event`, it writes it. A sink never ends the training."""
        try:
            action()
        except Exception as error:  # a full disk, or an event that the sink cannot represent
            self._failures[sink.name] += 1
            if self._failures[sink.name] == 1:
                what = f" (event {event.kind} of step {event.step})" if event else ""
                self.warn(
                    f"{sink.name} cannot be written{what}: {described(error)}. Further failures are counted."
                )
