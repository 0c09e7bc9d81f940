"""Effect of a wire on gradients at 8 to 4096 ranks: error, zeros, and the largest loss scale.

    python scripts/bench/wire_precision.py [--quick] [--out DIR]

Trains ResNet-18 on digits in the fp16 policy, then captures the gradients of different mini-batches at the
run's loss scale, as a rank would send them. Simulates the sum over the ranks in one process, with every
rounding of each wire, and compares it with the sum in fp64. With more ranks than captured mini-batches, each
is used equally often, so the noise averages out less than in a real run of that size. Uses a sample of the
elements: random ones for error and zeros, the largest for overflow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.config.composition import Request
from launcher.config.resolve import compose_jobs
from launcher.data.batch_plan import BatchPlan
from launcher.data.tensors import DeviceBatches
from launcher.engine import SGD, Policy, Stepper, StepReport
from launcher.engine.grads.communication import default_predivide
from launcher.recipe import load_recipe
from scripts.bench.machine import machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORLD_SIZES = (8, 64, 512, 4096)
SCALE_EXPONENTS = range(25)  # the exponents of valid loss scales


@dataclass(frozen=True)
class Size:
    """The amount of captured data."""

    training_steps: int
    num_batches: int
    num_random: int
    num_largest: int
    world_sizes: Sequence[int]


FULL = Size(240, 512, 16_000, 2_000, WORLD_SIZES)
QUICK = Size(2, 4, 400, 50, WORLD_SIZES[:2])


@dataclass(frozen=True)
class Captured:
    """Gradients at the loss scale 2^exponent: fp16 [batches, elements], random elements first."""

    gradients: Tensor
    num_random: int
    exponent: int
    step: int
    batch: int


@dataclass(frozen=True)
class Wire:
    """A way to sum fp16 gradients over W ranks.

    `before(W)` multiplies in fp16 before the sum, `after(W)` the sum in fp16 (None: it stays as it is);
    `wide` sums in fp32 and rounds once, after `after`. The remaining factor of 1 / W is part of the
    fp32 multiplier of the update, without rounding here.
    """

    label: str
    color: str
    width: float  # of its curve
    before: Callable[[int], float] = lambda world_size: 1.0
    after: Callable[[int], float] | None = None
    wide: bool = False

    def mean(self, gradients: Tensor, order: Tensor) -> Tensor:
        """fp64 [elements]: the mean over the ranks; rank r holds row `order[r]` of fp16 `gradients`."""
        world_size, divided = len(order), 1.0
        rows = gradients
        if self.before(world_size) != 1.0:
            rows, divided = rows * self.before(world_size), self.before(world_size)
        if self.wide:
            rows = rows.float()
        total = rows[order[0]].clone()
        for row in order[1:].tolist():  # each hop rounds to the dtype of the sum
            total += rows[row]
        if self.after is not None:
            total, divided = total * self.after(world_size), divided * self.after(world_size)
        return total.half().double() / (divided * world_size)


def fp16_inverse(world_size: int) -> float:
    """The factor of an average in fp16."""
    return float(torch.tensor(1 / world_size).half())


WIRES = {
    "plain": Wire("sum in fp16", "#d95f02", 7.0),
    "divide_after": Wire("sum in fp16, then divide in fp16", "#e6ab02", 5.0, after=lambda w: 1 / w),
    "average": Wire("multiply by 1/W in fp16, then sum (AVG)", "#7570b3", 3.5, before=fp16_inverse),
    "split": Wire(
        "divide by ≈√W, then sum (ours, native)", "#1b9e77", 1.8, before=lambda w: 1 / default_predivide(w)
    ),
    "fp32": Wire(
        "sum in fp32, round once (ours, fp32)",
        "#000000",
        1.8,
        wide=True,
        after=lambda w: 1 / (1 << (w - 1).bit_length()),
    ),
}


def capture(size: Size) -> Captured:
    """Train some steps, then capture gradients of different mini-batches at the same weights."""
    torch.manual_seed(0)
    (config,) = compose_jobs(Request(("recipe=resnet18", "data=digits")))
    recipe = load_recipe(config)
    model = recipe.build_model()
    batch = 32  # a rank's share
    plan = BatchPlan(len(recipe.train), batch, None, 1, 0, config.seed, True)
    batches = DeviceBatches(recipe.train, plan, recipe.train_transform)
    stepper = Stepper(model, SGD(0.02, 0.9, True, 5e-4), Policy.fp16(), reference_count=batch)

    def step(number: int) -> StepReport:
        (inputs,) = batches.step(*divmod(number, plan.steps_per_epoch))
        with stepper.forward():
            loss = recipe.loss(model, inputs)
        stepper.backward(loss.sum, loss.count)
        return stepper.step().read()

    for number in range(size.training_steps):
        step(number)
    stepper.lr = 0.0  # the weights are constant from here on
    elements, rows = None, []
    for number in itertools.count(size.training_steps):
        report = step(number)
        gradient = matrices_of(stepper)
        if elements is None:
            elements = sample_of(gradient, size)
        if not report.skipped:
            rows.append(gradient[elements].double() / report.scale)
        if len(rows) == size.num_batches:
            break
    scaled = torch.stack(rows) * 2.0 ** (exponent := stepper.counters()["exponent"])
    return Captured(scaled.half(), size.num_random, exponent, size.training_steps, batch)


def matrices_of(stepper: Stepper) -> Tensor:
    """The gradients of all matrices, scaled, fp16, flat."""
    gradients = stepper.reduced_gradients().values()
    return torch.cat([gradient.flatten() for gradient in gradients if gradient.dtype == torch.float16])


def sample_of(gradient: Tensor, size: Size) -> Tensor:
    """Indices of random elements with a gradient, then of the largest."""
    generator = torch.Generator().manual_seed(1)
    alive = gradient.nonzero().flatten()
    drawn = alive[torch.randint(len(alive), (size.num_random,), generator=generator)]
    return torch.cat([drawn, gradient.abs().topk(size.num_largest).indices])


def simulate(captured: Captured, wire: Wire, world_size: int, exponent: int) -> dict[str, float]:
    """One reduction at the loss scale 2^exponent, compared with fp64 at the captured scale."""
    order = ranks_order(len(captured.gradients), world_size)
    factor = 2.0 ** (exponent - captured.exponent)
    exact = captured.gradients.double()
    counts = torch.bincount(order, minlength=len(exact)).double()
    reference = counts @ exact / world_size
    mean = wire.mean((exact * factor).half(), order) / factor
    alive = reference[: captured.num_random] != 0
    drawn, expected = mean[: captured.num_random][alive], reference[: captured.num_random][alive]
    finite = bool(mean.isfinite().all())
    return {
        "relative_error": float((drawn - expected).norm() / expected.norm()) if finite else math.inf,
        "wrong": 1 - float(((drawn - expected).abs() <= 0.01 * expected.abs()).double().mean()),
        "zeros": float((drawn == 0).double().mean()),
        "overflow": float((~mean.isfinite()).double().mean()),
    }


def ranks_order(num_batches: int, world_size: int) -> Tensor:
    """The captured mini-batch of each rank: equally often, in random order."""
    generator = torch.Generator().manual_seed(2)
    return torch.arange(world_size).remainder(num_batches)[torch.randperm(world_size, generator=generator)]


def measure(captured: Captured, size: Size) -> list[dict[str, Any]]:
    rows = []
    for world_size in size.world_sizes:
        for name, wire in WIRES.items():
            curve = {e: simulate(captured, wire, world_size, e) for e in SCALE_EXPONENTS}
            survived = [e for e in SCALE_EXPONENTS if curve[e]["overflow"] == 0]
            rows.append(
                {
                    "ranks": world_size,
                    "wire": name,
                    **curve[captured.exponent],
                    "largest_scale_exponent": max(survived),
                    "error_at_largest_scale": curve[max(survived)]["relative_error"],
                    "zeros_at_largest_scale": curve[max(survived)]["zeros"],
                    "error_by_scale_exponent": {e: values["relative_error"] for e, values in curve.items()},
                    "wrong_by_scale_exponent": {
                        e: math.inf if values["overflow"] else values["wrong"] for e, values in curve.items()
                    },
                    "zeros_by_scale_exponent": {e: values["zeros"] for e, values in curve.items()},
                }
            )
    return rows


def tell(rows: Sequence[dict[str, Any]], captured: Captured) -> None:
    print(
        f"loss scale 2^{captured.exponent}; error: of the norm; wrong: elements off by more than 1 %; "
        "zeros: among elements with a gradient; overflow: among random and largest elements"
    )
    print(
        f"{'ranks':>6} {'wire':14} {'error':>9} {'wrong':>8} {'zeros':>8} {'overflow':>9} "
        f"{'survives':>9} {'error there':>12}"
    )
    for row in rows:
        print(
            f"{row['ranks']:6} {row['wire']:14} {row['relative_error']:9.1e} {row['wrong']:8.3%} "
            f"{row['zeros']:8.3%} {row['overflow']:9.3%} {'2^' + str(row['largest_scale_exponent']):>9} "
            f"{row['error_at_largest_scale']:12.1e}"
        )


def draw(rows: Sequence[dict[str, Any]], captured: Captured, path: Path) -> None:
    """Two rows of panels against the loss scale, a column for each number of ranks.

    A curve ends where the wire overflows. Equal curves overlap, the first one drawn widest.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    world_sizes = list(dict.fromkeys(row["ranks"] for row in rows))
    figure, panels = pyplot.subplots(
        2, len(world_sizes), figsize=(3.2 * len(world_sizes), 6.6), sharex=True, sharey="row", squeeze=False
    )
    for column, world_size in zip(panels.T, world_sizes, strict=True):
        for panel, quantity in zip(
            column, ("error_by_scale_exponent", "wrong_by_scale_exponent"), strict=True
        ):
            panel.axvline(captured.exponent, color="0.6", linewidth=1, linestyle=":", zorder=0)
            for row in rows:
                if row["ranks"] == world_size:
                    draw_curve(panel, WIRES[row["wire"]], row[quantity])
            panel.grid(axis="y", color="0.92")
            panel.spines[["top", "right"]].set_visible(False)
        column[0].set(title=f"{world_size} ranks", yscale="log")
        column[1].set(xlabel="loss scale", ylim=(-0.03, 1.03))
        column[1].set_xticks(SCALE_EXPONENTS[::6], [f"$2^{{{e}}}$" for e in SCALE_EXPONENTS[::6]])
    panels[0][0].set_ylabel("error of the mean gradient\n(norm, relative to fp64)")
    panels[1][0].set_ylabel("share of elements\noff by more than 1 %")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
    figure.suptitle(
        "Error of each wire, and overflow (x)\n"
        f"ResNet-18 on digits after {captured.step} steps; dotted: the run's loss scale"
    )
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_curve(panel: Axes, wire: Wire, values: dict[int, float]) -> None:
    points = [(exponent, value) for exponent, value in values.items() if math.isfinite(value)]
    exponents, heights = zip(*points, strict=True)
    panel.plot(exponents, heights, color=wire.color, label=wire.label, linewidth=wire.width)
    if exponents[-1] < SCALE_EXPONENTS[-1]:
        panel.plot(exponents[-1], heights[-1], "x", color=wire.color, markersize=9, markeredgewidth=2.5)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    size = QUICK if arguments.quick else FULL
    captured = capture(size)
    rows = measure(captured, size)
    tell(rows, captured)
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {
        "what": "ResNet-18 on digits, fp16 policy",
        "captured": {"after_steps": captured.step, "samples_per_rank": captured.batch},
        "machine": machine(),
        "n": {"mini_batches": len(captured.gradients), "elements": captured.gradients.shape[1]},
        "loss_scale_exponent": captured.exponent,
        "rows": rows,
    }
    text = json.dumps(content, indent=2).replace("Infinity", "null")  # JSON has no infinity
    (arguments.out / "wire_precision.json").write_text(text + "\n")
    draw(rows, captured, arguments.out / "wire_precision.png")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few batches and elements, to test this file")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="a folder")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
