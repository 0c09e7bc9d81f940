"""Events for tests, by kind: fields that are not given are blank, as where a file lacks them."""

import time

from launcher.telemetry.events import event_of


def made(kind, step, **fields):
    return event_of({"event": kind, "time": time.time(), "step": step, **fields})
