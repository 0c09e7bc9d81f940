"""Muon for hidden matrices and AdamW for the rest: torch's values, on masters, skips, exact resumes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from launcher.engine import (
    MuonWithAdamW,
    ParameterGroup,
    Policy,
    Stepper,
    TorchOptimizer,
    UnusableError,
)
from launcher.engine.optim.muon import hidden_matrices
from recipes.gpt import GPT
from tests.engine.observe import flat_tensors, state_digest, train, weights_are_rounded_masters
from tests.models import conv_net

LR = 0.01


def network(seed: int = 0) -> nn.Module:
    """8 features to 3 classes, by two hidden layers and a head."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator), torch.randint(3, (16,), generator=generator)


def test_fp32_gives_the_values_of_torchs_muon_and_adamw_with_groups() -> None:
    model, twin = network(), network()
    groups = [ParameterGroup("*.bias", weight_decay=0.0, lr_scale=0.5), ParameterGroup("2.*", lr_scale=2.0)]
    optimizer = TorchOptimizer(MuonWithAdamW, LR, weight_decay=0.1)
    stepper = Stepper(model, optimizer, Policy.fp32(), reference_count=16, groups=groups)
    named = dict(twin.named_parameters())
    biases = [p for name, p in named.items() if name.endswith(".bias")]
    scaled = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1}
    theirs = [
        torch.optim.Muon([named["0.weight"]], lr=LR, **scaled),
        torch.optim.Muon([named["2.weight"]], lr=2 * LR, **scaled),
        torch.optim.AdamW([named["3.weight"], named["5.weight"]], lr=LR, weight_decay=0.1),
        torch.optim.AdamW(biases, lr=LR / 2, weight_decay=0.0),
    ]
    for step in range(30):
        x, classes = batch(step)
        train(stepper, x, classes)
        twin.zero_grad()
        F.cross_entropy(twin(x), classes).backward()
        for each in theirs:
            each.step()
    for ours, reference in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, reference, rtol=1e-5, atol=1e-6)


def test_a_skipped_step_changes_nothing_and_a_resume_continues_with_the_same_bits() -> None:
    optimizer = TorchOptimizer(MuonWithAdamW, LR)
    whole, resumed = (Stepper(network(), optimizer, Policy.fp16(), reference_count=16) for _ in range(2))
    for step in range(3):
        train(whole, *batch(step))
    assert weights_are_rounded_masters(whole)
    x, classes = batch(3)
    before = state_digest(whole)
    assert train(whole, x * float("inf"), classes).skipped
    assert state_digest(whole) == before
    resumed.load(whole.state().clone())
    for step in range(4, 8):
        train(whole, *batch(step))
        train(resumed, *batch(step))
    found, expected = flat_tensors(resumed.state()), flat_tensors(whole.state())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_embeddings_heads_norms_and_biases_are_left_to_adamw() -> None:
    assert hidden_matrices(network()) == {"0.weight", "2.weight"}
    tied = GPT(vocab_size=11, context=8, layers=2, heads=2, width=8, dropout=0.0)  # its head is its embedding
    parts = ("query_key_value", "project", "widen", "narrow")
    blocks = {f"blocks.{number}.{part}.weight" for number in range(2) for part in parts}
    assert hidden_matrices(tied) == blocks
    tied.register_module("head", nn.Linear(8, 11, bias=False))
    assert hidden_matrices(tied) == blocks
    tied.head.weight = tied.token.weight
    assert hidden_matrices(tied) == blocks


class WithTables(nn.Module):
    """As a vision transformer keeps its positions, and a Swin block its biases."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(9, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.attention.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
        self.recurrent, self.head = nn.GRU(8, 8), nn.Linear(8, 3)


def test_tables_and_recurrent_weights_are_left_to_adamw() -> None:
    assert hidden_matrices(WithTables()) == {"attention.in_proj_weight", "attention.out_proj.weight"}


def test_a_model_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(UnusableError, match=r"Sequential has no matrix that Muon trains: .* Use AdamW"):
        Stepper(conv_net(), TorchOptimizer(MuonWithAdamW, LR))
