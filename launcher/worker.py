"""One rank of one job: joins the group, builds the trainer, trains, reports a failure.

It never sees argv; it runs the same lines on every rank.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from socket import gethostname

import torch
import torch.distributed as dist

from launcher.config.schema import Config
from launcher.data.loader import loader_processes
from launcher.distributed import preflight, process_group
from launcher.distributed.env import LaunchEnv
from launcher.distributed.exit_records import StoreExitRecords, exit_record
from launcher.distributed.hang_timer import HangTimer
from launcher.distributed.heartbeat import Heartbeat
from launcher.doctor.machine import warn_of_machine
from launcher.errors import ON_REQUEST
from launcher.os.signals import StopSignal, save_means_stop, signal_handlers_installed
from launcher.run_dir.records import rank_log
from launcher.telemetry import Telemetry, open_telemetry
from launcher.telemetry.gpu import measure_gpus
from launcher.trainer import device
from launcher.trainer.build_trainer import build_trainer
from launcher.trainer.errors.rank_failure import explain_and_report, note_failure
from launcher.trainer.warning_log import warnings_logged

log = logging.getLogger("launcher")


def run(
    config: Config,
    launch: LaunchEnv,
    store: dist.Store | None,
    job: str,
    heartbeat: Heartbeat | None = None,
) -> None:
    """Train as the config says, as one rank. Raises on failure, a LauncherError where a user can act.

    `job` names this job among those of the launch: its process group and its keys in the store are its own.
    Resumes from a checkpoint if there is one. Raises PreemptedError if a signal asked the run to stop.
    """
    heartbeat = heartbeat or Heartbeat()
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)  # on each machine, for the logs of its ranks
    stop_signal = StopSignal(save_means_stop(config.launch.preempt_signals), interrupts=True)
    with (
        # Left in reverse: the telemetry may still log, and signals stay requests until both are closed.
        signal_handlers_installed(stop_signal, launch.world_size == 1),
        rank_log(run_dir, launch.rank, config.launch.log_level),
        # All sinks on rank 0, none elsewhere, so that callers need not check their rank.
        open_telemetry(config, os.environ) if launch.rank == 0 else Telemetry() as telemetry,
    ):
        log.info(
            "rank %d of %d, process %d on %s", launch.rank, launch.world_size, os.getpid(), gethostname()
        )
        try:
            with warnings_logged(telemetry, launch.rank):
                _join_and_train(config, launch, store, job, telemetry, stop_signal, heartbeat)
        except BaseException as error:
            in_store = None if store is None else StoreExitRecords(store, job, launch.world_size)
            records = heartbeat.exit_records or in_store
            failure = explain_and_report(error, config, launch, telemetry, heartbeat, records)
            if failure is not None:
                raise failure from error
            raise


def _join_and_train(
    config: Config,
    launch: LaunchEnv,
    store: dist.Store | None,
    job: str,
    telemetry: Telemetry,
    stop_signal: StopSignal,
    heartbeat: Heartbeat,
) -> None:
    """Train as one rank. A function of its own: after a failure nothing may keep what its frame holds."""
    heartbeat.beat("meeting the other ranks")
    steps_ahead = int(torch.cuda.is_available())
    with (
        # Left in reverse: the loader processes end, then the group is closed.
        HangTimer(config, launch, store, job, heartbeat, steps_ahead, stop_signal) as timer,
        process_group.join(launch, store, job, config.launch.init_timeout_s) as env,
        loader_processes(),
    ):
        try:
            device.set_backend_flags(config, env.device)
            warn_of_machine(config, env)
            peers = preflight.exchange_rank_info(config, env, store, job)
            gpus = measure_gpus(config, env, peers, telemetry)
            build_trainer(config, launch, env, peers, gpus, telemetry, heartbeat, stop_signal).run()
        except BaseException as error:
            # Before the contexts are left: aborting NCCL or ending loader processes may hang.
            note_failure(error, launch.rank, heartbeat)
            record = exit_record(launch.rank, error, heartbeat.failed_s)
            if record.exit_code not in ON_REQUEST:
                timer.limit_clean_up(record)
            raise
