"""Checks that all ranks build a Stepper of the same model with the same settings.

Owns what must be equal, as texts. Ranks with another policy, clip norm or optimizer would train without an
error and drift apart. `micro_batches` and `emulate` may differ: they change a rank's part of the sum, and all
ranks receive the same sum.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

import launcher.engine.async_work as async_work
from launcher.engine.errors import UnusableError, listed
from launcher.engine.names import named_buffers, named_parameters

SHOWN = 4  # differences that an error names
LONGEST = 200  # characters of a value in such an error; of a longer one it has the ends, and a digest


def check_same_on_all_ranks(
    model: nn.Module, settings: Mapping[str, object], group: async_work.Group
) -> None:
    """Require the same tensors in the same order and the same settings on all ranks.

    Raises UnusableError on all ranks or on none. A collective, of 16 bytes per rank unless there is a
    difference.
    """
    if group is None:
        return
    texts = dict(text for name, value in settings.items() for text in _setting(name, value))
    if found := _differences(texts | _tensors(model), model, group):
        raise UnusableError(
            f"the ranks were given different models or settings. {found}. Build the same model in the same "
            "order on all ranks, and decide on settings from what they share, not from a rank's own data."
        )


def _setting(name: str, value: object) -> Iterator[tuple[str, str]]:
    """A setting as texts by name, field by field where it has fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield name, type(value).__name__
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, part in sorted(value.items()):  # the order of keywords means nothing
            yield from _setting(f"{name}.{key}", part)
    else:
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # of an object the type, not its address
        if len(text) > LONGEST:  # such as a learning rate for each of a million steps
            text = f"{text[:80]} ... {text[-20:]} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
        yield name, text


def _tensors(model: nn.Module) -> dict[str, str]:
    """The parameters and buffers of a model as texts, by position: their order decides where each is sent."""
    tensors = [*named_parameters(model).items(), *named_buffers(model).items()]
    texts = {"number of parameters and buffers": str(len(tensors))}
    for number, (name, t) in enumerate(tensors, 1):
        trained = "trainable" if t.requires_grad else "not trainable"
        # A dimension of one element has any stride: in a 1x1 kernel channels_last is no other order.
        strides = tuple(1 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))
        shown = f"{name} {tuple(t.shape)}, strides {strides}, {t.dtype}, {trained}"
        texts[f"parameter or buffer {number}"] = shown
    return texts


def _differences(own: dict[str, str], model: nn.Module, group: dist.ProcessGroup) -> str:
    """What differs between `own` texts and those of the other ranks; empty if nothing does. A collective."""
    data = json.dumps(own, sort_keys=True).encode()
    device = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    if dist.get_backend(group) == "nccl":  # also of a rank whose model is on the CPU, or is none
        device = torch.device("cuda")
    digest = int.from_bytes(hashlib.sha256(data).digest()[:7], "little")  # 7 bytes: it fits int64
    summaries = _gathered(torch.tensor([digest, len(data)], device=device), group)
    if all(summary == summaries[0] for summary in summaries):
        return ""
    longest = max(length for _, length in summaries)
    row = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8).to(device)
    return _by_ranks([json.loads(bytes(each)) for each in _gathered(row, group)])


def _gathered(row: torch.Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    """The integers of each rank, in the order of the ranks."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    async_work.run(dist.all_gather(rows, row, group=group, async_op=True), row)
    return [each.tolist() for each in rows]


def _by_ranks(texts: Sequence[dict[str, str]]) -> str:
    """Which ranks differ from rank 0, and how the first of them does."""
    first = texts[0]
    ranks = [rank for rank, own in enumerate(texts) if own != first]
    own = texts[ranks[0]]
    names = [name for name in own | first if own.get(name) != first.get(name)]
    found = [f"{name} is {own.get(name, 'absent')}, not {first.get(name, 'absent')}" for name in names]
    return f"Rank(s) {listed(ranks, 8)} differ from rank 0: on rank {ranks[0]} {listed(found, SHOWN, '; ')}"
