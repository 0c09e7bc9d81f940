"""The evaluations of a run during training: when, what is reported, and whether one is the best so far.

Owns the use of an evaluation's result; `launcher.evaluation` computes it. All methods are collectives.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from launcher.config.rules import BLOCKS
from launcher.data.sources import Batches, Readable
from launcher.data.tensors import Batch
from launcher.engine.uncompiled import uncompiled
from launcher.errors import ConfigError, DataError, counted
from launcher.evaluation.comparison import comparison
from launcher.evaluation.evaluate import Evaluation, EvaluationStopped, evaluate
from launcher.evaluation.rehearsal import rehearse
from launcher.process import frames
from launcher.process.shortage import ran_out
from launcher.recipe.contract import ONLY_SET, Recipe, set_title
from launcher.telemetry.events import EvalEvent
from launcher.training.after_evaluation import AfterEvaluation
from launcher.training.answers import Answers
from launcher.training.failures.recipe_errors import guarding
from launcher.training.parts.early_stopping import EarlyStopping
from launcher.training.parts.log import Monitor
from launcher.training.parts.relief import free_memory
from launcher.training.progress import HIGHER_IS_BETTER, Course, Measured, Position, SinceEvaluation, Standing
from launcher.training.run import Question, Run, Votes

log = logging.getLogger("launcher")


@dataclass
class Evaluator:
    """Evaluates the model on the held-out sets. `latest` is the last complete evaluation, by set."""

    run: Run
    course: Course
    recipe: Recipe
    data: Mapping[str, Readable]
    model: nn.Module
    monitor: Monitor
    votes: Votes
    standing: Standing
    answers: Answers
    batches: Batches  # of training: an evaluation's are as large
    latest: Mapping[str, Evaluation] = field(default_factory=dict)
    stopped: str = ""  # why the run ends early, where it does
    _fitting: int | None = None  # the largest batch of this rank, once it has run out of memory

    def after(self, position: Position) -> Measured | None:
        """`evaluate` if an evaluation is due; None, on all ranks, if not or before a stop."""
        due = self.course.evaluates_after(position.step) and Question.STOP not in self.votes
        if not self.data:
            due = due and self.course.ends_with(position.step)
        return self.evaluate(position) if due else None

    def evaluate(self, position: Position) -> Measured | None:
        """Evaluate on each set and report. None, on all ranks, where one of them was asked to stop.

        A run without sets has only its end to report.
        """
        if not self.data:
            return Measured(None, is_best=False, loss=0.0) if self.course.ends_with(position.step) else None
        self.monitor.log_remaining()
        self.run.stepper.average_buffers()
        since = self.monitor.totals.since_evaluation
        self.answers.settle(since)
        if (average := self.run.average) is not None:
            average.settle()
        try:
            with self._plain(), nullcontext() if average is None else average.in_model():
                self.latest = {name: self._evaluate(name, position, since) for name in self.data}
                AfterEvaluation(self.run, self.recipe, self.model).show(position)
        except EvaluationStopped:
            self.votes.agree(Question.STOP)
            return None
        finally:
            self.monitor.restart_timer()
        self.monitor.totals.since_evaluation = SinceEvaluation()
        compared = comparison(self.recipe.compare_by, self.latest)
        if compared.name != "loss" and math.isnan(compared.value):  # that of the loss ends the run
            self.run.telemetry.warn(
                f"{compared.name}, by which runs are compared, is NaN at step {position.step}, so this "
                "evaluation cannot be the best. Correct the metric, or name another with compare_by."
            )
        best = self.standing.best
        if best is not None and not best.is_like(compared):
            way = "lower" if compared.lower_is_better else "higher"
            self.run.telemetry.decision(
                "comparison",
                f"by {compared.name} ({way} is better) from here on. The best checkpoint so far is that by "
                f"{best.name}, whose values cannot be compared with these: the best is found anew",
            )
        measured = self.standing.measure(compared, next(iter(self.latest.values())).loss)
        self.stopped = self._early_stopping.after(self.latest, position.step)
        if self.stopped and not self.course.ends_with(position.step):
            self.run.telemetry.decision("early stopping", f"after step {position.step}: {self.stopped}")
            return replace(measured, stops=self.stopped)
        self.stopped = ""
        return measured

    def _plain(self) -> AbstractContextManager[object]:
        """Evaluations run uncompiled: graphs of their own would take time, and depend on their batches."""
        return uncompiled() if self.run.config.train.compile == BLOCKS else nullcontext()

    @property
    def _early_stopping(self) -> EarlyStopping:
        return EarlyStopping(self.run.config.early_stopping, self.recipe.compare_by, self.standing)

    def rehearse(self) -> None:
        """Try loss and metrics on the first samples of each set, before the first step. Changes nothing.

        Raises, on all ranks, what the first evaluation would raise because of a mistake in the recipe.
        """
        if not self.data:
            self._refuse_needed_evaluations()
            return
        found: dict[str, Evaluation] = {}
        for name in self.data:
            tried = rehearse(
                self.recipe,
                self.model,
                self._context_of_trial,
                self.data[name],
                self.run.env,
                self._batch_size,
                partial(self._guard, name),
                self._beat_of_trial,
                self._smaller,
            )
            for text in tried.failed:
                self.run.telemetry.warn(
                    f"{text} This was a trial on a few samples of the {set_title(name)} set. If the metric "
                    "needs others, or a trained model, ignore it; otherwise the first evaluation will fail."
                )
            if tried.failed:
                return  # the names of its values are not known
            found[name] = Evaluation(0.0, 0, tried.values, tried.higher_is_better)
        comparison(self.recipe.compare_by, found)
        self._early_stopping.refuse_unknown(found)

    def _refuse_needed_evaluations(self) -> None:
        if self.run.config.early_stopping.patience is not None:
            raise ConfigError(
                f"early_stopping.patience={self.run.config.early_stopping.patience} needs evaluations, and "
                "data.val_fraction=0 holds nothing out to evaluate on. Set one of them to another value."
            )

    @property
    def _batch_size(self) -> int:
        plan = self.batches.plan
        as_trained = plan.micro_batch or max(1, plan.batch_size // plan.world_size)
        return min(as_trained, self._fitting or as_trained)

    def _smaller(self, error: Exception, size: int) -> int:
        """Half of `size`, from now on on this rank, after a shortage of memory; raises any other error."""
        shortage = ran_out(error)
        if not shortage or self.run.config.train.on_oom != "halve" or size == 1:
            raise error
        self._fitting = -(-size // 2)
        log.warning("evaluation: this rank ran out of %s; batches of %d from now on", shortage, self._fitting)
        frames.release(error)
        free_memory(self.run.env.device)
        return self._fitting

    def _evaluate(self, name: str, position: Position, since: SinceEvaluation) -> Evaluation:
        """Evaluate on one of the sets, and report. Raises EvaluationStopped on all ranks alike."""
        began = time.perf_counter()
        telemetry = self.run.telemetry
        found = evaluate(
            self.recipe,
            self.model,
            self._context,
            self.data[name],
            self.run.env,
            self._batch_size,
            interrupted=lambda: self.run.requests.stop is not None,
            guard=partial(self._guard, name),
            beat=self._beat,
            smaller=self._smaller,
        )
        if found.halvings:
            telemetry.warn(
                f"ranks ran out of memory in the evaluation on the {set_title(name)} set and halved their "
                f"batches, {counted(found.halvings, 'time')} over all ranks; logs/rank*.log has each. The "
                "numbers are those of all samples."
            )
        if found.nan_outputs:
            telemetry.warn(
                f"{found.nan_outputs} of the outputs for the {found.samples} samples of the "
                f"{set_title(name)} set are NaN, so metrics computed from them are meaningless. Check "
                "the input for NaN, or lower optim.lr."
            )
        self._report_unreadable(set_title(name), found.unreadable)
        telemetry.emit(
            EvalEvent(
                position.step,
                epoch=position.epoch,
                set=None if name == ONLY_SET else name,
                loss=found.loss,
                metrics=found.metrics | since.metrics(),
                samples=found.samples,
                seconds=time.perf_counter() - began,
                higher_is_better={
                    metric: higher
                    for metric, higher in (found.higher_is_better | HIGHER_IS_BETTER).items()
                    if higher is not None
                },
            )
        )
        return found

    def _report_unreadable(self, title: str, count: int) -> None:
        """Raise DataError, on all ranks alike, where more samples were left out than may be."""
        limit = self.run.config.data.max_bad
        text = f"{counted(count, 'sample')} of the {title} set could not be read"
        logs = "logs/rank*.log names each with its error."
        if count > limit:
            raise DataError(f"{text}, more than data.max_bad={limit}: {logs}")
        if count:
            self.run.telemetry.warn(f"{text} and were left out: {logs}")

    def _context(self) -> AbstractContextManager[object]:
        self._beat()
        return self.run.stepper.forward()

    def _beat(self) -> None:
        self.run.heartbeat.beat("evaluation")  # per batch: a large set may exceed the limit of a phase

    def _context_of_trial(self) -> AbstractContextManager[object]:
        self._beat_of_trial()
        return self.run.stepper.forward()

    def _beat_of_trial(self) -> None:
        """A phase of its own: after an evaluation the limits are those of a run that has made a step."""
        self.run.heartbeat.beat("trying the evaluation")

    def _guard(self, name: str, what: str, batch: Batch | None) -> AbstractContextManager[None]:
        logs = self.run.logs_of_failure
        return guarding(f"{what} on the {set_title(name)} set", logs, batch, of_metric=True)
