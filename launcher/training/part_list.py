"""The callbacks of a run, from its config: the one place where a feature is added."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.distributed.preflight import Peer
from launcher.telemetry.gpu import GpuSampler
from launcher.training.callback import Callback, CallbackList
from launcher.training.job import Job
from launcher.training.parts.averages import Averages
from launcher.training.parts.bad_samples import BadSamples
from launcher.training.parts.checkpoints import Checkpoints
from launcher.training.parts.divergence import DivergenceCheck
from launcher.training.parts.early_stopping import EarlyStopping
from launcher.training.parts.energy import Energy
from launcher.training.parts.evaluation import Evaluator
from launcher.training.parts.first_step import FirstStep
from launcher.training.parts.gradient_stats import GradientStats
from launcher.training.parts.initial_weights import InitialWeights, Loaded
from launcher.training.parts.log import Log
from launcher.training.parts.micro_batch import MicroBatch
from launcher.training.parts.plateau import Plateau
from launcher.training.parts.replica_check import ReplicaCheck
from launcher.training.parts.rescue import Rescue
from launcher.training.parts.skipped_steps import SkippedSteps
from launcher.training.parts.stragglers import Stragglers
from launcher.training.parts.totals import Totals
from launcher.training.parts.training_metrics import TrainingMetrics
from launcher.training.rerun import DivergenceInspector
from launcher.training.resume import SavedRun


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
