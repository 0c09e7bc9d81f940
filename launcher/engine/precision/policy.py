"""Precision policies: which tensors and operations are fp16, bf16 or fp32.

Owns the table of the six policies and the choice between native half arithmetic and its emulation.
A policy is a value; it never touches a model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from launcher.engine.precision.emulation import RoundedArithmetic, Rounding

ScaleMode = Literal["dynamic", "static", "none"]
FIRST_FP16, FIRST_BF16 = (7, 0), (8, 0)  # compute capabilities: Volta, Ampere


@dataclass(frozen=True)
class Policy:
    """Which parameters, operations and gradients have which dtype.

    `weights`: parameters of two or more dimensions, and all of an nn.RNNBase; other vectors, and buffers, are
    fp32.
    `arithmetic`: inputs and outputs of matrix products and convolutions.
    `gradient_dtype`: gradients of these parameters as they are kept and sent, in one process too; the
    others' are fp32.
    `masters`: whether half weights have an fp32 copy that the optimizer updates. `scale_mode`: how the loss
    scale changes by default.
    """

    name: str
    weights: torch.dtype
    arithmetic: torch.dtype
    gradient_dtype: torch.dtype
    masters: bool
    scale_mode: ScaleMode

    @classmethod
    def fp32(cls) -> Policy:
        """All fp32 (TF32 where the caller allows it); known as O0."""
        return cls("fp32", torch.float32, torch.float32, torch.float32, True, "none")

    @classmethod
    def amp_fp16(cls) -> Policy:
        """fp32 weights, fp16 matrix products; known as O1, torch AMP."""
        return cls("amp_fp16", torch.float32, torch.float16, torch.float16, True, "dynamic")

    @classmethod
    def fp16(cls) -> Policy:
        """fp16 weights with fp32 masters; known as O2."""
        return cls("fp16", torch.float16, torch.float16, torch.float16, True, "dynamic")

    @classmethod
    def pure_fp16(cls) -> Policy:
        """fp16 weights without masters; known as O3. Only for comparison with policies that have masters."""
        return cls("pure_fp16", torch.float16, torch.float16, torch.float16, False, "static")

    @classmethod
    def bf16(cls) -> Policy:
        """bf16 weights with fp32 masters; bf16 has the range of fp32 and needs no loss scale."""
        return cls("bf16", torch.bfloat16, torch.bfloat16, torch.bfloat16, True, "none")

    @classmethod
    def amp_bf16(cls) -> Policy:
        """fp32 weights, bf16 matrix products."""
        return cls("amp_bf16", torch.float32, torch.bfloat16, torch.bfloat16, True, "none")

    @classmethod
    def named(cls, name: str) -> Policy:
        """The policy of that name; the ValueError for another one lists them."""
        made = (cls.fp32(), cls.amp_fp16(), cls.fp16(), cls.pure_fp16(), cls.bf16(), cls.amp_bf16())
        policies = {policy.name: policy for policy in made}
        if name not in policies:
            raise ValueError(f"precision policy {name!r} does not exist. There are: {', '.join(policies)}.")
        return policies[name]

    def forward(self, device: torch.device, emulate: bool) -> AbstractContextManager[object]:
        """The context of the model's forward pass under this policy on `device`."""
        if self.arithmetic == torch.float32:
            return nullcontext()
        if emulate:
            return RoundedArithmetic(self.arithmetic, device.type)
        return torch.autocast(device.type, dtype=self.arithmetic)

    def backward(self, device: torch.device, emulate: bool) -> AbstractContextManager[object]:
        """The context of a backward pass, in which activation checkpointing repeats forward passes.

        Checkpoints restore torch.autocast by themselves, but not the mode that emulates it.
        """
        if self.arithmetic == torch.float32 or not emulate:
            return nullcontext()
        return Rounding(self.arithmetic, device.type)


@dataclass(frozen=True)
class Emulation:
    """Whether half arithmetic is emulated, and why, as readable text."""

    used: bool
    reason: str


def choose_emulation(policy: Policy, device: torch.device, requested: bool | None = None) -> Emulation:
    """Decide between native and emulated half arithmetic; `requested` (not None) overrides the default.

    CPU kernels for fp16 products are 50 to 100 times slower than fp32 unless the CPU has native fp16
    arithmetic (AMX-FP16, through oneDNN), so emulation is the default there. It is also the default for bf16
    on GPUs before Ampere, by compute capability: `torch.cuda.is_bf16_supported` also counts bf16 that torch
    emulates. fp16 is native on every GPU: without matrix units its products still accumulate in fp32.
    """
    kind = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(policy.arithmetic)
    if kind is None:
        return Emulation(False, "fp32 arithmetic needs none")
    slow_cpu = device.type == "cpu" and not _cpu_has(policy.arithmetic)
    if requested is False and slow_cpu:
        reason = f"as requested, though this CPU has no {kind} arithmetic: products take 50 to 100 times as "
        return Emulation(False, reason + "long as emulated ones (emulate=auto)")
    if requested is not None:
        return Emulation(requested, "as requested")
    if slow_cpu:
        return Emulation(True, f"this CPU has no {kind} arithmetic")
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        gpu = "this GPU (compute capability {}.{})".format(*capability)
        if kind == "bf16" and capability < FIRST_BF16:
            return Emulation(True, f"{gpu} has no bf16 arithmetic; precision=fp16 is faster on it")
        units = "has" if capability >= FIRST_FP16 else "saves memory, but little time, without"
        return Emulation(False, f"{gpu} {units} {kind} matrix units")
    return Emulation(False, f"{device.type.replace('cpu', 'this CPU')} has {kind} arithmetic")


def _cpu_has(dtype: torch.dtype) -> bool:
    mkldnn = torch.ops.mkldnn
    if dtype == torch.float16:
        return torch.cpu._is_amx_fp16_supported() and bool(mkldnn._is_mkldnn_fp16_supported())
    return torch.cpu._is_avx512_bf16_supported() and bool(mkldnn._is_mkldnn_bf16_supported())
