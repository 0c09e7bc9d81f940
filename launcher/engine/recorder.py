"""Records device work so that it can be repeated without the host: CUDA graphs.

Owns what torch and CUDA demand of a capture. What is recorded is in `step_graph`. A recording keeps the
addresses and the Python numbers of the call that was recorded; only what the memory at these addresses holds
may differ from one replay to the next. Tests record with a stand-in that keeps both rules on a CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# In torch's error of c10/cuda/CUDAFunctions.cpp, warn_or_error_on_sync.
WAITS = "synchronizing CUDA operation"


class HostRead(RuntimeError):
    """The work that was to be recorded waits for the device. Nothing is broken."""


class NoMemory(RuntimeError):
    """Memory ran out, on this rank (then that is the cause) or on another. Nothing is broken."""


class RecordingError(RuntimeError):
    """The work could not be recorded, for the reason of its cause. CUDA is in no defined state."""


class Recorder:
    """Runs, checks and records work on one device, by CUDA graphs.

    NCCL's collectives are recorded like kernels, on the stream of their communicator, which a warm-up has
    created. Their works are not given to NCCL's watchdog (ProcessGroupNCCL::collective enqueues a work only
    outside of a capture), so NCCL's timeout cannot detect a replay that hangs: the caller needs a deadline.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # torch's handle of the memory of the recordings

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run on the stream that `record` records on, after all work queued so far and before all later."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextmanager
    def refusing_reads(self) -> Iterator[None]:
        """Raise HostRead at the first operation for which the host would wait.

        A failed capture leaves streams and allocator in no defined state (CUDAGraph::reset says so), and its
        error names no cause. torch's check of synchronisations raises at the line that waits, without harm.
        """
        before = torch.cuda.get_sync_debug_mode()
        _set_sync_debug_mode("error")
        try:
            yield
        except Exception as error:
            if any(WAITS in str(each) for each in causes_of(error)):
                raise HostRead(WAITS) from error
            raise
        finally:
            _set_sync_debug_mode(before)

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record what `work` does on the device, without doing it; the result does it, on each call.

        Memory that `work` allocates is kept, and written again by each call. All recordings of a recorder
        share that memory, except what is still referenced after the recording. Random numbers continue the
        sequence of the device's default generator. RuntimeError where it cannot be recorded.

        capture_error_mode "thread_local": under "global" a call of another thread that is unsafe in a capture
        makes it fail, and NCCL's watchdog and the threads that pin memory query events all the time.
        """
        graph = torch.cuda.CUDAGraph()  # with the device's default generator
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with capture:
            work()
        self._pool = graph.pool()  # replays follow each other on one stream
        return graph.replay


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def recorder_of(device: torch.device) -> Recorder | None:
    """What records on this device; None where nothing can."""
    build = RECORDERS.get(device.type)
    return None if build is None else build(device)


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": Recorder}  # by type of device


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # is a prototype: every time
        torch.cuda.set_sync_debug_mode(mode)
