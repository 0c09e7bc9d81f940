"""Data sets whose large columns the training process reads for itself, from a file that all processes map.

A loader process then hands over a number in place of the column. To send the column through shared memory
takes longer than to read it: new memory for each batch, zeroed and mapped page by page in both processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from launcher.data.tensors import Batch


class ByReference(ABC):
    """A map-style data set that can give its samples by reference. Used where the recipe has no collate."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def reference(self, index: int, generator: torch.Generator) -> object:
        """The sample without what `complete` adds, its random numbers drawn from `generator`."""

    @abstractmethod
    def collate(self, samples: Sequence[Any]) -> Batch:
        """The batch of such samples, which may be complete already."""

    @abstractmethod
    def complete(self, batch: Batch, pinned: bool) -> Batch:
        """The whole batch, on the CPU; of one that is complete, itself. In the process that trains.

        `pinned`: what is added is in memory that a GPU copies from by itself.
        """
