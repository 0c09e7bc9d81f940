"""Posts the progress of a run to the controller of Kubeflow Trainer, for the status of the TrainJob.

Owns the address and credentials that the controller sets in the environment of each container, the content of
a post and its pace. A thread posts, so that a server that hangs or refuses delays no step, and the end of a
run by at most three seconds. A warning is printed once.
"""

from __future__ import annotations

import http.client
import json
import math
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import launcher.telemetry.events as events
from launcher.errors import first_sentence
from launcher.telemetry.status import Pace
from launcher.telemetry.stream import Sink
from launcher.telemetry.tracker.rows import row_of

URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"  # the path of a file
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # the path of a file, which is replaced before the token expires
GROUPS = ("train/", "eval/", "scale/")
LONGEST, MOST = 64, 256  # characters of a name and of a value, and metrics: the schema refuses more


@dataclass(frozen=True)
class Timing:
    """Seconds between two posts, and for the answers."""

    every_s: float = 10.0  # at least 5 by the documentation of Kubeflow Trainer
    answer_s: float = 5.0
    last_s: float = 3.0  # for the last post of a run that is done
    lost_s: float = 0.5  # of another run: the processes of a failed one may be killed 1 s later


class TrainJobProgress(Sink):
    """Posts percentage, remaining seconds and the latest metrics. `environ` has the variables above."""

    name = "the progress in Kubeflow Trainer"

    def __init__(
        self, environ: Mapping[str, str], warn: Callable[[str], None], timing: Timing | None = None
    ) -> None:
        self._environ, self._warn, self._timing = environ, warn, timing or Timing()
        self._pace = Pace()
        self._step, self._total_steps = 0, 0
        self._metrics: dict[str, str] = {}
        self._is_done = self._has_warned = False
        self._has_news = True  # the first post says that the job has begun
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress of the TrainJob", daemon=True)
        self._thread.start()

    def write(self, event: events.Event) -> None:
        if isinstance(event, events.StartEvent):
            self._total_steps = event.total_steps or 0
        elif isinstance(event, events.EndEvent):
            self._is_done = event.state == "done"
        elif isinstance(event, events.StepEvent | events.EvalEvent | events.OverflowEvent):
            row = row_of(events.record_of(event))
            new = {name: f"{value:.6g}" for name, value in row.items() if _is_posted(name, value)}
            # Replaced, not changed: the thread may read it at this moment.
            self._metrics = {**self._metrics, **new}
        self.advance(0, max(self._step, event.step))

    def advance(self, epoch: int, step: int) -> None:
        self._step, self._has_news = step, True

    def rewind(self, step: int, evaluates_again: bool) -> None:
        self.advance(0, step)

    def close(self) -> None:
        """Post the last state, within a limit."""
        self._over.set()
        self._thread.join(self._timing.last_s if self._is_done else self._timing.lost_s)
        if self._thread.is_alive():
            self._warn_once("it did not answer in time.")

    def _run(self) -> None:
        over = False
        while not over:
            over = self._over.wait(self._timing.every_s)
            if self._has_news:
                self._has_news = False
                try:
                    self._post(json.dumps({"trainerStatus": self._status()}).encode())
                except (OSError, ValueError, http.client.HTTPException) as error:
                    self._warn_once(first_sentence(error))

    def _status(self) -> dict[str, object]:
        step, total = self._step, self._total_steps
        metrics = [{"name": name, "value": value} for name, value in self._metrics.items()]
        status: dict[str, object] = {
            "metrics": metrics[:MOST],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if self._is_done:
            return {**status, "progressPercentage": 100, "estimatedRemainingSeconds": 0}
        if total:  # 100 % only once the run has evaluated and saved
            status["progressPercentage"] = min(99, 100 * step // total)
        if (eta_s := self._pace.eta_s(step, total)) is not None:
            status["estimatedRemainingSeconds"] = math.ceil(eta_s)
        return status

    def _post(self, body: bytes) -> None:
        # Not urllib, which would follow redirects and use proxies: the token is for this server only.
        place = urlsplit(self._environ[URL])
        host, port, answer_s = place.hostname or "", place.port, self._timing.answer_s
        connection: http.client.HTTPConnection
        if place.scheme == "https":
            # Read again each time, like the token: the controller renews both.
            trusted = ssl.create_default_context(cafile=self._environ.get(CA_CERT) or None)
            connection = http.client.HTTPSConnection(host, port, timeout=answer_s, context=trusted)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=answer_s)
        headers = {"Content-Type": "application/json"}
        if token := self._environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {Path(token).read_text(encoding='utf-8').strip()}"
        try:
            connection.request("POST", place.path, body, headers)
            answer = connection.getresponse()
            if answer.status >= 300:
                raise OSError(f"it answered {answer.status} {answer.reason}.")
        finally:
            connection.close()

    def _warn_once(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"The progress could not be posted to Kubeflow Trainer, {self._environ[URL]}: {why}")


def _is_posted(name: str, value: object) -> bool:
    return isinstance(value, int | float) and len(name) <= LONGEST and name.startswith(GROUPS)
