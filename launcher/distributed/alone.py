"""Runs code of the user as if its process were alone, so that it cannot wait for ranks that never come.

Owns how the process group is hidden, and the error for code that needs it. The group itself is untouched:
the launcher passes it on as an object and does not look it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from launcher.errors import ConfigError
from launcher.user_code import user_location

NO_GROUP = "Default process group has not been initialized"  # of torch, in a ValueError


_hidden: list[dist.Store | None] = []  # of the groups that the contexts below hide, outermost first


def default_store() -> dist.Store | None:
    """The store of the ranks' group, also while it is hidden; None in a process that trains alone."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    return _hidden[-1] if _hidden else None


@contextmanager
def hidden_process_group(what: str) -> Iterator[None]:
    """Within the context `torch.distributed.is_initialized()` is false.

    Libraries that would gather, as torchmetrics does, take what this process has. A collective is a
    ConfigError that begins with `what`.
    """
    group = dist.GroupMember.WORLD
    _hidden.append(default_store())
    # Not destroyed: the ranks need the group again, and a new one would be a collective.
    dist.GroupMember.WORLD = None
    try:
        yield
    except ValueError as error:
        if NO_GROUP not in str(error):
            raise
        place = user_location(error)
        raise ConfigError(
            f"{what} uses torch.distributed{f' at {place}' if place else ''}, but the ranks do not "
            "run this code equally often: the others would wait for ever. Remove it. The launcher brings "
            "the samples of all ranks to a metric, and keeps the model the same on all."
        ) from None
    finally:
        dist.GroupMember.WORLD = group
        _hidden.pop()
