"""The table of policies, and the choice between native and emulated arithmetic with its reason."""

from __future__ import annotations

import pytest
import torch

from launcher.engine import Policy
from launcher.engine.policy import choose_emulation

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("name", "weights", "arithmetic", "wire", "masters", "scale_mode"),
    [
        ("fp32", FP32, FP32, FP32, True, "none"),
        ("amp_fp16", FP32, FP16, FP16, True, "dynamic"),
        ("fp16", FP16, FP16, FP16, True, "dynamic"),
        ("pure_fp16", FP16, FP16, FP16, False, "static"),
        ("bf16", BF16, BF16, BF16, True, "none"),
        ("amp_bf16", FP32, BF16, BF16, True, "none"),
    ],
)
def test_policies_are_those_of_the_contract(name, weights, arithmetic, wire, masters, scale_mode) -> None:
    assert Policy.named(name) == Policy(name, weights, arithmetic, wire, masters, scale_mode)


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"'fp8' does not exist. There are: fp32, amp_fp16, fp16"):
        Policy.named("fp8")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("wish", [None, True, False])
@pytest.mark.parametrize("policy", [Policy.fp32(), Policy.fp16(), Policy.amp_bf16()], ids=lambda p: p.name)
def test_emulation_follows_the_wish_or_the_processor_and_says_why(policy, wish, device) -> None:
    chosen = choose_emulation(policy, torch.device(device), wish)
    if policy.arithmetic == FP32:
        assert (chosen.used, chosen.reason) == (False, "fp32 arithmetic needs none")
    elif wish is not None:
        assert (chosen.used, chosen.reason) == (wish, "as asked for")
    else:
        assert not (device == "cuda" and chosen.used)
        assert chosen.reason.endswith("arithmetic")


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("name", ["fp32", "fp16", "amp_bf16"])
def test_the_forward_context_gives_products_the_arithmetic_of_the_policy(name, emulate) -> None:
    policy = Policy.named(name)
    with policy.forward(torch.device("cpu"), emulate):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == policy.arithmetic
