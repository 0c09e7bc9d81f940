"""A whole training step recorded once and replayed: no Python, no launches, the same bits.

Owns the rehearsal before the recording, which changes no state, and what the host still does around a replay.
What a step computes is the Stepper's; how it is recorded is the recorder's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.works as works
from launcher.engine.diagnostics.step_timer import COMPUTE, UPDATE
from launcher.engine.errors import UnusableError
from launcher.engine.optim.torch_optimizer import AdaptedUpdater
from launcher.engine.recorder import HostRead, Recorder, RecordingError, causes_of, recorder_of
from launcher.engine.step_result import StepResult
from launcher.engine.stepper import Stepper

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
    replays, for batches of other shapes. All ranks of the Stepper's group record and replay alike.

    Raises UnusableError on a device without a recorder, and for a Stepper whose steps wait for the device.
    """

    def __init__(self, stepper: Stepper, recorder: Recorder | None = None) -> None:
        recorder = recorder or recorder_of(stepper.device)
        if recorder is None:
            raise UnusableError(
                f"a step on the device {stepper.device.type} cannot be recorded: it needs CUDA."
            )
        if reason := waits_for_device(stepper):
            raise UnusableError(f"this step cannot be recorded: {reason}.")
        self._stepper = stepper
        self._recorder = recorder
        self._replay: Callable[[], object] | None = None
        self._packed: Tensor | None = None  # of the latest replay
        self._wire_bytes = 0

    def record(self, passes: Callable[[], object]) -> None:
        """Rehearse and record. Weights, states, counters and random numbers are afterwards as they were.

        A collective. Raises HostRead, on all ranks, where `passes` waits for the device on one of them; the
        Stepper can be used as before. After a RecordingError end the process. Other errors are of `passes`.
        """
        kept, generators = _copies(self._stepper.tensors()), _generators(self._stepper.device)
        try:
            with self._recorder.aside():
                self._rehearse(passes)
        finally:
            for tensor, copy in kept:
                tensor.copy_(copy)
            _restore(generators, self._stepper.device)
        try:
            self._replay = self._recorder.record(lambda: self._step(passes))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise RecordingError(str(error)) from error
        self._stepper.clock.restart()

    def release(self) -> None:
        """Drop the recording. Before the process group is destroyed: NCCL waits for graphs that use it.

        ncclCommDestroy polls until no graph with one of the communicator's kernels is left (init.cc,
        commDestroySync).
        """
        self._replay = self._packed = None

    def replay(self) -> StepResult:
        """A step on what the inputs hold now; its result is that of `Stepper.step`. A collective."""
        assert self._replay is not None, "record() comes first"
        assert self._packed is not None
        self._stepper.prepare_replay()
        self._replay()
        for part in (COMPUTE, UPDATE):  # all of it counts as the first: no clock within it would be read
            self._stepper.clock.mark(part)
        return self._stepper.report(self._packed.clone(), self._wire_bytes)  # read after the next replay

    def _rehearse(self, passes: Callable[[], object]) -> None:
        """A few real steps, the last of them under a check. All ranks run as many, whatever one finds."""
        read: HostRead | None = None
        for number in range(WARM_UP + 1):
            try:
                if number < WARM_UP:
                    passes()
                else:
                    with self._recorder.refusing_reads():
                        passes()
            except Exception as error:
                read = next((each for each in causes_of(error) if isinstance(each, HostRead)), None)
                if read is None:
                    raise
                self._stepper.abandon()
            else:
                self._stepper.step_on_device()
        if self._any_rank(read is not None):
            raise read or HostRead("another rank waits for the device")

    def _step(self, passes: Callable[[], object]) -> None:
        passes()
        packed, self._wire_bytes = self._stepper.step_on_device()
        assert isinstance(packed, Tensor), "a host that decides has no part in a recording"
        self._packed = packed

    def _any_rank(self, found: bool) -> bool:
        group = self._stepper.group
        number = torch.tensor(int(found), device=self._stepper.device)
        if group is not None:
            works.run(dist.all_reduce(number, group=group, async_op=True), number)
        return bool(number)


def waits_for_device(stepper: Stepper) -> str:
    """Why the host has a part in each step of this Stepper, whatever the model does; empty if it has none."""
    if isinstance(stepper.updater, AdaptedUpdater):
        return "an optimizer of torch.optim waits for the verdict of each step on the host; use SGD or AdamW"
    if stepper.decides_on_host:
        return "the host reads the verdict of each step on a CPU; build the Stepper with capturable=True"
    return ""


def _copies(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each with its values on the host: the device may have no room for a second copy of everything."""
    return [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]


def _generators(device: torch.device) -> list[Tensor]:
    """The states of torch's default generators, of the host and of the device."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *own]


def _restore(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
