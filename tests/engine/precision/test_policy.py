"""The table of policies, and the choice between native and emulated arithmetic with its reason."""

from __future__ import annotations

import re

import pytest
import torch

from launcher.engine import Policy
from launcher.engine.precision.policy import choose_emulation

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
        assert chosen.used == wish
        assert chosen.reason.startswith("as requested")
    else:
        assert not (device == "cuda" and chosen.used)
        assert chosen.reason.endswith("arithmetic")


@pytest.mark.parametrize(
    ("capability", "name", "used", "reason"),
    [
        ((6, 1), "fp16", False, r"6\.1\) saves memory, but little time, without fp16"),
        ((7, 0), "fp16", False, r"7\.0\) has fp16 matrix units"),
        ((7, 0), "bf16", True, r"7\.0\) has no bf16 arithmetic; precision=fp16"),
        ((7, 5), "amp_bf16", True, r"7\.5\) has no bf16 arithmetic"),
        ((8, 0), "bf16", False, r"8\.0\) has bf16 matrix units"),
        ((12, 0), "amp_fp16", False, r"12\.0\) has fp16 matrix units"),
    ],
)
def test_a_gpu_is_asked_for_its_compute_capability(monkeypatch, capability, name, used, reason) -> None:
    """Not for `is_bf16_supported`, which says yes where torch emulates: on V100 and T4."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen = choose_emulation(Policy.named(name), torch.device("cuda", 0))
    assert chosen.used is used
    assert re.search(reason, chosen.reason)


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("name", ["fp32", "fp16", "amp_bf16"])
def test_the_forward_context_gives_products_the_arithmetic_of_the_policy(name, emulate) -> None:
    policy = Policy.named(name)
    with policy.forward(torch.device("cpu"), emulate):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == policy.arithmetic
