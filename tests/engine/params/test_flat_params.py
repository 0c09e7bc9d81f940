"""The flat layout: values and forms kept, dtypes by policy, alignment, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.engine import Policy
from launcher.engine.params.flat_params import ALIGNMENT, Layout
from tests.models import Odd, mlp


@pytest.mark.parametrize(
    "policy", [Policy.fp32(), Policy.fp16(), Policy.amp_fp16(), Policy.bf16()], ids=lambda p: p.name
)
def test_values_shapes_and_strides_are_kept_and_masters_are_exact(policy) -> None:
    before = {
        name: p.detach().clone(memory_format=torch.preserve_format) for name, p in Odd().named_parameters()
    }
    model = Odd()
    layout = Layout(model, policy)
    masters = layout.named([flat_buffer.master for flat_buffer in layout.flat_buffers])
    assert set(masters) == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, p in model.named_parameters():
        dtype = policy.weights if p.ndim >= 2 else torch.float32
        assert p.dtype == dtype, name
        assert p.stride() == before[name].stride(), name
        assert torch.equal(p, before[name].float().to(dtype)), name
        if p.requires_grad:
            assert masters[name].dtype == torch.float32
            assert torch.equal(masters[name], before[name].float()), name


def test_slots_are_aligned_disjoint_and_the_parameters_are_views_of_them() -> None:
    layout = Layout(Odd(), Policy.fp16())
    assert [param.index for param in layout.params] == list(range(len(layout.parameters)))
    for flat_buffer in layout.flat_buffers:
        end = 0
        for param in flat_buffer.params:
            assert param.offset % ALIGNMENT == 0
            assert param.offset >= end
            end = param.offset + param.numel
            flat_buffer.weight[param.offset : end] = param.index
            assert (layout.parameters[param.name] == param.index).all()
        assert flat_buffer.numel >= end


@pytest.mark.parametrize("world_size", [1, 3, 64, 100])
def test_runs_are_divided_among_the_ranks_and_hold_little_beside_the_parameters(world_size) -> None:
    layout = Layout(Odd(), Policy.fp16(), world_size=world_size, bucket_bytes=256)
    for flat_buffer in layout.flat_buffers:
        assert [run.start for run in flat_buffer.bucket_ranges] == [
            0,
            *(run.end for run in flat_buffer.bucket_ranges[:-1]),
        ]
        for run in flat_buffer.bucket_ranges:
            shards = [run.shard(rank, world_size) for rank in range(world_size)]
            assert [i for shard in shards for i in range(shard.start, shard.stop)] == [
                *range(run.start, run.end)
            ]
            owned = {i for param in run.params for i in range(param.offset, param.offset + param.numel)}
            gaps = [i for gap in run.gaps() for i in range(gap.start, gap.stop)]
            assert sorted([*owned, *gaps]) == [*range(run.start, run.end)]
            assert len(gaps) < ALIGNMENT * (len(run.params) + world_size)


@pytest.mark.parametrize("policy", [Policy.fp32(), Policy.fp16()], ids=lambda p: p.name)
def test_pieces_begin_at_multiples_of_64_bytes_on_up_to_64_ranks(policy) -> None:
    """Weights, masters and the fp32 sums that lie in the memory of the gradients."""
    for world_size in range(1, 65):
        layout = Layout(Odd(), policy, world_size=world_size, bucket_bytes=256)
        for flat_buffer in layout.flat_buffers:
            assert len(flat_buffer.bucket_ranges) > 1
            for run in flat_buffer.bucket_ranges:
                assert (run.end - run.start) % world_size == 0
                shards = [run.shard(rank, world_size) for rank in range(world_size)]
                flats = [flat[shard] for flat in (flat_buffer.weight, flat_buffer.master) for shard in shards]
                flats.append(flat_buffer.grad[run.start : run.end].view(torch.float32))
                assert all(flat.data_ptr() % 64 == 0 for flat in flats), world_size


def test_order_is_the_reverse_of_registration_matrices_first() -> None:
    layout = Layout(mlp(), Policy.fp16())
    assert [param.name for param in layout.params] == [
        "2.weight",
        "0.weight",
        "2.bias",
        "0.bias",
    ]
    assert [flat_buffer.weight.dtype for flat_buffer in layout.flat_buffers] == [torch.float16, torch.float32]
    assert [flat_buffer.grad.dtype for flat_buffer in layout.flat_buffers] == [torch.float16, torch.float32]


def test_pure_fp16_has_no_masters_for_matrices_and_exact_vectors() -> None:
    layout = Layout(mlp(), Policy.pure_fp16())
    assert [flat_buffer.master is None for flat_buffer in layout.flat_buffers] == [True, False]
    assert layout.flat_buffers[1].master is layout.flat_buffers[1].weight


@pytest.mark.parametrize("policy", [Policy.fp32(), Policy.fp16(), Policy.bf16()], ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_frozen_parameters_take_the_dtypes_of_trainable_ones(policy, dtype) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).to(dtype).requires_grad_(False)])
    Layout(model, policy)
    assert (model[1].weight.dtype, model[1].bias.dtype) == (policy.weights, torch.float32)


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def on_two_devices() -> nn.Module:
    return nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (frozen, "Sequential has no trainable parameter"),
        (nn.ReLU, "ReLU has no trainable parameter"),
        (lambda: mlp().double(), "parameter .* is torch.float64.*requires_grad_"),
        (
            lambda: nn.Linear(2, 2, dtype=torch.complex64),
            "parameter .* is torch.complex64.*requires_grad_",
        ),
        (on_two_devices, "parameters lie on 2 devices"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(make(), Policy.fp16())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.amp_fp16()], ids=lambda policy: policy.name)
def test_the_parameters_of_an_rnn_have_one_dtype(policy, frozen) -> None:
    """cuDNN's condition; other vectors stay fp32."""
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 4), "head": nn.Linear(4, 2)})
    model["rnn"].requires_grad_(not frozen)
    Layout(model, policy)
    assert {p.dtype for p in model["rnn"].parameters()} == {policy.weights}
    assert model["head"].bias.dtype == torch.float32


def test_frozen_integers_stay_integers() -> None:
    model = mlp()
    model.codes = nn.Parameter(torch.tensor([3, 70_001]), requires_grad=False)
    Layout(model, Policy.fp16())
    assert model.codes.tolist() == [3, 70_001]
    assert model.codes.dtype == torch.int64
