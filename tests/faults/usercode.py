"""What the recipe of the fault tests does to its own process: `user_code(network, batch)` of `launching`.

Each of these runs before every forward pass, and with None where the recipe is built. `passes` is the number
of forward passes in training before this one, so 8 is within the ninth step.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.faults.launching import UserCode


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_here(network: Any, passes: int | None, training: bool = True) -> bool:
    """Whether this is the forward pass in question, or the building of the recipe (None)."""
    if network is None or passes is None:
        return network is passes
    return int(network.passes) == passes and network.training == training


def send_signal(
    network: Any, batch: Any, number: int, passes: int | None, rank: int, training: bool = True
) -> None:
    if own_rank() == rank and is_here(network, passes, training):
        os.kill(os.getpid(), number)


def kill(passes: int | None, rank: int, training: bool = True) -> UserCode:
    return partial(send_signal, number=signal.SIGKILL, passes=passes, rank=rank, training=training)


def stop_after(step: int, rank: int = 0, passes_per_step: int = 1) -> UserCode:
    """SIGTERM within `step`, after which the run stops.

    For the first step: when the evaluation is rehearsed. While data are loaded it would end a run at once.
    """
    if step == 1:
        return partial(send_signal, number=signal.SIGTERM, passes=0, rank=rank, training=False)
    return partial(send_signal, number=signal.SIGTERM, passes=(step - 1) * passes_per_step, rank=rank)


def slowly(network: Any, batch: Any) -> None:
    """Steps that take long enough for a signal from outside to meet one."""
    if network is not None and network.training:
        time.sleep(0.03)


def take_longer(network: Any, batch: Any, seconds_per_sample: tuple[float, ...]) -> None:
    if network is not None and network.training:
        time.sleep(seconds_per_sample[own_rank()] * len(batch["x"]))


def change_speed(network: Any, batch: Any, before: UserCode, after: UserCode, passes: int) -> None:
    moved = network is not None and int(network.passes) >= passes
    (after if moved else before)(network, batch)


def as_fast_as(*seconds_per_sample: float) -> UserCode:
    """Ranks that need so long for each sample."""
    return partial(take_longer, seconds_per_sample=seconds_per_sample)


def record(network: Any, batch: Any, directory: Path, then: UserCode) -> None:
    """Write down which samples this rank trains on, a line a pass; then do what else is asked for."""
    if network is not None and network.training:
        numbers = " ".join(map(str, batch["number"].tolist()))
        with open(directory / f"rank{own_rank()}", "a") as file:
            file.write(f"{int(network.passes)}: {numbers}\n")
    then(network, batch)


LACKED: list[int] = []  # ranks of this process that have run out of memory


def lack_memory(
    network: Any,
    batch: Any,
    above: int,
    ranks: tuple[int, ...],
    training: bool,
    passes: range | None,
    once: bool,
) -> None:
    if network is None or own_rank() not in ranks or network.training != training or len(batch["x"]) <= above:
        return
    if (passes is None or int(network.passes) in passes) and not (once and LACKED):
        LACKED.append(own_rank())
        raise torch.OutOfMemoryError(f"no room for {len(batch['x'])} samples")


def lacking_memory(
    above: int, *ranks: int, training: bool = True, passes: range | None = None, once: bool = False
) -> UserCode:
    """These ranks run out of memory in a pass over more than `above` samples, each time or once."""
    return partial(lack_memory, above=above, ranks=ranks, training=training, passes=passes, once=once)


def in_turn(network: Any, batch: Any, codes: tuple[UserCode, ...]) -> None:
    for code in codes:
        code(network, batch)


def both(*codes: UserCode) -> UserCode:
    return partial(in_turn, codes=codes)
