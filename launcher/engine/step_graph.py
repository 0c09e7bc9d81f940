"""A whole training step recorded once and replayed: no Python, no launches, the same bits.

Owns the rehearsal before the recording, which changes no state, and what the host still does around a replay.
What a step computes is the Stepper's; how it is recorded is the recorder's.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import launcher.engine.works as works
from launcher.engine.diagnostics.step_timer import COMPUTE, UPDATE
from launcher.engine.errors import UnusableError
from launcher.engine.optim.torch_optimizer import AdaptedUpdater
from launcher.engine.recorder import HostRead, NoMemory, Recorder, RecordingError, causes_of, recorder_of
from launcher.engine.step_result import StepResult
from launcher.engine.stepper import Stepper

MARK = "launcher: seen"
LIVE = (
    "a step cannot be recorded while the graph of an earlier loss is alive, {where}. Drop what holds it "
    "before record(): `del loss_sum`, and outputs of the model; keep loss_sum.detach()."
)
WARM_UP = 3  # ordinary steps: they compile, choose algorithms, create handles and communicators


class StepGraph:
    """Records one step of a Stepper, with its forward and backward passes, and replays it.

        graph = StepGraph(stepper)
        graph.record(passes)      # passes(): forward and stepper.backward() for each micro-batch of a step
        images.copy_(next_images)
        result = graph.replay()   # in place of passes() and stepper.step()

    Replays read their inputs from the tensors that `passes` read when it was recorded, and write to the same
    memory: fill the inputs in place, and copy what `passes` leaves behind before the next replay. Numbers
    that Python computes are those of the recording for ever. Loss scale, skipped steps, learning rate,
    counters and random numbers are on the device and change as in `step()`. Ordinary steps may come between
    replays, for batches of other shapes, which need memory of their own. All ranks of the Stepper's group
    record and replay alike.

    `ran_out` says of an error whether memory has run out; None: whether it is torch.OutOfMemoryError. Raises
    UnusableError on a device without a recorder, and for a Stepper whose steps wait for the device.
    """

    def __init__(
        self,
        stepper: Stepper,
        recorder: Recorder | None = None,
        ran_out: Callable[[BaseException], object] | None = None,
    ) -> None:
        recorder = recorder or recorder_of(stepper.device)
        if recorder is None:
            raise UnusableError(
                f"a step on the device {stepper.device.type} cannot be recorded: it needs CUDA."
            )
        if reason := waits_for_device(stepper):
            raise UnusableError(f"this step cannot be recorded: {reason}.")
        self._stepper = stepper
        self._recorder = recorder
        self._ran_out = ran_out or (lambda error: isinstance(error, torch.OutOfMemoryError))
        self._replays: list[Callable[[], object]] = []
        self._packed: dict[int, Tensor] = {}  # by recording, of its latest replay
        self._wire_bytes = 0  # the same whatever the batch

    def record(self, *passes: Callable[[], object]) -> None:
        """Rehearse and record. Weights, states, counters and random numbers are afterwards as they were.

        Several `passes`, for batches of several sizes, are recorded in the same memory: the largest first.
        A collective. Raises, on all ranks, HostRead where `passes` wait for the device on one of them, and
        NoMemory where it runs out there; the Stepper can be used as before. After a RecordingError end the
        process. Raises UnusableError, on all ranks, while the graph of an earlier loss is alive. Other errors
        are of `passes`.
        """
        self._refuse_live_graphs()
        device = self._stepper.device
        # To the host: the device may have no room for a second copy of everything.
        kept = [(tensor, tensor.to("cpu", copy=True)) for tensor in self._stepper.tensors()]
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []), self._recorder.aside():
                for each in passes:
                    self._rehearse(each)
        finally:
            for tensor, copy in kept:
                tensor.copy_(copy)
        self._agree(self._recorded(passes))
        self._stepper.clock.restart()

    def release(self) -> None:
        """Drop the recordings. Before the process group is destroyed: NCCL waits for graphs that use it.

        ncclCommDestroy polls until no graph with one of the communicator's kernels is left (init.cc,
        commDestroySync).
        """
        self._replays, self._packed = [], {}

    def replay(self, number: int = 0) -> StepResult:
        """A step on what the inputs hold now, by the recording of that number among the `passes`.

        Its result is that of `Stepper.step`. A collective.
        """
        assert self._replays, "record() comes first"
        self._stepper.prepare_replay()
        self._replays[number]()
        for part in (COMPUTE, UPDATE):  # all of it counts as the first: no clock within it would be read
            self._stepper.clock.mark(part)
        return self._stepper.report(self._packed[number].clone(), self._wire_bytes)  # read after the next

    def _refuse_live_graphs(self) -> None:
        """A graph keeps its parameters' AccumulateGrad nodes, and these the stream on which it was computed.

        The recorded backward pass would end on that stream, which a capture refuses without the cause.
        """
        # A dead graph in a reference cycle is alive until it is collected, and would be reported for nothing.
        gc.collect()
        parameters = self._stepper.layout.parameters.items()
        name = next((name for name, parameter in parameters if _in_a_graph(parameter)), "")
        self._agree(UnusableError(LIVE.format(where=f"that parameter {name} is part of")) if name else None)

    def _rehearse(self, passes: Callable[[], object]) -> None:
        """A few real steps, the last of them under a check. All ranks run as many, whatever one finds."""
        failure: Exception | None = None
        for number in range(WARM_UP + 1):
            try:
                with self._recorder.refusing_reads() if number == WARM_UP else nullcontext():
                    passes()
                self._stepper.step_on_device()
            except Exception as error:
                failure = self._own(error)
                if failure is None or not self._stepper.can_abandon:
                    raise
                # The same collectives as the step() of the other ranks.
                self._stepper.abandon()
        self._agree(failure)

    def _recorded(self, passes: tuple[Callable[[], object], ...]) -> Exception | None:
        """Record all of them; returns what shows that memory ran out."""
        for number, each in enumerate(passes):
            try:
                self._replays.append(self._recorder.record(partial(self._step, number, each)))
            except Exception as error:
                failure = self._own(error)
                if not isinstance(failure, NoMemory):
                    raise RecordingError(str(error)) from error
                self._stepper.forget_step()
                return failure
        return None

    def _step(self, number: int, passes: Callable[[], object]) -> None:
        passes()
        packed, self._wire_bytes = self._stepper.step_on_device()
        assert isinstance(packed, Tensor), "a host that decides has no part in a recording"
        self._packed[number] = packed

    def _own(self, error: Exception) -> Exception | None:
        """What `record` raises after this error if the Stepper can be used as before; else None."""
        read = next((each for each in causes_of(error) if isinstance(each, HostRead)), None)
        if read is not None or not self._ran_out(error):
            return read
        traceback.clear_frames(error.__traceback__)  # they hold what the failed pass has allocated
        failure = NoMemory(str(error))
        failure.__cause__ = error
        return failure

    def _agree(self, failure: Exception | None) -> None:
        """Raise on all ranks where one has a failure: its own, or that of another. A collective."""
        kinds = (
            HostRead("another rank waits for the device"),
            NoMemory("memory ran out on another rank"),
            UnusableError(LIVE.format(where="on another rank")),
        )
        found = [number for number, kind in enumerate(kinds, 1) if isinstance(failure, type(kind))]
        number = torch.tensor(max(found, default=0), device=self._stepper.device)
        works.all_reduce(number, self._stepper.group, dist.ReduceOp.MAX)
        if worst := int(number):
            self.release()
            raise failure or kinds[worst - 1]


def waits_for_device(stepper: Stepper) -> str:
    """Why the host has a part in each step of this Stepper, whatever the model does; empty if it has none."""
    if isinstance(stepper.updater, AdaptedUpdater):
        return "an optimizer of torch.optim waits for the verdict of each step on the host; use SGD or AdamW"
    if stepper.decides_on_host:
        return "the host reads the verdict of each step on a CPU; build the Stepper with capturable=True"
    return ""


def _in_a_graph(parameter: Tensor) -> bool:
    """Whether a graph of autograd that is alive has this parameter in it."""
    if not parameter.requires_grad:
        return False
    # Its AccumulateGrad node is new for each call, and the mark is lost with it unless a graph holds it.
    edge_of: Any = get_gradient_edge  # torch declares `metadata` as a method
    edge_of(parameter).node.metadata[MARK] = True
    return MARK in edge_of(parameter).node.metadata
