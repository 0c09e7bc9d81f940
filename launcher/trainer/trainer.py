"""The training loop: a table of contents of a run.

Owns the order of training, evaluating and the hooks of callbacks. Every line runs alike on all ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from launcher.trainer import results
from launcher.trainer.context import TrainContext
from launcher.trainer.evaluation_loop import EvaluationLoop
from launcher.trainer.out_of_memory import shortage_explained
from launcher.trainer.progress import EvalOutcome, ResumePoint, StepIndex
from launcher.trainer.train_step import TrainStep


@dataclass
class Trainer:
    """Trains one rank of a run from `start` on; complete when it is built."""

    context: TrainContext
    train_step: TrainStep
    evaluation: EvaluationLoop
    start: ResumePoint

    def __post_init__(self) -> None:
        context = self.context
        self.callbacks, self.length, self.step_reader = context.callbacks, context.length, context.step_reader

    def run(self) -> None:
        """Train to the end, and write the result. A collective.

        Raises PreemptedError, on all ranks after the same step, if any of them was asked to stop.
        """
        began = time.perf_counter()
        try:
            with shortage_explained(self.context):
                steps = self.fit()
        finally:
            self.callbacks.close()
        self.context.heartbeat.beat("finishing")
        seconds = time.perf_counter() - began
        results.write_results(self.context, self.start.step, steps, seconds, self.evaluation)
        self.context.heartbeat.beat("done")

    def fit(self) -> int:
        """Train to the last step, or until a callback has a `stop_reason`. Returns the number of the step."""
        self.train_step.network.train()
        self.callbacks.on_train_start(self.start.step)
        step = self.start.step
        if self.start.evaluation_pending:  # of the step after which the checkpoint was taken
            index = self.length.index_of(step)
            self._end_step(index, self.evaluation.run(index))
        self.step_reader.restart_timer()
        while step < self.length.total_steps and not self.callbacks.stop_reason:
            step += 1
            index = self.length.index_of(step)
            self.context.heartbeat.beat("data", step)
            self.callbacks.on_step_start(index)  # flags set here are sent with the totals of this step
            result = self.train_step.run(index)
            # First what adds work to the device's queue, and then the wait for the step before.
            self.callbacks.on_step_launched(index, result)
            self.step_reader.push(index, result)  # calls on_step_metrics, on a GPU one step late
            outcome = self.evaluation.run(index) if self.length.should_evaluate(step) else None
            self._end_step(index, outcome)
        return step

    def _end_step(self, index: StepIndex, outcome: EvalOutcome | None) -> None:
        """Call the hooks after a step: `outcome` is that of its evaluation, None where there was none."""
        if outcome is not None:
            self.callbacks.on_eval_end(index, outcome)
            if self.length.is_last_step(index.global_step) or self.callbacks.stop_reason:
                outcome = replace(outcome, is_last=True)
                self.step_reader.flush_all()
                self.callbacks.on_train_end(index, outcome)
        self.callbacks.on_step_end(index, outcome)
