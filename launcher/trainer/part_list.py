"""The callbacks of a run, from its config: the one place where a feature is added."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.distributed.preflight import Peer
from launcher.telemetry.gpu import GpuSampler
from launcher.trainer.callback import Callback, CallbackList
from launcher.trainer.callbacks.averages import Averages
from launcher.trainer.callbacks.bad_samples import BadSamples
from launcher.trainer.callbacks.checkpoints import Checkpoints
from launcher.trainer.callbacks.divergence import DivergenceCheck
from launcher.trainer.callbacks.early_stopping import EarlyStopping
from launcher.trainer.callbacks.energy import Energy
from launcher.trainer.callbacks.evaluation import Evaluator
from launcher.trainer.callbacks.first_step import FirstStep
from launcher.trainer.callbacks.gradient_stats import GradientStats
from launcher.trainer.callbacks.initial_weights import InitialWeights, Loaded
from launcher.trainer.callbacks.log import Log
from launcher.trainer.callbacks.micro_batch import MicroBatch
from launcher.trainer.callbacks.plateau import Plateau
from launcher.trainer.callbacks.replica_check import ReplicaCheck
from launcher.trainer.callbacks.rescue import Rescue
from launcher.trainer.callbacks.skipped_steps import SkippedSteps
from launcher.trainer.callbacks.stragglers import Stragglers
from launcher.trainer.callbacks.totals import Totals
from launcher.trainer.callbacks.training_metrics import TrainingMetrics
from launcher.trainer.diagnostics.nonfinite_inspector import DivergenceInspector
from launcher.trainer.job import Job
from launcher.trainer.resume import SavedRun


def build_callbacks(
    job: Job,
    saved: SavedRun,
    loaded: Loaded | None,
    peers: Sequence[Peer],
    gpus: GpuSampler | None,
    first_step_done: Callable[[], None],
) -> CallbackList:
    """The callbacks, in the order of their collectives; from the config alone, so equal on all ranks.

    What a callback measures on this rank, or is given by it, may differ; which callbacks there are may not.
    """
    run, config, course, several = job.run, job.run.config, job.course, job.run.env.world_size > 1
    inspector, trained, totals = DivergenceInspector(job), TrainingMetrics(job.answers), Totals(job)
    rescue = Rescue(run, inspector)
    stop, compare_by = config.early_stopping, job.recipe.compare_by
    plateau = config.reduce_lr_on_plateau
    found: list[Callback | None] = [
        Averages(run, run.average) if run.average is not None else None,
        MicroBatch(job),  # before all that use the metrics of a step: it ends a run whose step was abandoned
        Stragglers(run, [peer.host for peer in peers]) if several else None,
        BadSamples(run),
        trained,
        totals,
        GradientStats(run, every) if (every := config.telemetry.gradient_histogram_every_steps) else None,
        rescue,
        SkippedSteps(run, rescue),
        DivergenceCheck(config.precision.loss_scale, inspector, run.stepper.counters),
        Log(run, totals),  # after those that may end the run by the same step, which is then not logged
        FirstStep(first_step_done),
        ReplicaCheck(run, course) if config.ddp.check_replicas_every_steps else None,
        InitialWeights(run, loaded),
        Evaluator(job, trained),
        EarlyStopping(stop, compare_by, course, run.telemetry) if stop.patience is not None else None,
        Plateau(run, plateau, job.recipe) if plateau.factor is not None else None,
        run.pruning if run.pruning.rule != "none" else None,
        Energy(gpus),
        Checkpoints(run, saved),  # last: it saves the state of all others after a step
    ]
    return CallbackList([each for each in found if each is not None])
