"""Tests on 32 elements whether torch.compile works here, before a run relies on it.

An installed compiler may still fail, because of the C compiler, Python's headers or the GPU's generation, and
would end the run in its first step. The trial compiles what the steps will run, for any length, so it costs
no second compilation. All ranks use the same form of the update: the two forms differ within rounding, and
replicas must not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.works as works
from launcher.engine.errors import listed
from launcher.engine.flat.layout import Layout, Piece, Stretches
from launcher.engine.optim.fused import Optimizer, Scalars
from launcher.engine.optim.torch_optimizer import AnyOptimizer, TorchOptimizer
from launcher.engine.optim.updater import Updater
from launcher.engine.precision.loss_scale import LossScale
from launcher.engine.verdict import Rules, Terms, Verdict, judge
from launcher.engine.wire.grad_norm import BLOCKS, SMALL, SumOfSquares
from launcher.engine.wire.step_counts import FIELDS

NUMEL = 32  # enough for vector instructions, also for half of them: the stretch of a group
STEPS = 3  # applied ones: bias correction and momentum differ from one to the next
TOLERANCE = 1e-5  # relative, of compiled and plain masters after so few steps: some roundings of fp32
SHOWN = 300  # characters of a compiler's message


@dataclass(frozen=True)
class Compilation:
    """Whether the update is compiled; if it was requested and is not, `reason` says why."""

    used: bool
    reason: str = ""


class _Wrong(Exception):
    """The compiled pass computes other values than the plain one."""


def choose_compilation(
    wanted: bool,
    optimizer: AnyOptimizer,
    layout: Layout,
    terms: Terms | None,
    num_rates: int,
    group: works.Group,
) -> Compilation:
    """Try it if `wanted`. Always a collective, because ranks may be configured differently.

    `terms` None: the host decides, and the verdict is not compiled. A compiler takes them and the number of
    rates for constants: with others the first step would compile again.
    """
    objection = "" if wanted else "compiled=False on this rank"
    if wanted:
        try:
            if torch._dynamo.config.disable:
                raise _Wrong("torch.compile is switched off (TORCH_COMPILE_DISABLE)")
            if layout.device.type == "cpu":
                _compare_sums(layout.segments[0].grad.dtype)
            if terms is not None:
                _compare_judgements(layout, terms, num_rates, group is not None)
            if not isinstance(optimizer, TorchOptimizer):
                _compare_updates(optimizer, layout, on_host=terms is None)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler may raise anything; the plain update works without it
            objection = _first_words(error)
    others = _failing_ranks(bool(objection), layout.device, group)
    if not wanted or not (objection or others):
        return Compilation(wanted)
    where = f"rank(s) {listed(others, 8)}" if others else "32 elements"
    return Compilation(False, f"compiling failed on {where}: {objection or 'this one could compile'}")


def _failing_ranks(objects: bool, device: torch.device, group: works.Group) -> list[int]:
    """The ranks that cannot or may not compile. A collective."""
    if group is None:
        return []
    found = torch.zeros(dist.get_world_size(group), device=device)
    found[dist.get_rank(group)] = float(objects)
    works.all_reduce(found, group)
    return [rank for rank, number in enumerate(found.tolist()) if number]


def _first_words(error: BaseException) -> str:
    """What went wrong and the first line of a compiler's output, without what torch adds to any error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith(("backend=", "Set TORCHDYNAMO_VERBOSE"))]
    output = own.index("Output:") + 1 if "Output:" in own else 1  # after the command, which is long
    text = ": ".join([*own[:1], *own[output : output + 1]])[:SHOWN]
    return text if isinstance(error, _Wrong) else f"{type(error).__name__}: {text}"


def _compare_sums(dtype: torch.dtype) -> None:
    values = torch.linspace(-2, 2, max(SMALL, BLOCKS[0])).to(dtype)
    sums = [SumOfSquares(values.device, compiled).over([values])() for compiled in (True, False)]
    if not torch.allclose(sums[0], sums[1], rtol=TOLERANCE):
        raise _Wrong(f"a compiled sum of squares is {sums[0].item()}, not {sums[1].item()}")


def _compare_judgements(layout: Layout, terms: Terms, num_rates: int, shared: bool) -> None:
    """Compare those of a clean step, and of one with an overflow."""
    compiled, rules = torch.compile(judge), Rules.of(terms, num_rates, layout.device)
    state = LossScale(terms.scaling, layout.device, on_host=False).memory
    ones = partial(torch.ones, dtype=torch.float64, device=layout.device)
    marks = ones(layout.world_size) - 1 if shared else None
    tally, rates = ones(FIELDS), ones(num_rates)
    tally[2] = 0.0  # losses that are not finite
    for largest in (4.0, math.inf):
        sums = ones(len(list(layout.slots))) * largest
        forms: tuple[Any, ...] = (compiled, judge)
        found, expected = (run(rules, sums, marks, tally, state, rates) for run in forms)
        for field, one, other in zip(Verdict._fields[:-1], found, expected, strict=False):
            if not torch.allclose(one, other, rtol=TOLERANCE, atol=0.0, equal_nan=True):
                raise _Wrong(f"the compiled verdict of a step has another {field} than the plain one")


def _compare_updates(optimizer: Optimizer, layout: Layout, on_host: bool) -> None:
    """Compare some updates and a skipped one, compiled and plain, for a piece of each kind."""
    rates, half = layout.grouping.rates, NUMEL // 2
    halves: Stretches = {0: [slice(0, half)]}  # at the first rates, and at the last
    halves.setdefault(len(rates) - 1, []).append(slice(half, NUMEL))
    stretches = [halves for _ in layout.segments] if rates else []
    compiled, plain = (
        Updater(_pieces(layout), optimizer, form, rates, stretches, on_host) for form in (True, False)
    )
    for number in range(STEPS + 1):
        before = [tensor.clone() for tensor in _written(compiled)]
        for updater in (compiled, plain):
            updater.step(Scalars(0.3, 0.01, number + 1.0, number == STEPS).on(layout.device))
        if number == STEPS and not all(map(torch.equal, before, _written(compiled))):
            raise _Wrong("a skipped update writes")
    for one, other in zip(_written(compiled), _written(plain), strict=True):
        rounding = torch.finfo(one.dtype).eps if one.dtype != torch.float32 else TOLERANCE
        if not torch.allclose(one.float(), other.float(), rtol=2 * rounding, atol=rounding):
            difference = float((one.float() - other.float()).abs().max())
            raise _Wrong(f"a compiled update differs from the plain one by {difference}")
    for piece in compiled.pieces:
        if piece.master is not None and not torch.equal(piece.weight, piece.master.to(piece.weight.dtype)):
            raise _Wrong("half weights are not the rounded masters after a compiled update")


def _pieces(layout: Layout) -> list[Piece]:
    """One piece of each kind in the layout, with values that need no generator."""
    exact = torch.linspace(-2, 2, NUMEL, device=layout.device)
    pieces = []
    for segment in layout.segments:
        weight = exact.to(segment.weight.dtype, copy=True)
        master = None if segment.master is None else exact.clone() if segment.half else weight
        pieces.append(Piece(weight, master, exact.flip(0).to(segment.grad.dtype)))
    return pieces


def _written(updater: Updater) -> list[Tensor]:
    exact = [piece.master for piece in updater.pieces if piece.master is not None]
    return [*(piece.weight for piece in updater.pieces), *exact, *updater.tensors()]
