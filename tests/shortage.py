"""A shortage of memory at any allocation of torch that a test chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NOWHERE = -1


class Shortage(TorchDispatchMode):
    """Memory that runs out at the allocation with the number `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.allocations = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = [each for each in func._schema.returns if "Tensor" in str(each.type)]
        is_view = any(each.alias_info is not None for each in returns) and "lift" not in func._schema.name
        if returns and not is_view and func.namespace != "c10d":
            self.allocations += 1
            if self.allocations == self.at + 1:
                raise torch.OutOfMemoryError(f"no memory for {func._schema.name}")
        return func(*args, **(kwargs or {}))
