"""The moments of a run, and the parts that take part in them.

Owns the order: that of the list of parts is the order of their collectives, equal on all ranks. The bound
methods are collected once, so a moment that a part does not have costs nothing in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from launcher.engine import StepResult
from launcher.run_dir.result import Result
from launcher.training.progress import Course, Measured, Position
from launcher.training.reports import Reports

Kind = TypeVar("Kind")


class Parts:
    """The parts of a run, each an object with some of these methods:

    - `begin(step)`: before the first step of this process, which comes after `step`;
    - `vote(position)`: before a step; what is voted is sent with the step's counts;
    - `after_launch(position, result)`: the device has the step in its queue;
    - `after_step(position, report)`: the step has been read, one step late; the same report on all ranks;
    - `pause()`: all steps have been read, and an evaluation or the end comes next;
    - `check_evaluations(evaluations)`: before the first step, with the names that evaluations will have;
    - `after_evaluation(position, measured)`: the same result on all ranks;
    - `at_end(position, measured)`: the run is about to be saved for the last time;
    - `end_step(position, measured)`: after everything else of a step; None where nothing was evaluated;
    - `state()`: the JSON values that it keeps from step to step, saved with every checkpoint; may be a
      collective;
    - `load_state(values)`: the inverse, before the first step; not called where a checkpoint has none of it;
    - `add_to(result)`: the result with what the part adds to it; may be a collective.

    Each part has a `name`, the key of its state in checkpoints, which stays the same where its file or class
    is renamed. Two parts of one run never share a name.

    Other methods are private, or for callers that know the part: a test lists these, since a misspelt moment
    would never be called. A part that may end the run has `ends`, why it ends it, empty until then. One that
    is `silent` only keeps its state and adds to the result.
    """

    def __init__(self, course: Course, reports: Reports, parts: Sequence[object]) -> None:
        self._parts = parts
        self.names = [_name_of(part) for part in parts]  # in order
        assert len(set(self.names)) == len(parts), f"parts of one run share a name: {self.names}"
        self._course = course
        self._reports = reports
        self._vote = self._moments("vote")
        self._after_launch = self._moments("after_launch")
        self._end_step = self._moments("end_step")
        self._ending = [part for part in parts if hasattr(part, "ends")]
        self._of_others: dict[str, Mapping[str, object]] = {}
        reports.readers, reports.pauses = self._moments("after_step"), self._moments("pause")

    def _moments(self, name: str) -> tuple[Callable[..., None], ...]:
        return tuple(getattr(part, name) for part in self._with(name) if not getattr(part, "silent", False))

    def _with(self, name: str) -> list[Any]:
        return [part for part in self._parts if hasattr(part, name)]

    def of(self, kind: type[Kind]) -> Kind:
        """The part of this class."""
        return next(part for part in self._parts if isinstance(part, kind))

    @property
    def ends(self) -> str:
        """Why the run ends before its last step; empty if it does not."""
        for part in self._ending:
            if why := str(part.ends):
                return why
        return ""

    def begin(self, step: int) -> None:
        for begin in self._moments("begin"):
            begin(step)

    def vote(self, position: Position) -> None:
        for vote in self._vote:
            vote(position)

    def after_launch(self, position: Position, result: StepResult) -> None:
        for after in self._after_launch:
            after(position, result)

    def check_evaluations(self, evaluations: object) -> None:
        for check in self._moments("check_evaluations"):
            check(evaluations)

    def end_step(self, position: Position, measured: Measured | None) -> None:
        """The moments after an evaluation, if there was one, at the end of a run, and of each step."""
        if measured is not None:
            for after in self._moments("after_evaluation"):
                after(position, measured)
            if self._course.ends_with(position.step) or self.ends:
                measured = replace(measured, is_last=True)
                self._reports.drain()
                for at_end in self._moments("at_end"):
                    at_end(position, measured)
        for end in self._end_step:
            end(position, measured)

    def state(self) -> dict[str, Mapping[str, Any]]:
        """What the parts keep, by name. A collective."""
        own = {_name_of(part): part.state() for part in self._with("state")}
        return self._of_others | own

    def load_state(self, saved: Mapping[str, Mapping[str, object]]) -> None:
        """Load what was saved. That of parts which this run lacks is kept for one that has them again."""
        self._of_others = {name: values for name, values in saved.items() if name not in self.names}
        for part in self._with("load_state"):
            if (values := saved.get(_name_of(part))) is not None:
                part.load_state(dict(values))

    def add_to(self, result: Result) -> Result:
        """The result of the run with what the parts add to it. A collective."""
        for part in self._with("add_to"):
            result = part.add_to(result)
        return result


def _name_of(part: object) -> str:
    """The part's own name, never that of its file: a renamed file must not lose what checkpoints hold."""
    name: str = getattr(part, "name", "")
    assert name, f"{type(part).__name__} has no name, the key of its saved state"
    return name
