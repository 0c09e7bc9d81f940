"""A feature of a run as a callback: the base class, and the list through which the loop calls all of them.

Owns the hooks and the order of calls: that of the list, which is equal on all ranks, since hooks may contain
collectives. Hooks called in each step are looked up once, so that one that a callback lacks costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Concatenate, ParamSpec

from launcher.engine import StepReport, StepResult
from launcher.run_dir.result import Result
from launcher.trainer.progress import EvalOutcome, StepIndex

Arguments = ParamSpec("Arguments")


@dataclass
class StepMetrics:
    """What is known of a step once it has been read. The report and the samples are equal on all ranks."""

    report: StepReport
    samples: int  # of the data set that the step trained on, over all ranks; not the count of the loss
    seconds: float  # that the step took on the host of this rank
    falls_back: bool = False  # a callback has found how the next steps avoid what spoiled this one


class Callback:
    """Base class of a feature. Override what it needs; a hook that is not overridden does nothing.

    Every hook is called on all ranks at the same step, so a callback may communicate in it, but never under a
    condition that differs between ranks.
    """

    name: ClassVar[str] = ""
    """Key of the state in checkpoints: it stays when the class or its file is renamed."""

    stop_reason: str = ""
    """Why the run ends before its last step; empty while it goes on. Equal on all ranks."""

    def on_train_start(self, step: int) -> None:
        """Called before the first step of this process, which comes after `step`."""

    def on_step_start(self, index: StepIndex) -> None:
        """Called before a step. The flags that a rank sets here are sent with the totals of the step."""

    def on_step_launched(self, index: StepIndex, result: StepResult) -> None:
        """Called once the step is in the queue of the device; its result has not been read."""

    def on_step_metrics(self, index: StepIndex, metrics: StepMetrics) -> None:
        """Called with the metrics of each step in order, on a GPU one step late."""

    def on_flush(self) -> None:
        """Called before an evaluation and at the end, when all steps have been read."""

    def on_eval_start(self, index: StepIndex) -> None:
        """Called before an evaluation, when all steps have been read."""

    def on_eval_end(self, index: StepIndex, measured: EvalOutcome) -> None:
        """Called after an evaluation, whose values are equal on all ranks."""

    def on_train_end(self, index: StepIndex, measured: EvalOutcome) -> None:
        """Called after the last evaluation, before `on_step_end`, which saves the run for the last time.

        So that what a callback computes at the end is in that checkpoint.
        """

    def on_step_end(self, index: StepIndex, measured: EvalOutcome | None) -> None:
        """Called after everything else of a step; `measured` is None where nothing was evaluated."""

    def close(self) -> None:
        """Called when training has ended, also where an error has ended it."""

    def state_dict(self) -> dict[str, Any]:
        """What the callback keeps from step to step, as JSON values. Saved in every checkpoint."""
        return {}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Called before the first step, if the checkpoint has a state."""

    def add_to_result(self, result: Result) -> Result:
        """The result of the run with the fields of this callback."""
        return result


class CallbackList:
    """The callbacks of a run. Each of its hooks calls those that override it, in order."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.fill(callbacks)

    def fill(self, callbacks: Sequence[Callback]) -> None:
        """Set the callbacks. They are built from the context, which already holds this list."""
        self._callbacks = callbacks
        for each in callbacks:
            assert each.name, f"{type(each).__name__} has no name, the key of its saved state"
        self.names = [each.name for each in callbacks]  # in order
        assert len(set(self.names)) == len(callbacks), f"callbacks of one run share a name: {self.names}"
        self.on_train_start = self._all(Callback.on_train_start)
        self.on_step_start = self._all(Callback.on_step_start)
        self.on_step_launched = self._all(Callback.on_step_launched)
        self.on_step_metrics = self._all(Callback.on_step_metrics)
        self.on_flush = self._all(Callback.on_flush)
        self.on_eval_start = self._all(Callback.on_eval_start)
        self.on_eval_end = self._all(Callback.on_eval_end)
        self.on_train_end = self._all(Callback.on_train_end)
        self.on_step_end = self._all(Callback.on_step_end)
        self.close = self._all(Callback.close)

    def _all(self, hook: Callable[Concatenate[Any, Arguments], None]) -> Callable[Arguments, None]:
        """A function that calls this hook on the callbacks that override it."""
        name = hook.__name__
        hooks = [getattr(each, name) for each in self._callbacks if getattr(type(each), name) is not hook]

        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            for each in hooks:
                each(*args, **kwargs)

        return call

    @property
    def stop_reason(self) -> str:
        """Why the run ends before its last step; empty if it does not."""
        return next((each.stop_reason for each in self._callbacks if each.stop_reason), "")

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """The states of the callbacks by name. A collective."""
        return {each.name: state for each in self._callbacks if (state := each.state_dict())}

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what was saved of these callbacks."""
        for each in self._callbacks:
            if (state := saved.get(each.name)) is not None:
                each.load_state_dict(dict(state))

    def add_to_result(self, result: Result) -> Result:
        """The result of the run with what each callback adds to it. A collective."""
        for each in self._callbacks:
            result = each.add_to_result(result)
        return result
