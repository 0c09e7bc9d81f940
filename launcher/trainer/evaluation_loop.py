"""The evaluations of a run during training: when, what is reported, and whether one is the best so far.

Owns the use of an evaluation's result; `launcher.evaluation` computes it. All methods are collectives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace

from launcher.checkpoint.run_state import BestEvaluation, MonitoredMetric
from launcher.data.sources import ONLY_SET, set_title
from launcher.data.tensors import Batch, TensorData
from launcher.errors import counted
from launcher.evaluation.evaluate import (
    EvalLoop,
    Evaluation,
    EvaluationStopped,
    evaluate,
    monitored_metric,
    sanity_check,
)
from launcher.metrics.confusion import Confusion
from launcher.recipe.checks import MONITOR
from launcher.run_dir.result import Result
from launcher.telemetry.events import EvalEvent
from launcher.trainer import after_evaluation
from launcher.trainer.context import TrainContext
from launcher.trainer.errors.recipe_errors import guarding
from launcher.trainer.progress import EvalOutcome, StepFlag, StepIndex

HIGHER_IS_BETTER = {"val_loss": False, "train_loss": False, "train_accuracy": True}  # in every evaluation


class EvaluationLoop:
    """Evaluates the model on the validation sets, and keeps the best evaluation in the context."""

    def __init__(self, context: TrainContext) -> None:
        self.latest: Mapping[str, Evaluation] = {}  # the last complete evaluation, by set
        self._context = context
        self.recipe, self.model, self.data = context.recipe, context.model, context.data.validation

    def run(self, index: StepIndex) -> EvalOutcome | None:
        """Evaluate on each set and report. None, on all ranks, where one of them was asked to stop.

        A run without sets has only its end to report.
        """
        if StepFlag.STOP in self._context.flags:
            return None
        if not self.data:
            return EvalOutcome() if self._context.length.is_last_step(index.global_step) else None
        # First: a run that has diverged ends here and is not evaluated.
        self._context.step_reader.flush_all()
        self._context.callbacks.on_eval_start(index)
        self._context.stepper.average_buffers()
        if (average := self._context.ema) is not None:
            average.flush()
        try:
            with nullcontext() if average is None else average.in_model():
                self.latest = {name: self._evaluate(name, index) for name in self.data}
                after_evaluation.show(self._context, index)
        except EvaluationStopped:
            self._context.flags.add(StepFlag.STOP)
            return None
        finally:
            self._context.step_reader.restart_timer()
        compared = monitored_metric(self.recipe.monitor, self.latest)
        # A NaN val_loss ends the run elsewhere.
        if compared.name != "val_loss" and math.isnan(compared.value):
            self._context.telemetry.warn(
                f"{compared.name}, by which runs are compared, is NaN at step {index.global_step}, so this "
                "evaluation cannot be the best. Correct the metric, or name another with monitor."
            )
        loss = next(iter(self.latest.values())).loss
        return EvalOutcome(compared, self.is_best(compared, index.global_step), loss, self.latest)

    def is_best(self, metric: MonitoredMetric, step: int) -> bool:
        """Record an evaluation's metric after `step`. A value that is not a number is never the best."""
        best = self._context.best
        is_best = metric.cost < (best.cost if best is not None and best.same_metric(metric) else math.inf)
        if is_best:
            self._context.best = BestEvaluation(**asdict(metric), step=step)
        return is_best

    def add_to_result(self, result: Result) -> Result:
        """What the last evaluation found: `metrics` of the first set, `sets` of all by name."""
        found, monitor = self.latest, self.recipe.monitor
        if not found:
            return replace(result, metric_name=monitor or "val_loss")
        compared = monitored_metric(monitor, found)
        sets = {name: {"val_loss": each.loss, **each.metrics} for name, each in found.items()}
        if (confusion := self.confusion) is not None:
            classes = result.classes or list(confusion.classes)
            result = replace(result, confusion_matrix=confusion.counts.tolist(), classes=classes)
        if (best := self._context.best) is not None and best.same_metric(compared):
            result = replace(result, best_metric=best.value, best_step=best.step)
        return replace(
            result,
            metric_name=compared.name,
            metric=compared.value,
            metrics=next(iter(sets.values())),
            higher_is_better=not compared.lower_is_better,
            sets=None if ONLY_SET in sets else sets,
        )

    @property
    def confusion(self) -> Confusion | None:
        """The confusion matrix of the first set; None without classes, and on all ranks but 0."""
        return next((found.confusion for found in self.latest.values()), None)

    def sanity_check(self) -> None:
        """Try loss and metrics on the first samples of each set, before the first step. Changes nothing.

        Raises, on all ranks, what the first evaluation would raise because of a mistake in the recipe, or in
        the name of a metric in the config.
        """
        found: dict[str, Evaluation] = {}
        for name in self.data:
            tried = sanity_check(
                self._pass(name, "trying the evaluation", "comparing the trials"),
                self.data[name],
                self._training_size,
            )
            for text in tried.failed:
                self._context.telemetry.warn(
                    f"{text} This was a trial on a few samples of the {set_title(name)} set. If the metric "
                    "needs others, or a trained model, ignore it; otherwise the first evaluation will fail."
                )
            if tried.failed:  # the names of its values are not known
                return
            found[name] = Evaluation(0.0, 0, tried.values, tried.higher_is_better)
        config = self._context.config
        for key, metric in (
            (MONITOR, self.recipe.monitor),
            ("early_stopping.metric", config.early_stopping.metric),
            ("reduce_lr_on_plateau.metric", config.reduce_lr_on_plateau.metric),
        ):
            if found:
                monitored_metric(metric, found, key)

    @property
    def _training_size(self) -> int:
        plan = self._context.plan
        return plan.micro_batch or max(1, plan.batch_size // plan.world_size)

    def _evaluate(self, name: str, index: StepIndex) -> Evaluation:
        """Evaluate on one of the sets, and report. Raises EvaluationStopped on all ranks alike."""
        began = time.perf_counter()
        of_set, data = self._pass(name, "evaluation", "adding up the evaluation"), self.data[name]
        # Of a set in memory four times as many samples as in training, since nothing is kept for backward:
        # 400,000 rows through two linear layers took 2.4 times a plain loop in batches of 128, 1.3 in 512.
        batch_size = self._training_size * (4 if isinstance(data, TensorData) else 1)
        found = evaluate(of_set, data, batch_size, self._context.should_stop, self._training_size)
        if bad := found.unreadable:
            text = f"{counted(bad, 'sample')} of the {set_title(name)} set could not be read"
            self._context.report_unreadable(text, bad)
        higher_is_better = found.higher_is_better | HIGHER_IS_BETTER
        self._context.telemetry.emit(
            EvalEvent(
                index.global_step,
                epoch=index.epoch,
                set=None if name == ONLY_SET else name,
                val_loss=found.loss,
                metrics={**found.metrics, **self._context.train_metrics},
                samples=found.samples,
                seconds=time.perf_counter() - began,
                higher_is_better={each: up for each, up in higher_is_better.items() if up is not None},
            )
        )
        return found

    def _pass(self, name: str, phase: str, waiting_phase: str) -> EvalLoop:
        """A pass over a set, with the phases of `EvalLoop`.

        A trial is a phase of its own: after an evaluation the limits are those of a run that has made a step.
        """
        context = self._context

        @contextmanager
        def guard(what: str, batch: Batch | None) -> Iterator[None]:
            """Guard each call of a metric, which may take long while the other ranks wait for this one."""
            what = f"{what} on the {set_title(name)} set"
            with (
                guarding(what, context.logs_of_failure, batch),
                context.heartbeat.in_user_code(),
            ):
                yield

        return EvalLoop(
            self.recipe,
            self.model,
            context.stepper.forward,
            context.env,
            guard,
            context.heartbeat,
            phase,
            waiting_phase,
            context.config.seed,
            context.plan.shares,
        )
