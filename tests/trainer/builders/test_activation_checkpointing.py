"""Blocks that recompute their activations: the same losses, weights and statistics, with less memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from launcher.engine import SGD, Policy, Stepper
from launcher.errors import ConfigError
from launcher.trainer.builders.activation_checkpointing import checkpoint_activations, checkpointed_blocks
from recipes.gpt import GPT
from recipes.resnet import BasicBlock, ResNet
from tests.engine.observe import flat_tensors
from tests.models import mlp


def gpt() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """With dropout, which must draw the same numbers again."""
    tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))

    def loss_sum(model: nn.Module) -> Tensor:
        logits = model(tokens[:, :-1]).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")

    return GPT(vocab_size=11, context=8, layers=3, heads=2, width=16, dropout=0.2), loss_sum


def resnet() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """With batch norms, whose statistics must count a batch once."""
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    classes = torch.tensor([0, 1, 2, 0])

    def loss_sum(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(images).float(), classes, reduction="sum")

    return ResNet(BasicBlock, (2, 1, 1, 1), num_classes=3, in_channels=3, small_stem=True), loss_sum


def trained(
    build: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]],
    recomputes: bool,
    fp32: str = "",
) -> tuple[list[float], dict[str, Tensor], int]:
    """The losses and the state after three steps, and how many blocks' calls a step made."""
    torch.manual_seed(0)
    whole, loss_sum = build()
    model = nn.Sequential(whole)  # so that a module around the blocks may compute in fp32
    blocks, calls = checkpointed_blocks(model), [0]
    inner = next(blocks[0].children())
    inner.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    if recomputes:
        checkpoint_activations(model)
    stepper = Stepper(model, SGD(lr=0.1, momentum=0.9), Policy.fp16(), reference_count=32)
    if fp32:
        names = {module: name for name, module in model.named_modules()}
        around = {"parent": "0", "block": names[blocks[0]], "child": names[inner]}
        stepper.compute_in_fp32([around[fp32]])
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        with stepper.forward():
            loss = loss_sum(model)
        stepper.backward(loss, 32)
        losses.append(stepper.step().read().loss)
    return losses, flat_tensors(stepper.state()), calls[0]


@pytest.mark.parametrize("fp32", ["", "parent", "block", "child"])
@pytest.mark.parametrize("build", [gpt, resnet])
def test_losses_weights_and_statistics_have_the_bits_of_plain_blocks(build, fp32) -> None:
    plain, expected, once = trained(build, recomputes=False, fp32=fp32)
    losses, state, twice = trained(build, recomputes=True, fp32=fp32)
    assert losses == plain
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    assert (once, twice) == (3, 6)


def test_without_gradients_nothing_is_recomputed_and_names_stay() -> None:
    torch.manual_seed(0)
    model, loss_sum = gpt()
    names = [*model.state_dict(), *(name for name, _ in model.named_modules())]
    checkpoint_activations(model)
    assert [*model.state_dict(), *(name for name, _ in model.named_modules())] == names
    model.eval()
    with torch.no_grad():
        assert loss_sum(model).isfinite()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)


class Other(Block):
    pass


class Tower(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.layers = nn.ModuleList(blocks)


def stages() -> nn.Module:
    return nn.Sequential(mlp(), nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))


def shared() -> nn.Module:
    block = Block()
    return Tower(block, block, Block())


@pytest.mark.parametrize(
    ("build", "kinds"),
    [
        (lambda: Tower(Block(), Block(), Other()), {"Block": 2}),
        (lambda: Tower(Block(), Other(), Block(), Other()), {"Block": 2, "Other": 2}),
        (lambda: nn.Sequential(Tower(Block(), Block()), Other(), Block()), {"Block": 3}),
        (lambda: nn.Sequential(Tower(Block()), Tower(Block())), {"Tower": 2}),
        (stages, {"Block": 4}),
        (shared, {"Block": 2}),
        (lambda: nn.Sequential(mlp(), mlp()), {"Sequential": 2}),
        (lambda: Tower(nn.ModuleList([Block()]), nn.ModuleList([Block()])), {"Block": 2}),
    ],
)
def test_blocks_are_the_outermost_that_repeat(build, kinds) -> None:
    blocks = checkpointed_blocks(build())
    assert Counter(type(block).__name__ for block in blocks) == kinds
    within = [id(module) for block in blocks for module in block.modules()]
    assert len(within) == len(set(within)), "no block is within another one"


@pytest.mark.parametrize("build", [mlp, lambda: Tower(Block()), lambda: Tower(Block(), Other()), Block])
def test_a_model_without_repeated_blocks_is_refused(build) -> None:
    with pytest.raises(ConfigError, match="has no repeated blocks"):
        checkpointed_blocks(build())
