"""Collectives on texts, bytes and named tensors, and gathers of numbers.

Sums over the ranks are in `engine.async_work`. All ranks call each function at the same point; `group` None
is one process. Nothing is unpickled here. Work handles are kept as in the engine: dropping one can abort the
process at shutdown.

A rank that raised before a collective would leave the others waiting in it: a message is the content that
they wait for, or the error that the rank had instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.async_work as async_work
import launcher.errors
from launcher.distributed.env import RANK0, WorkerEnv, format_ranks
from launcher.engine.state import LazyTensors
from launcher.errors import LauncherError

CONTENT, ERROR = b"+", b"-"
PIECE_BYTES = 16 << 20  # on the device at a time: the memory of a GPU may be full of what is loaded


def all_gather_str(env: WorkerEnv, text: str) -> list[str]:
    """The `text` of each rank, by rank. A collective; bytes only, nothing is unpickled."""
    if env.group is None:
        return [text]
    data = text.encode(errors="surrogatepass")  # all ranks get the text that a single one would
    # Lengths first: a gather needs equal sizes, so all texts are padded to the longest.
    lengths = gather(torch.tensor([len(data)], device=env.device), env.group)
    longest = max(int(length) for length in lengths)
    padded = bytearray(data.ljust(longest + 1))  # at least one byte: an empty buffer is refused
    rows = gather(torch.frombuffer(padded, dtype=torch.uint8).to(env.device), env.group)
    texts = (row.cpu().numpy().tobytes()[: int(length)] for row, length in zip(rows, lengths, strict=True))
    return [each.decode(errors="surrogatepass") for each in texts]


def broadcast_bytes(env: WorkerEnv, data: bytes, sender: int) -> bytes:
    """`data` of the rank `sender`; that of the other ranks is ignored. A collective."""
    if env.group is None:
        return data
    length = torch.tensor([len(data)], device=env.device)
    # The length first: the other ranks have to know how many bytes they receive.
    async_work.broadcast(length, env.group, sender)
    content = torch.zeros(int(length) + 1, dtype=torch.uint8, device=env.device)  # an empty one is refused
    if env.rank == sender:
        content[:-1] = torch.frombuffer(bytearray(data + b"."), dtype=torch.uint8)[:-1].to(env.device)
    async_work.broadcast(content, env.group, sender)
    return content[:-1].cpu().numpy().tobytes()


def broadcast_tensors(env: WorkerEnv, tensors: Mapping[str, Tensor]) -> LazyTensors:
    """Rank 0's tensors by name, each on the CPU of all ranks once it is asked for.

    What the others give is ignored. A collective, and so is each tensor: no rank needs host memory for more
    than one beside those that it keeps.
    """
    own = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    received = json.loads(broadcast_bytes(env, json.dumps(own).encode(), RANK0))
    forms = {name: (torch.Size(shape), getattr(torch, dtype)) for name, (dtype, shape) in received.items()}
    # One for all: a work of Gloo keeps its tensor for a second after it has ended.
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=env.device)

    def receive(name: str) -> Tensor:
        shape, dtype = forms[name]
        tensor = tensors[name].contiguous() if env.is_rank0 else torch.empty(shape, dtype=dtype)
        if env.group is not None and tensor.numel():
            for piece in torch.split(tensor.reshape(-1).view(torch.uint8), PIECE_BYTES):
                there = buffer[: len(piece)]
                if env.is_rank0:
                    there.copy_(piece)
                async_work.broadcast(there, env.group, RANK0)
                if not env.is_rank0:
                    piece.copy_(there)
        return tensor

    return LazyTensors(forms, receive)


def gather(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """`own` of each rank, by rank: tensors of one shape and dtype, on its device."""
    if group is None:
        return [own]
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    async_work.run(dist.all_gather(rows, own, group=group, async_op=True), own)
    return rows


def pack_result(make: Callable[[], bytes]) -> bytes:
    """What `make` returns, or the LauncherError that it raises, as a message."""
    try:
        return CONTENT + make()
    except LauncherError as error:
        return error_message(error)


def error_message(error: LauncherError) -> bytes:
    """The class, the text and the traceback of an error as a message."""
    return ERROR + json.dumps([type(error).__name__, str(error), error.traceback]).encode()


def unpack_result(message: bytes) -> bytes:
    """The content of a message. Raises the sender's LauncherError."""
    if message[:1] == ERROR:
        raise _error_of(message)
    return message[1:]


def from_rank0(env: WorkerEnv, make: Callable[[], bytes]) -> bytes:
    """What `make` returns on rank 0. Raises its LauncherError on all ranks. A collective."""
    return unpack_result(broadcast_bytes(env, pack_result(make) if env.is_rank0 else b"", RANK0))


def _error_of(message: bytes) -> LauncherError:
    kind, text, traceback = json.loads(message[1:])
    error: LauncherError = getattr(launcher.errors, kind, LauncherError)(text)
    error.traceback, error.shared = traceback, True
    return error


@contextmanager
def raise_on_all_ranks(env: WorkerEnv) -> Iterator[None]:
    """Raise a LauncherError of the code within on all ranks. A collective at the end of the context.

    Of several errors all ranks raise that of the lowest rank, with the ranks in front where some had none.
    """
    own = ""
    try:
        yield
    except LauncherError as error:
        own = error_message(error).decode()
    messages = all_gather_str(env, own)
    failed = [rank for rank, message in enumerate(messages) if message]
    if failed:
        first = _error_of(messages[failed[0]].encode())
        raise first if len(failed) == env.world_size else type(first)(f"on {format_ranks(failed)}: {first}")
