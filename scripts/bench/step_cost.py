"""CPU time of a training step of a small network, where bookkeeping is all there is.

    python scripts/bench/step_cost.py [--quick] [--json FILE]

An MLP 64-64-10, batch 32, SGD with momentum, one process, one thread. Like is compared with like: fp32
arithmetic with a loss scale on both sides, native fp16 on both sides; emulated fp16 is set beside native
autocast. Peers: the raw loop with GradScaler, and Accelerate, Lightning Fabric and Lightning's Trainer where
they are installed (the extra `bench`). All sides start from the same weights and must have the same losses.
Also counts the calls of ATen operations per step, and the time per further parameter tensor.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.bench.baselines import PEERS, Batch, Setup, Step, installed, refuse_disagreement
from scripts.bench.interleaved import Figure, Timed, Times, interleave, row_of, text_table, write
from scripts.bench.ours import ours

LIBRARIES = [name for name in ("accelerate", "fabric", "lightning") if installed(name)]
PROMISED = 1.15  # over the raw loop; emulated fp16 promises nothing
FEW, MANY = 8, 1000
CHECKED_STEPS, TOLERANCE = 10, 0.005


class ManyTensors(nn.Module):
    """A linear layer whose weight is a sum of many small ones: a few operations for all of them."""

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        # A plain sum would give all of them the same gradient in the same memory: GradScaler would unscale it
        # once for each.
        self.register_buffer("factors", torch.linspace(0.5, 1.5, num_tensors)[:, None, None])
        self.weights = nn.ParameterList(torch.randn(64, 10) / num_tensors for _ in range(num_tensors))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ (torch.stack(list(self.weights)) * self.factors).sum(dim=0)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def sides_of(
    arithmetic: str, build: Callable[[], nn.Module], peers: list[str], optimizer: str = "sgd"
) -> dict[str, Step]:
    """Ours first, then the peers, from the same weights. `arithmetic`: fp32, native or emulated."""
    torch.manual_seed(0)
    model = build()
    setup = Setup(optimizer, half=arithmetic != "fp32")
    emulate = {"fp32": None, "native": False, "emulated": True}[arithmetic]
    policy = "fp32" if arithmetic == "fp32" else "fp16"
    found = {"ours": ours(copy.deepcopy(model), setup, policy, emulate=emulate)}
    return found | {name: PEERS[name](copy.deepcopy(model), setup) for name in peers}


def checked(sides: Mapping[str, Step], batch: Batch, repeats: int, steps: int) -> Times:
    """CPU seconds of a step by side. The losses must agree in the first steps, and still after the last."""
    losses = {name: [float(step(batch)) for _ in range(CHECKED_STEPS)] for name, step in sides.items()}
    refuse_disagreement(losses, TOLERANCE)
    timed = {name: on_batch(step, batch) for name, step in sides.items()}
    times = interleave(timed, repeats, steps=steps, clock=time.process_time)
    ends = {name: [*losses[name], float(step(batch))] for name, step in sides.items()}
    refuse_disagreement(ends, TOLERANCE)
    return times


def on_batch(step: Step, batch: Batch) -> Callable[[], object] | Timed:
    """The side with its batch."""
    return Fitted(step, batch) if hasattr(step, "seconds") else partial(step, batch)


class Fitted:
    """A round of Lightning's Trainer."""

    def __init__(self, step: Any, batch: Batch) -> None:
        self._step, self._batch = step, batch

    def seconds(self, steps: int, clock: Callable[[], float]) -> float:
        seconds: float = self._step.seconds(self._batch, steps, clock)
        return seconds


def batch_of() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)


class Calls(TorchDispatchMode):
    """Counts calls of operations at the dispatcher, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def calls_of(step: Callable[[], object]) -> int:
    step()
    with Calls() as calls:
        step()
    return calls.count


def measure(arithmetic: str, repeats: int, steps: int) -> tuple[dict[str, dict[str, float]], list[Figure]]:
    """CPU time and calls by side of the MLP."""
    peers = ["raw"] if arithmetic == "emulated" else ["raw", *LIBRARIES]
    sides, batch = sides_of(arithmetic, mlp, peers), batch_of()
    times = checked(sides, batch, repeats, steps)
    rows = {
        name: row_of(times[name]) | {"aten_calls": calls_of(partial(step, batch))}
        for name, step in sides.items()
    }
    what = {"emulated": "emulated fp16, native peer"}.get(arithmetic, f"{arithmetic} arithmetic")
    figures = [
        Figure.ratio(
            f"CPU time of a small step, {what}",
            times,
            "ours",
            peer,
            PROMISED if peer == "raw" and arithmetic != "emulated" else None,
        )
        for peer in peers
    ]
    return rows, figures


def measure_tensors(
    arithmetic: str, many: int, repeats: int, steps: int
) -> tuple[dict[str, dict[str, float]], list[Figure]]:
    """CPU time with few and with many parameter tensors, with AdamW, and per further tensor."""
    by_number = {
        word: sides_of(arithmetic, partial(ManyTensors, number), ["raw"], "adamw")
        for word, number in (("few", FEW), ("many", many))
    }
    times: Times = {}
    for word, sides in by_number.items():
        found = checked(sides, batch_of(), repeats, steps)
        times |= {f"{name}, {word}": seconds for name, seconds in found.items()}
    rows = {name: row_of(seconds) for name, seconds in times.items()}
    for name in by_number["few"]:
        further = rows[f"{name}, many"]["median_ms"] - rows[f"{name}, few"]["median_ms"]
        rows[f"{name}, many"]["us_per_further_tensor"] = 1e3 * further / (many - FEW)
    what = f"CPU time of a step with {many} tensors, {arithmetic}"
    return rows, [Figure.ratio(what, times, "ours, many", "raw, many")]


def tell(rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    for title, sides in rows.items():
        print(
            f"\n{title:28} {'min us':>8} {'median us':>10} {'ATen calls':>11} {'us per further tensor':>22}"
        )
        for name, row in sides.items():
            calls = f"{row['aten_calls']}" if "aten_calls" in row else ""
            further = f"{row['us_per_further_tensor']:.1f}" if "us_per_further_tensor" in row else ""
            times = f"{1e3 * row['min_ms']:8.0f} {1e3 * row['median_ms']:10.0f}"
            print(f"{name:28} {times} {calls:>11} {further:>22}".rstrip())


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    repeats, steps = (2, 2) if arguments.quick else (arguments.repeats, arguments.steps)
    many = 40 if arguments.quick else MANY
    rows: dict[str, dict[str, dict[str, float]]] = {}
    figures: list[Figure] = []
    for arithmetic in ("fp32", "native", "emulated"):
        rows[f"MLP, {arithmetic}"], more = measure(arithmetic, repeats, steps)
        figures += more
    for arithmetic in ("fp32", "native"):
        title = f"{FEW} and {many} tensors, {arithmetic}"
        rows[title], more = measure_tensors(arithmetic, many, repeats, max(2, steps // 20))
        figures += more
    tell(rows)
    print(f"\n{text_table(figures)}")
    if not LIBRARIES:
        print("Accelerate and Lightning are not installed: scripts/run pip install -e '.[bench]'")
    write(arguments.json, "CPU time of a step of a small network", repeats, rows, figures, steps=steps)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200, help="in each repeat, of the MLP")
    parser.add_argument("--quick", action="store_true", help="two repeats, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
