import pytest
import torch
from torch import nn
from torch.nn import functional as F

from launcher.engine.precision.emulation import RoundedArithmetic
from launcher.errors import ConfigError
from launcher.recipe import Loss, cross_entropy
from launcher.recipe.contract import loss_of


def test_cross_entropy_is_summed_in_fp32_over_the_samples():
    model = nn.Linear(4, 3).to(torch.bfloat16)
    batch = {"image": torch.randn(5, 4, dtype=torch.bfloat16), "label": torch.tensor([0, 1, 2, 0, 1])}
    loss = cross_entropy(model, batch)
    logits = model(batch["image"]).float()
    expected = -torch.log_softmax(logits, dim=1)[torch.arange(5), batch["label"]].sum()
    assert loss.sum.dtype == torch.float32
    assert torch.allclose(loss.sum, expected)
    assert loss.count == 5
    assert torch.equal(loss.outputs, logits)
    assert loss.outputs.dtype == torch.float32
    assert not loss.outputs.requires_grad


IMAGES = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("logits", "labels", "count"),
    [
        (IMAGES[:, :, 0, 0], torch.tensor([1, -100]), 1),
        (IMAGES[:, :, 0, 0], torch.tensor([-100, -100]), 0),
        (IMAGES[:0, :, 0, 0], torch.tensor([], dtype=torch.int64), 0),
        (IMAGES, torch.ones(2, 3, 3, dtype=torch.int64), 18),
        (IMAGES, torch.tensor([[[1, -100, 2]] * 3, [[0, 3, -100]] * 3]), 12),
        (IMAGES[:, :, 0, 0], torch.full((2, 4), 0.25), 2),
        (IMAGES, torch.full((2, 4, 3, 3), 0.25), 18),
    ],
    ids=[
        "an ignored label",
        "only ignored",
        "no label",
        "pixels",
        "ignored pixels",
        "probabilities",
        "of pixels",
    ],
)
def test_cross_entropy_counts_the_labels_that_carry_loss(logits, labels, count):
    """Else a step divides by a wrong number."""
    loss = cross_entropy(nn.Identity(), {"image": logits, "label": labels})
    assert loss.count == count
    if count:
        assert torch.allclose(loss.sum / loss.count, nn.functional.cross_entropy(logits, labels))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float32])
def test_cross_entropy_has_the_bits_of_torch_under_emulation(dtype, label_smoothing):
    logits = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(64) % 10
    if dtype != torch.int64:
        labels = torch.rand(64, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
    with RoundedArithmetic(torch.float16):
        found = cross_entropy(
            nn.Identity(), {"image": logits, "label": labels}, label_smoothing=label_smoothing
        )
        expected = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    assert torch.equal(found.sum, expected)
    (gradient,) = torch.autograd.grad(found.sum, logits)
    assert torch.equal(gradient, *torch.autograd.grad(expected, logits))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (torch.ones(()), "returned a Tensor"),
        (Loss(1.5, 2), r"returned a Loss\(float, ...\)"),
        (None, "returned a NoneType"),
        (Loss(torch.zeros(3), 3), r"returned a Loss\(float32 \[3\], ...\)"),
        (Loss(torch.zeros((), dtype=torch.float16), 3), r"returned a Loss\(float16 \[\], ...\)"),
    ],
)
def test_a_loss_that_gives_something_else_is_refused(given, text) -> None:
    with pytest.raises(ConfigError, match=text):
        loss_of(lambda network, batch: given, torch.nn.Identity(), {})


@pytest.mark.parametrize(
    ("network", "text"),
    [
        (lambda x: {"logits": x}, "the model returned a dict: cross_entropy needs a tensor of logits"),
        (lambda x: x[:, 0], r"the shape \[2\] for 2 samples: cross_entropy needs \[2, classes\]"),
        (lambda x: x[:1], r"the shape \[1, 3\] for 2 samples"),
    ],
)
def test_a_model_that_returns_no_logits_is_refused(network, text) -> None:
    batch = {"image": torch.zeros(2, 3), "label": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ConfigError, match=text):
        cross_entropy(network, batch)
