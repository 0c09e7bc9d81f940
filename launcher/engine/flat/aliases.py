"""Which tensors of a model share memory, without being one tensor.

Owns the search, and the refusal of what flat memory cannot keep: moving a parameter into it would part the
parameter from its alias, and the two would train apart. Aliases among buffers are kept; `buffers` does that.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from launcher.engine.errors import UnusableError


def extent(tensor: Tensor) -> int:
    """Elements from the first to the last in memory, both included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def neighbourhoods(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of tensors whose ranges of memory overlap, directly or through others, in order of address."""
    found: list[list[str]] = []
    end, device = 0, None
    held = [(str(t.device), t.data_ptr(), name) for name, t in tensors.items() if t.numel() and t.data_ptr()]
    for place, start, name in sorted(held):
        if place != device or start >= end:
            found.append([])
            end, device = start, place
        found[-1].append(name)
        end = max(end, start + extent(tensors[name]) * tensors[name].element_size())
    return [names for names in found if len(names) > 1]


def refuse_aliases(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
    """Raise UnusableError for memory that a parameter shares with itself, another parameter or a buffer.

    Also for buffers that share memory in a form that `Buffers` does not keep.
    """
    for name, p in parameters.items():
        if p.requires_grad and _overlaps_itself(p):
            raise UnusableError(
                f"parameter {name} has {p.numel()} elements, several of which are one place in memory "
                f"(strides {p.stride()}). Register the smaller tensor, and expand it in forward()."
            )
    tensors: dict[str, Tensor] = {**buffers, **parameters}
    for names in neighbourhoods(tensors):
        for name, other in itertools.combinations(names, 2):
            if parameters.keys() & {name, other} and _share(tensors[name], tensors[other]):
                raise UnusableError(
                    f"{name} and {other} share memory through their data, which would end when the Stepper "
                    "moves parameters into flat memory. Tie parameters by one object (`head.weight = "
                    "embedding.weight`), and compute in forward() what depends on one."
                )
        if parameters.keys() & set(names):
            continue
        alike = len({(tensors[name].dtype, tensors[name].untyped_storage().data_ptr()) for name in names})
        if alike > 1 or any(_overlaps_itself(tensors[name]) for name in names):
            raise UnusableError(
                f"buffers {', '.join(names)} share memory, and one has another dtype or storage, or is "
                "expanded, which flat memory cannot keep. Register one, and compute the others in forward()."
            )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether it has more elements than memory, as after expand()."""
    return extent(tensor) < tensor.numel()


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether tensors whose ranges overlap have a byte in common: two columns of a matrix have none."""
    start = min(one.data_ptr(), other.data_ptr())
    end = max(t.data_ptr() + extent(t) * t.element_size() for t in (one, other))
    used = torch.zeros(end - start, dtype=torch.bool)
    _bytes(one, used, start).fill_(True)
    return bool(_bytes(other, used, start).any())


def _bytes(tensor: Tensor, memory: Tensor, start: int) -> Tensor:
    """The places of its bytes in `memory`, which begins at the address `start`."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return memory.as_strided((*tensor.shape, size), (*strides, 1), tensor.data_ptr() - start)
