"""Blocks that recompute their activations: the same losses, weights and statistics, with less memory."""

from __future__ import annotations

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


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="Sequential has no repeated blocks"):
        checkpointed_blocks(nn.Sequential(mlp(), nn.ReLU(), nn.Linear(3, 3)))
