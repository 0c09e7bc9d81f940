"""What cannot be trained on several ranks is refused on each of them, before the model is touched."""

from __future__ import annotations

import torch
import torch.distributed as dist

from launcher.distributed.process_group import WorkerEnv
from launcher.engine import SGD, Policy, Stepper, TorchOptimizer, UnusableError, Wire
from tests.models import mlp
from tests.ranks.harness import run_ranks


def refused(env: WorkerEnv) -> tuple[str, bool]:
    """The error of a sharded build with an optimizer of torch, and whether the model is what it was."""
    model = mlp()
    before = [(p.data_ptr(), p.dtype) for p in model.parameters()]
    try:
        adam = TorchOptimizer(torch.optim.Adam, 0.1)
        Stepper(model, adam, Policy.fp16(), env.group, wire=Wire(shard=True))
    except UnusableError as error:
        return str(error), [(p.data_ptr(), p.dtype) for p in model.parameters()] == before
    return "", False


def test_a_sharded_optimizer_of_torch_is_refused_before_the_model_is_moved() -> None:
    for text, untouched in run_ranks(2, refused):
        assert text.startswith("Adam cannot be sharded")
        assert untouched


def built_with_a_group_of_rank_1(env: WorkerEnv) -> str:
    group = dist.new_group([1])
    try:
        Stepper(mlp(), SGD(0.1), Policy.fp32(), group)
    except UnusableError as error:
        return str(error)
    return ""


def test_a_group_of_other_ranks_is_refused() -> None:
    outside, member = run_ranks(2, built_with_a_group_of_rank_1)
    assert outside.startswith("rank 0 is not a member of the group")
    assert member == ""


def odd_tensors(env: WorkerEnv) -> tuple[str, bool]:
    """The error for a sparse buffer, and whether frozen parameters of every dtype have rank 0's values."""
    model = mlp()
    model[0].register_buffer("graph", torch.eye(3).to_sparse())
    try:
        Stepper(model, SGD(0.1), Policy.fp16(), env.group)
    except UnusableError as error:
        text = str(error)
    model = mlp(seed=env.rank)
    dtypes = (torch.int16, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64)
    for dtype in dtypes:
        for name, shape in (("table", (2, 3)), ("number", ()), ("nothing", (0, 2))):
            values = torch.full(shape, env.rank + 1).to(dtype)
            name = f"{name}_{dtype}".replace(".", "_")
            model.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    Stepper(model, SGD(0.1), Policy.fp16(), env.group)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return text, all(bool((p.to(torch.complex64) == 1).all()) for p in frozen) and len(frozen) == 18


def test_a_sparse_buffer_is_refused_and_frozen_parameters_have_any_dtype() -> None:
    for text, same in run_ranks(2, odd_tensors):
        assert text.startswith(
            "0.graph of Sequential is torch.float32, torch.sparse_coo. Parameters and buffers"
        )
        assert same
