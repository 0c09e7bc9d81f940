"""Which modules are compiled, by train.compile, and what the rest of a run sees of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.engine import SGD, Policy, Stepper
from launcher.errors import ConfigError
from launcher.trainer.builders.compilation import compiled, counted_kinds, repeated_blocks
from launcher.trainer.device import uncompiled
from launcher.trainer.diagnostics.nonfinite import diagnose
from tests.models import mlp

OF_COMPILER = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning",  # at its import
    "ignore:The .grad attribute:UserWarning",  # at which it looks itself
)


class Block(nn.Module):
    """[n, 8] to [n, 8]."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.outer = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.outer(torch.relu(self.inner(x)))
        return x + hidden


class Other(Block):
    pass


class Tower(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


def stages() -> nn.Module:
    return nn.Sequential(mlp(), nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))


def shared() -> nn.Module:
    block = Block()
    return Tower(block, block, Block())


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Tower(Block(), Block(), Other()), "2 x Block"),
        (lambda: Tower(Block(), Other(), Block(), Other()), "2 x Block, 2 x Other"),
        (lambda: nn.Sequential(Tower(Block(), Block()), Other(), Block()), "3 x Block"),
        (lambda: nn.Sequential(Tower(Block()), Tower(Block())), "2 x Tower"),
        (stages, "4 x Block"),
        (shared, "2 x Block"),
        (lambda: nn.Sequential(mlp(), mlp()), "2 x Sequential"),
        (lambda: Tower(nn.ModuleList([Block()]), nn.ModuleList([Block()])), "2 x Block"),
    ],
)
def test_blocks_are_the_outermost_that_repeat(build, text) -> None:
    model = build()
    blocks = repeated_blocks(model)
    assert counted_kinds(blocks) == text
    within = [id(module) for block in blocks for module in block.modules()]
    assert len(within) == len(set(within)), "no block is within another one"


@pytest.mark.parametrize("build", [mlp, lambda: Tower(Block()), lambda: Tower(Block(), Other()), Block])
def test_a_model_that_repeats_nothing_is_refused(build) -> None:
    with pytest.raises(ConfigError, match=r"^train.compile=blocks: .* Use train.compile=true, which"):
        repeated_blocks(build())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Every graph that is compiled, by a backend that needs no C++ compiler."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        found.append(graph)
        return aot_eager(graph, inputs)

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, options: compile_(run, backend=backend))
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield found
    torch.compiler.reset()


def built(model: nn.Module) -> Stepper:
    return Stepper(model, SGD(0.1), Policy.fp32(), reference_count=1)


@OF_COMPILER
def test_blocks_of_one_kind_share_a_graph_and_give_their_gradients_one_by_one(graphs) -> None:
    model = Tower(*(Block() for _ in range(3)))
    names = list(model.state_dict())
    network = compiled("blocks", model, built(model))
    assert network is model
    assert list(model.state_dict()) == names
    order: list[str] = []
    last, first = model.layers[2].inner.weight, model.layers[0].inner.weight
    last.register_post_accumulate_grad_hook(lambda p: order.append("arrived"))
    first.register_hook(lambda g: order.append("computed"))
    network(torch.randn(4, 8)).sum().backward()
    assert order == ["arrived", "computed"]
    assert len(graphs) == 1


@pytest.mark.slow
@OF_COMPILER
def test_more_shapes_of_blocks_than_the_compiler_allows_by_default_are_compiled(graphs) -> None:
    model = nn.Sequential(*(Block(width) for width in range(1, 10)))
    compiled("blocks", model, built(model))(torch.randn(4, 8)).sum().backward()
    assert len(graphs) == 9


@OF_COMPILER
def test_a_failure_is_found_within_compiled_blocks(graphs) -> None:
    model = Tower(*(Block() for _ in range(3)))
    compiled("blocks", model, built(model))
    x = torch.randn(4, 8)
    model(x).sum().backward()  # traced before the hooks are there
    num_graphs = len(graphs)
    with torch.no_grad():
        model.layers[1].outer.weight.fill_(1e38)
    finding = diagnose(model, lambda: model(x * 1e3))
    assert finding is not None
    assert finding.name == "layers.1.outer"
    assert len(graphs) == num_graphs


@OF_COMPILER
def test_uncompiled_runs_the_hooks_of_what_is_compiled(graphs) -> None:
    model = Tower(Block(), Block())
    compiled("blocks", model, built(model))
    called: list[int] = []
    with uncompiled():
        handle = model.layers[0].inner.register_forward_hook(lambda *call: called.append(1))
        model(torch.randn(4, 8))
        handle.remove()
    assert called == [1]
    assert graphs == []


def test_what_is_not_asked_for_is_not_compiled() -> None:
    model = Tower(Block(), Block())
    assert compiled(False, model, built(model)) is model
    assert all(module._compiled_call_impl is None for module in model.modules())
