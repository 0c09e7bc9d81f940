"""A stand-in for CUDA graphs on a CPU: records the operations of a call, and repeats them without Python.

It keeps the rules of a capture. Nothing runs while it is recorded: all memory is put back afterwards. A
replay calls the same operations on the same memory with the same numbers, so a learning rate, a seed or a
slice that Python computed is that of the recording. Reading a value is refused. Random numbers continue the
sequence of the default generator; another one is refused, as one that is not registered with a graph.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.engine.recorder import HostRead, causes_of

# They read only what is on a CPU, and nothing on a GPU; no number of theirs gets into a step.
ONLY_ON_A_CPU = {("errors.py", "refuse_count"), ("mean_loss.py", "_on_host")}
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Tape:
    """A recorder of the engine. Counts the calls of `record`, and those of what it returned."""

    def __init__(self) -> None:
        self.recordings = 0
        self.replays = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def refusing_reads(self) -> TorchDispatchMode:
        return _RefusingReads()

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        self.recordings += 1
        generator = torch.get_rng_state()
        recording = _Recording()
        try:
            with recording:
                work()
        finally:
            recording.put_memory_back()
            torch.set_rng_state(generator)

        def replay() -> None:
            self.replays += 1
            recording.repeat()

        return replay


class Again(Tape):
    """What replays are compared with: `work` is called again, with all its Python, each time."""

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        def replay() -> None:
            self.replays += 1
            work()

        super().record(work)  # whatever the call leaves in Python's objects it leaves here too
        return replay


class _RefusingReads(TorchDispatchMode):
    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        for each in () if error is None else causes_of(error):
            each.__traceback__ = _without_this_file(each.__traceback__)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        _refuse_read(func, args)
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []  # operation, arguments, what it returned
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: its bytes, and a copy of them
        self._made: dict[
            int, object
        ] = {}  # storages of this recording, kept so that no other gets their place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        _refuse_read(func, args)
        if kwargs.get("generator") is not None:
            raise RuntimeError(f"{func}: a generator of its own is not registered with the graph")
        given = _tensors((args, kwargs))
        for tensor in given:
            self._keep(tensor)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._before:
                self._made[storage._cdata] = storage
        self._calls.append((func, args, kwargs, result))
        return result

    def repeat(self) -> None:
        """The same operations on the same memory."""
        with torch.no_grad():
            for func, args, kwargs, result in self._calls:
                again = func(*args, **kwargs)
                if func.namespace == "c10d":
                    work = again[-1] if isinstance(again, tuple) else again
                    dist.Work.unbox(work).wait()  # nothing else in a replay waits for it
                for old, new in zip(_tensors(result), _tensors(again), strict=True):
                    if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                        old.copy_(new)

    def put_memory_back(self) -> None:
        for place, copy in self._before.values():
            place.copy_(copy)

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._before and storage._cdata not in self._made:
            place = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[storage._cdata] = place, place.clone()


def _without_this_file(trace: TracebackType | None) -> TracebackType | None:
    """A GPU's error comes from torch itself."""
    if trace is None or trace.tb_frame.f_code.co_filename == __file__:
        return None if trace is None else _without_this_file(trace.tb_next)
    return TracebackType(_without_this_file(trace.tb_next), trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _refuse_read(func: Any, args: tuple[Any, ...]) -> None:
    if not READS.intersection(func.tags):
        return
    if func is torch.ops.aten.index.Tensor and not any(
        each.dtype == torch.bool for each in _tensors(args[1])
    ):
        return  # only a mask decides on the size of the result
    frames = traceback.extract_stack()
    if not any((frame.filename.rpartition("/")[2], frame.name) in ONLY_ON_A_CPU for frame in frames):
        raise HostRead(f"{func} reads a value on the host")
