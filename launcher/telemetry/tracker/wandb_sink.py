"""The wandb run of a training run.

Owns the names of events in wandb, and the one thread in which wandb is imported, started, logged to and
finished. Training only puts rows into a queue, so wandb (start-up, a server that hangs, a dead service) can
neither delay a step nor end the run.
"""

from __future__ import annotations

import contextlib
import html
import queue
import secrets
import string
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.schema import DataConfig, ModelConfig
from launcher.telemetry.stream import Record
from launcher.telemetry.tracker.wandb_session import (
    Patience,
    TrackerError,
    WandbRun,
    hooks_restored,
    kill_service,
    quiet_environment,
    start,
    stop_service,
    unwritten,
)

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

QUEUE_ROWS = 10_000  # rows that may wait while wandb starts or its server is slow
METRIC_GROUPS = ("train", "scale", "perf", "eval", "after_evaluation", "gradients", "gpu")
STEP_NAMES = {"loss": "train/loss", "lr": "train/lr", "grad_norm": "train/grad_norm", "epoch": "train/epoch"}
SCALE_NAMES = {"scale": "scale/value", "skipped": "scale/skipped"}


class WandbSink:
    """Logs to one wandb run from a separate thread. `warn` receives problems that do not end tracking."""

    name = "wandb"

    def __init__(self, run: WandbRun, warn: Callable[[str], None], patience: Patience | None = None) -> None:
        self._run = run
        self._warn = warn
        self._patience = patience or Patience()
        self._queue: queue.Queue[Mapping[str, Any] | _Used | _End] = queue.Queue(QUEUE_ROWS)
        self._failure: Exception | None = None
        self._given_up = False
        self._exit_code = 1  # until an `end` event sets it: a run that dies has failed
        self._thread = threading.Thread(target=self._work, name="wandb-sink", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Returns at once. Raises an earlier error of the thread, or TrackerError if the queue is full."""
        self._raise_failure()
        if record["event"] == "end":
            self._exit_code = 0 if record.get("state", "done") == "done" else 1
        row = _Used(record) if record["event"] == "start" else history_row(record)
        if not row:
            return
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self._given_up = True
            kill_service()
            raise TrackerError(f"has not taken any of the last {QUEUE_ROWS:,} rows") from None

    def close(self) -> None:
        """Wait until wandb has received everything, up to a limit. Raises an error of the thread, once."""
        if self._given_up:
            return
        self._given_up = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(_End(self._exit_code))
        limit_s = self._patience.init_s + self._patience.finish_s + 5
        self._thread.join(limit_s)
        if self._thread.is_alive():
            kill_service()
            raise TrackerError(
                f"did not finish within {limit_s:g} s; later: {sync_command(self._run.directory)}"
            )
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._given_up = True
            raise failure

    def _work(self) -> None:
        try:
            with quiet_environment():
                self._track()
        except Exception as error:  # raised by the next call of write or close, in the caller's thread
            self._failure = error if isinstance(error, TrackerError) else TrackerError(_in_one_line(error))

    def _track(self) -> None:
        try:
            with hooks_restored():
                run = self._start()
            self._feed(run)
        finally:
            stop_service()

    def _start(self) -> Run:
        if self._run.mode == "online":
            try:
                return start(self._run, "online", self._patience, self._warn)
            except Exception as error:  # errors of wandb, of its service and of the network
                stop_service()  # it still holds the run's id
                self._warn(
                    f"wandb could not start online ({_in_one_line(error)}); it continues offline, "
                    f"later: {sync_command(self._run.directory)}"
                )
        return start(self._run, "offline", self._patience, self._warn)

    def _feed(self, run: Run) -> None:
        run.define_metric("step", hidden=True)
        for group in METRIC_GROUPS:
            run.define_metric(f"{group}/*", step_metric="step")
        while not isinstance(row := self._queue.get(), _End):
            if isinstance(row, _Used):
                run.config.update(used_config(self._run.config, row.start), allow_val_change=True)  # type: ignore[no-untyped-call]
            else:
                run.log({name: _media(value) for name, value in row.items()})
        log = Path(run.dir).parent / "logs" / "debug-internal.log"
        run.finish(exit_code=row.exit_code)
        if run.offline and (loss := unwritten(log)):
            raise TrackerError(f"could not write all of its offline run: {loss}")


@dataclass(frozen=True)
class Text:
    """To be shown as it is, line by line."""

    content: str


@dataclass(frozen=True)
class Picture:
    """The file of a picture."""

    path: str


def _media(value: Any) -> Any:
    """What wandb shows as a text or a picture; other values as they are."""
    if isinstance(value, Text):
        from wandb import Html

        return Html(f"<pre>{html.escape(value.content)}</pre>")
    if isinstance(value, Picture):
        from wandb import Image

        return Image(value.path)
    return value


@dataclass(frozen=True)
class _End:
    exit_code: int


@dataclass(frozen=True)
class _Used:
    start: Record


def used_config(config: Mapping[str, Any], start: Record) -> dict[str, Any]:
    """Groups of the config whose choice the recipe does not use, with the name of what it uses instead.

    Options of the unused choice are omitted.
    """
    kept = {
        group: {field.name for field in fields(kind)}
        for group, kind in (("model", ModelConfig), ("data", DataConfig))
    }
    return {
        group: {key: value for key, value in config[group].items() if key in kept[group]}
        | {"name": start[group]}
        for group in kept
        if start.get(group) and group in config and start[group] != config[group].get("name")
    }


def new_run_id() -> str:
    """A new id in wandb's format, chosen here so that metrics.jsonl has it before wandb starts."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def sync_command(run_dir: Path) -> str:
    """The command that uploads an offline run."""
    return f"wandb sync {run_dir / 'wandb'}/offline-run-*"


def history_row(record: Record) -> dict[str, Any]:
    """The event under wandb's names (train/loss, scale/value, eval/accuracy ...); {} if it has none."""
    row = dict(_named(record))
    return {"step": record["step"], **row} if row else {}


def _named(record: Record) -> Iterator[tuple[str, Any]]:
    event = record["event"]
    for key, value in record.items():
        if key in ("event", "time", "step", "set") or value is None:
            continue
        if event == "step":
            yield STEP_NAMES.get(key) or SCALE_NAMES.get(key) or f"perf/{key}", value
        elif event == "overflow":
            yield SCALE_NAMES.get(key, f"scale/overflow_{key}"), _readable(value)
        elif event == "after_evaluation" and isinstance(value, dict):
            as_media = {"texts": Text, "pictures": Picture}.get(key, lambda plain: plain)
            yield from ((f"{event}/{name}", as_media(item)) for name, item in value.items())
        elif event == "eval":
            yield f"eval/{record['set']}/{key}" if "set" in record else f"eval/{key}", value
        elif event == "gpu" and key == "gpus":
            yield from (row for gpu in value for row in _of_gpu(gpu))
        elif event == "gpu" or (event == "gradients" and isinstance(value, float)):
            yield f"{event}/{key}", value  # layers and histogram stay in metrics.jsonl


def _of_gpu(gpu: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in gpu.items():
        if isinstance(value, Mapping):
            yield from ((f"gpu/{gpu['index']}/{key}/{part}", number) for part, number in value.items())
        elif key not in ("index", "uuid"):
            yield f"gpu/{gpu['index']}/{key}", value


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _readable(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
