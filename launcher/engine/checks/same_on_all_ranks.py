"""Refuses to build a Stepper where ranks have different models or different settings.

Owns what must be equal on all ranks, as texts. Ranks with another policy, clip norm or optimizer would train
without an error and drift apart. `micro_batches` and `emulate` may differ: no bit that ranks share
depends on them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor, nn

import launcher.engine.works as works
from launcher.engine.errors import UnusableError, listed
from launcher.engine.names import named_buffers, named_parameters

SHOWN = 4  # differences of one rank that an error names
TEXT_BYTES = 1024  # of one rank's part of that error
REFUSED = "the error"  # of a rank by itself
PLAIN = (str, int, Enum, torch.dtype, type(None))


@contextmanager
def refusing_together(model: object, group: works.Group) -> Iterator[None]:
    """The context for the checks that a rank makes alone, before all ranks call `refuse_differences`.

    Where a rank raises, the others would wait for it there for ever. So it takes part, and they raise too.
    """
    try:
        yield
    except Exception as error:
        if group is not None:
            text = f"{type(error).__name__}: {error}".rstrip(".")
            _unlike({REFUSED: text}, model if isinstance(model, nn.Module) else nn.Module(), group)
        raise


def refuse_differences(model: nn.Module, settings: Mapping[str, object], group: works.Group) -> None:
    """Require the same tensors in the same order and the same settings on all ranks.

    Raises UnusableError on all ranks or on none. A collective of 24 bytes, unless there is a difference.
    """
    if group is not None and (found := _unlike(dict(_texts(model, settings)), model, group)):
        raise UnusableError(found)


def _unlike(own: dict[str, str], model: nn.Module, group: dist.ProcessGroup) -> str:
    """The error for `own` texts that are not those of all ranks; empty if they are. A collective."""
    data = json.dumps(own, sort_keys=True).encode()  # the order of keywords means nothing
    # 7 bytes: the number and its negative both fit int64.
    digest = int.from_bytes(hashlib.sha256(data).digest()[:7], "little")
    device = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    if dist.get_backend(group) == "nccl":  # also of a rank whose model is on the CPU, or is none
        device = torch.device("cuda")
    # One MAX of x and of -x gives the largest and the smallest: opposite only if x is the same on all ranks.
    agreed = torch.tensor([digest, -digest, len(data)], dtype=torch.int64, device=device)
    works.all_reduce(agreed, group, dist.ReduceOp.MAX)
    largest, negative, length = agreed.tolist()
    if largest == -negative:
        return ""
    whole = _bytes_tensor(data, length, device)
    works.broadcast(whole, group)
    found = _bytes_tensor(_differences(own, json.loads(_bytes(whole))).encode(), TEXT_BYTES, device)
    rows = [torch.empty_like(found) for _ in range(dist.get_world_size(group))]
    works.run(dist.all_gather(rows, found, group=group, async_op=True), found)
    return (
        "the ranks were given different models or settings. "
        f"{_by_ranks([_bytes(row).decode(errors='ignore') for row in rows])}. Build the same model in the "
        "same order on all ranks, and decide on settings from what they share, not from a rank's own data."
    )


def _texts(model: nn.Module, settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """What is compared, by a name that an error can show; settings first."""
    for name, value in settings.items():
        yield from _of(name, value)
    tensors = [*named_parameters(model).items(), *named_buffers(model).items()]
    yield "number of parameters and buffers", str(len(tensors))
    for number, (name, t) in enumerate(tensors, 1):
        trained = "trainable" if t.requires_grad else "not trainable"
        # A dimension of one element has any stride: in a 1x1 kernel channels_last is no other order.
        strides = tuple(1 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))
        text = f"{name} {tuple(t.shape)}, strides {strides}, {t.dtype}, {trained}"
        yield f"parameter or buffer {number}", text


def _of(name: str, value: object) -> Iterator[tuple[str, str]]:
    """A setting and the fields of it; of an object that is no plain value the type, not its address."""
    if hasattr(value, "tolist"):  # a tensor, an array, or a number of NumPy's
        value = value.tolist()
    if (text := _text(value)) is not None:
        yield name, text
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _of(f"{name}.{key}", part)
    elif isinstance(value, Set):
        yield name, _row(sorted(text for part in value for _, text in _of(name, part)))
    elif isinstance(value, Sequence):
        texts = [text for part in value if (text := _text(part)) is not None]
        if len(texts) == len(value):  # such as a learning rate for each of a million steps
            yield name, _row(texts)
            return
        parts = [list(_of(f"{name}[{number}]", part)) for number, part in enumerate(value)]
        if all(len(part) == 1 for part in parts):
            parts = [[(name, _row([text for [(_, text)] in parts]))]]
        yield from itertools.chain(*parts)
    else:
        yield name, getattr(value, "__qualname__", type(value).__name__)  # of a class or function its own
        if dataclasses.is_dataclass(value):
            yield from _of(name, {each.name: getattr(value, each.name) for each in dataclasses.fields(value)})


def _text(value: object) -> str | None:
    """The text of a plain value, the same for 1 and 1.0; None of any other."""
    if isinstance(value, float) or (isinstance(value, Real) and not isinstance(value, int)):
        return str(float(value)).removesuffix(".0")
    return str(value) if isinstance(value, PLAIN) else None


def _row(texts: Sequence[str]) -> str:
    """Values in a line; of a long one the ends, and a digest of all."""
    text = ", ".join(texts)
    if len(texts) <= SHOWN:
        return f"({text})"
    return f"{len(texts)} from {texts[0]} to {texts[-1]} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _differences(own: dict[str, str], first: dict[str, str]) -> str:
    """What differs between this rank and rank 0; empty if nothing does. A refusal comes without the rest."""
    if REFUSED in own | first:
        own, first = ({REFUSED: each.get(REFUSED, "none")} for each in (own, first))
    names = [name for name in own | first if own.get(name) != first.get(name)]
    found = [f"{name} is {own.get(name, 'absent')}, not {first.get(name, 'absent')}" for name in names]
    return listed(found, SHOWN, "; ")


def _by_ranks(texts: Sequence[str]) -> str:
    """Each text once, with the ranks that have it. Rank 0, which the others are compared with, has none."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            ranks.setdefault(text, []).append(rank)
    shown = [f"on rank(s) {listed(each, 8)} {text}" for text, each in ranks.items()]
    return f"Unlike on rank 0, {listed(shown, SHOWN, '. Unlike on rank 0, ')}"


def _bytes_tensor(data: bytes, length: int, device: torch.device | None) -> Tensor:
    """uint8 [length], filled up with zeros."""
    return torch.frombuffer(bytearray(data[:length].ljust(length, b"\0")), dtype=torch.uint8).to(device)


def _bytes(row: Tensor) -> bytes:
    return bytes(row.tolist()).rstrip(b"\0")
