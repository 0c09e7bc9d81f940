"""Runs in MLflow: on the server of MLFLOW_TRACKING_URI, without one in mlruns/ of the working directory.

mlflow reads its own variables, such as MLFLOW_TRACKING_TOKEN and MLFLOW_EXPERIMENT_NAME.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import launcher.telemetry.tracker.protocol as protocol
from launcher.config.schema import leaves
from launcher.errors import PRUNED, PreemptedError

ID = "launcher.run_id"  # a tag: mlflow numbers runs itself, and a resumed run continues the one with its id
# Of mlflow, unless they are set: its own waits for a server that does not answer take minutes. Its store of
# plain files has to be allowed, and is all that mlflow-skinny has without a server.
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # reports of its own use
}
LONGEST = 500  # characters of a parameter, which every version of mlflow takes


class MlflowTracker:
    """Implements `Tracker`: metrics, texts, pictures and tables."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    def start(self, run: protocol.RunInfo) -> None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        import mlflow

        uri = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").absolute().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        same = self._client.search_runs([experiment], f"tags.`{ID}` = '{run.run_id}'", max_results=1)
        if same:
            self._run_id = same[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {ID: run.run_id, "group": run.group or "", "mlflow.note.content": run.notes or ""}
        tags |= dict.fromkeys(run.tags, "true")
        self._run_id = self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        params = [mlflow.entities.Param(key, str(value)[:LONGEST]) for key, value in leaves(run.config)]
        for first in range(0, len(params), 100):  # the most that a server takes at once
            self._client.log_batch(self._run_id, params=params[first : first + 100])

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Numbers become metrics; strings are left out."""
        from mlflow.entities import Metric

        now_ms = int(1000 * time.time())
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        metrics = [Metric(name, float(value), now_ms, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def media(self, step: int, name: str, item: protocol.Media) -> None:
        match item:
            case protocol.Text():
                self._client.log_text(self._run_id, item.content, f"{name}-{step:08d}.txt")
            case protocol.Picture():
                self._client.log_artifact(self._run_id, item.path, str(PurePath(name).parent))
            case _:
                self._client.log_dict(self._run_id, asdict(item), f"{name}-{step:08d}.json")

    def finish(self, exit_code: int) -> None:
        ends = {0: "FINISHED", PRUNED: "FINISHED", PreemptedError.exit_code: "KILLED"}
        self._client.set_terminated(self._run_id, ends.get(exit_code, "FAILED"))
