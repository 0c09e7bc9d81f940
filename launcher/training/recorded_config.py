"""The run's config.yaml with what the run has found out, so that a new run can start with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from launcher.config.schema import Config
from launcher.run_dir.records import write_config
from launcher.training.progress import Standing
from launcher.training.run import Run


def asked(config: Config) -> dict[str, Any]:
    """By key: the user's values of what `record_config` may replace, so that reports compare runs by them.

    Without model.weights_sha256: weights of other content are another start.
    """
    return {
        "data.micro_batch": config.data.micro_batch,
        "precision.fp32_modules": list(config.precision.fp32_modules),
    }


def fp32_modules(config: Config, standing: Standing) -> tuple[str, ...]:
    """precision.fp32_modules of a run that starts as this one continues."""
    rescued = [pattern for patterns in standing.rescued for pattern in patterns]
    return tuple(dict.fromkeys((*config.precision.fp32_modules, *rescued)))


def record_config(run: Run, standing: Standing) -> None:
    """Write config.yaml again, on rank 0; a failure is a warning. A resume reads `standing` instead."""
    if not run.env.is_leader:
        return
    config, model, data = run.config, run.config.model, run.config.data
    if standing.started_from is not None and standing.started_from[0] == model.weights:
        model = dataclasses.replace(model, weights_sha256=standing.started_from[1])
    if standing.micro_batch is not None:
        data = dataclasses.replace(data, micro_batch=standing.micro_batch.size)
    precision = dataclasses.replace(config.precision, fp32_modules=fp32_modules(config, standing))
    try:
        recorded = dataclasses.replace(config, model=model, data=data, precision=precision)
        write_config(Path(config.run.dir), recorded)
    except OSError as error:
        run.telemetry.warn(f"config.yaml lacks what the run has found out: {error}")
