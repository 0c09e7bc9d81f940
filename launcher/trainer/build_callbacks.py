"""The callbacks of a run, from its config: the one place where a feature is added."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.checkpoint.checkpointer import Checkpointer
from launcher.distributed.preflight import RankInfo
from launcher.trainer.callback import Callback
from launcher.trainer.callbacks.bad_samples import BadSampleLimit
from launcher.trainer.callbacks.checkpoint import CheckpointCallback
from launcher.trainer.callbacks.data_share import DataShare
from launcher.trainer.callbacks.early_stopping import EarlyStopping
from launcher.trainer.callbacks.ema import EmaCallback
from launcher.trainer.callbacks.fp32_fallback import Fp32Fallback
from launcher.trainer.callbacks.gradient_histogram import GradientHistogram
from launcher.trainer.callbacks.micro_batch import MicroBatch
from launcher.trainer.callbacks.overflow_logger import OverflowLogger
from launcher.trainer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from launcher.trainer.callbacks.replica_check import ReplicaCheck
from launcher.trainer.callbacks.step_logger import StepLogger
from launcher.trainer.callbacks.stragglers import Stragglers
from launcher.trainer.callbacks.terminate_on_nonfinite import TerminateOnNonFinite
from launcher.trainer.callbacks.throughput_totals import ThroughputTotals
from launcher.trainer.callbacks.training_metrics import TrainingMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.diagnostics.nonfinite_inspector import NonFiniteInspector


def build_callbacks(
    context: TrainContext,
    checkpointer: Checkpointer,
    micro_batch: MicroBatch,
    peers: Sequence[RankInfo],
) -> list[Callback]:
    """The callbacks, in the order of their collectives; from the config alone, so equal on all ranks.

    What a callback measures on this rank, or is given by it, may differ; which callbacks there are may not.
    """
    config, several = context.config, context.env.world_size > 1
    inspector = NonFiniteInspector(context)
    stop, plateau = config.early_stopping, config.reduce_lr_on_plateau
    every, check_every = (
        config.telemetry.gradient_histogram_every_steps,
        config.ddp.check_replicas_every_steps,
    )
    found: list[Callback | None] = [
        # Before all that use the metrics of a step: it ends a run whose step was abandoned.
        micro_batch,
        DataShare(context) if several and config.data.share == "auto" else None,
        # Before the replica check, which compares the average too: both follow a step that was just launched.
        EmaCallback(context, context.ema) if context.ema is not None else None,
        Stragglers(context, [peer.host for peer in peers]) if several else None,
        BadSampleLimit(context),
        TrainingMetrics(context),
        ThroughputTotals(context),
        GradientHistogram(context, every) if every else None,
        # Before those that warn of a loss that is not finite, or end the run for it: it may have a remedy.
        Fp32Fallback(context, inspector),
        OverflowLogger(context),
        TerminateOnNonFinite(config.precision.loss_scale, inspector, context.stepper.counters),
        # After those that may end the run by the same step, which is then not logged.
        StepLogger(context),
        ReplicaCheck(context, check_every) if check_every else None,
        EarlyStopping(context, stop) if stop.patience is not None else None,
        ReduceLROnPlateau(context, plateau) if plateau.factor is not None else None,
        # Last: it saves the state of all others after a step, and may end the run there.
        CheckpointCallback(context, checkpointer),
    ]
    return [each for each in found if each is not None]
