"""The latest collectives of each rank, and whether the ranks called the same.

Owns the use of torch's flight recorder after a rank was lost. Gloo aborts a rank that receives more than it
expects, which is rarely the one that called the wrong collective; the records of other ranks tell them apart.
Costs nothing before a failure.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.distributed.env import LaunchEnv
from launcher.distributed.store import unless_lost

if TYPE_CHECKING:
    import torch.distributed as dist

DUMP = "_dump_fr_trace_json"
COMPARED = 16  # of a rank's latest collectives: more than a step keeps in flight
ANSWER_S = 2.0  # for the others if several are missing: ranks that wait for another one notice later
# Collectives whose input has the same shape on all ranks. For others only names are compared.
ALIKE = frozenset({"all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter"})
SIZES = "Received data size doesn't match expected size"  # in Gloo's words
RULE = (
    "Every rank must call the same collectives in the same order with the same sizes: look for one in the "
    "recipe that depends on the rank or on its data."
)


class Call(NamedTuple):
    """One collective as a rank called it."""

    text: str
    size_bytes: int = 0  # of its input


Calls = Mapping[str, Call]  # by process group and number within it, oldest first


def latest_calls() -> dict[str, Call]:
    """This rank's latest collectives over Gloo; empty if torch has no record of them."""
    from torch import _C

    try:
        recorded = getattr(_C._distributed_c10d, DUMP)(includeCollectives=True, onlyActive=False)
        entries = [entry for entry in json.loads(recorded)["entries"] if not entry["is_p2p"]]
        return dict(_call(entry) for entry in entries[-COMPARED:])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return {}  # a private function: other versions of torch may lack it or change its format


def _call(entry: Mapping[str, Any]) -> tuple[str, Call]:
    import torch

    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes, dtypes, group = entry["input_sizes"], entry["input_dtypes"], entry["process_group"]
    key = f"{group[0]}/{entry['collective_seq_id']}"
    if name not in ALIKE:
        return key, Call(name)
    inputs = [(dtype.lower(), size) for dtype, size in zip(dtypes, sizes, strict=True)]
    lengths = (getattr(torch, dtype, torch.uint8).itemsize * math.prod(size) for dtype, size in inputs)
    return key, Call(f"{name} of {', '.join(f'{dtype} {size}' for dtype, size in inputs)}", sum(lengths))


def last_call(calls: Calls) -> str:
    """The text of the latest call; empty if none is known."""
    return list(calls.values())[-1].text if calls else ""


def exchange_calls(store: dist.Store, job: str, launch: LaunchEnv) -> dict[int, Calls]:
    """The latest calls by rank. Called by all ranks that have lost another one.

    Returns as soon as only one rank is missing, which is the lost one.
    """
    found: dict[int, Calls] = {}
    unknown = deque(range(launch.world_size))
    with unless_lost():
        place = f"job/{job}/calls/{{}}"
        store.set(place.format(launch.rank), json.dumps(latest_calls()))
        deadline = time.monotonic() + ANSWER_S
        while len(unknown) > 1 and time.monotonic() < deadline:
            rank = unknown.popleft()
            if store.check([place.format(rank)]):
                calls = json.loads(store.get(place.format(rank)))
                found[rank] = {key: Call(*call) for key, call in calls.items()}
            else:
                unknown.append(rank)
                time.sleep(0.005)
    return found


def disagreement(said: Mapping[int, Calls], world_size: int) -> str:
    """The first collective on which the ranks in `said` disagree, as an error; empty if they agree.

    Names the ranks that differ from the majority. A missing rank was aborted by Gloo because it received more
    than it expected: a single one counts among those with the smaller size. Without a majority, as with two
    ranks, none is named.
    """
    keys = dict.fromkeys(key for rank in sorted(said) for key in said[rank])
    for key in keys:
        calls = {rank: said[rank][key] for rank in sorted(said) if key in said[rank]}
        if len(set(calls.values())) > 1:
            return f"{_difference(calls, world_size)}. {RULE}"
    return ""


def _difference(calls: Mapping[int, Call], world_size: int) -> str:
    votes = Counter(calls.values())
    smallest = min(call.size_bytes for call in votes)
    small = [call for call in votes if call.size_bytes == smallest]
    if len(calls) == world_size - 1 and len(small) == 1:
        votes[small[0]] += 1
    usual, most = votes.most_common(1)[0]
    listed = ", ".join(f"rank {rank}: {call.text}" for rank, call in calls.items())
    if 2 * most <= world_size:
        return f"the ranks called different collectives at the same place ({listed})"
    odd = ", ".join(str(rank) for rank, call in calls.items() if call != usual)
    return f"rank {odd} called another collective than the other ranks ({listed})"


def loss(said: Mapping[int, Calls], world_size: int) -> str:
    """Which rank was lost, from the calls in `said`, which agree; empty if they do not show it."""
    lost = sorted(set(range(world_size)) - said.keys())
    last = {rank: text for rank, calls in said.items() if (text := last_call(calls))}
    if not lost or not last:
        return ""
    if len(lost) > 1:
        return (
            f'Another rank was lost; {called(last)}. If one\'s stderr says "{SIZES}", the ranks called '
            "collectives of different sizes, and any of them may be wrong."
        )
    return (
        f"Rank {lost[0]} has ended or does not answer; {called(last)}. Its stderr says why."
        f"{of_sizes(lost[0], last, world_size)}"
    )


def called(last: Mapping[int, str]) -> str:
    """The last calls of some ranks as a sentence."""
    ranks: dict[str, list[str]] = {}
    for rank, text in sorted(last.items()):
        ranks.setdefault(text, []).append(str(rank))
    return " and ".join(f"rank {', '.join(those)} called {text}" for text, those in ranks.items())


def of_sizes(lost: int, last: Mapping[int, str], world_size: int) -> str:
    """What Gloo's message means: it aborts the rank that receives more than it expects, right or wrong."""
    agree = max(Counter(last.values()).values(), default=0)
    if 2 * agree > world_size:
        blame = f"rank {lost} called a collective of a smaller size than the others."
    else:
        blame = (
            f"the ranks called collectives of different sizes, rank {lost} the smaller one; either side may "
            "be wrong."
        )
    return f' If that is "{SIZES}", {blame}'
