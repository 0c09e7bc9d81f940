"""Refuses a collective of user code that the ranks would call with different shapes, or not equally often.

Gloo ends such a process with an abort and NCCL waits for ever, so it is looked for where a recipe's loss is
tried before the first step. Owns how a collective is seen before it runs; which samples the ranks have is for
the caller to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.config.user_code import calling_line
from launcher.distributed.collectives import all_gather_str
from launcher.distributed.env import WorkerEnv
from launcher.errors import ConfigError

# Operators of c10d to which each rank gives tensors of the same shapes.
SAME_SHAPE_OPS = ("allgather", "allreduce", "reduce_scatter", "broadcast")


class UnevenCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which a collective over all ranks raises ConfigError where it would fail in training.

    `sizes` has, by rank, the numbers of samples that calls of this code get. Where the ranks make equally
    many calls, they compare the shapes of their tensors before each collective, and raise alike. If only the
    first call `is_sample` of the others, no tensor of several elements is allowed where sizes differ.
    `in_collective` is the context of each collective: a rank waits there for others that may have failed.
    """

    def __init__(
        self,
        env: WorkerEnv,
        sizes: Sequence[Sequence[int]],
        advice: str,
        is_sample: bool = False,
        in_collective: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._env, self._sizes, self._advice = env, [list(calls) for calls in sizes], advice
        self._is_sample, self._in_collective = is_sample, in_collective

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d" and any(name in func._schema.name for name in SAME_SHAPE_OPS):
            with self._in_collective():
                self._check(func._schema.name.removeprefix("c10d::").strip("_"), args)
        if func.namespace == "c10d":
            with self._in_collective():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _check(self, name: str, args: tuple[Any, ...]) -> None:
        groups = [dist.ProcessGroup.unbox(each) for each in args if type(each) is torch.ScriptObject]
        if self._env.group is None or groups[0].size() != self._env.world_size:
            return  # of a group of the recipe's own, which this rank cannot judge
        tensor = [each for each in tree_leaves(args) if isinstance(each, Tensor)][-1]  # what this rank gives
        calls, differ = [len(each) for each in self._sizes], len(set(map(str, self._sizes))) > 1
        if len(set(calls)) > 1:
            raise self._refusal(name, f"the ranks call it {calls} times")
        if self._is_sample and differ and tensor.numel() > 1:
            raise self._refusal(name, "the ranks have batches of unequal sizes")
        shapes = all_gather_str(self._env, str(list(tensor.shape)))
        if len(set(shapes)) > 1:
            given = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
            raise self._refusal(name, f"the ranks give it tensors of {given}")

    def _refusal(self, name: str, found: str) -> ConfigError:
        line = calling_line()
        at = f" at {line[0]}:{line[1]}" if line else ""
        return ConfigError(
            f"the recipe's loss calls the collective {name}{at}, but {found}. All ranks must call it equally "
            f"often, with tensors of one shape. {self._advice}"
        )
