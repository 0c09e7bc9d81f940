"""How many operations a step issues: on a GPU small networks are bound by the host, about 5 us for each.

Counted at the dispatcher for tensors on `meta`, against autocast + GradScaler as its authors would write it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.engine import SGD, AdamW, Policy, Stepper
from launcher.engine.optim.update import StepScalars, Updater
from launcher.engine.params.flat_buffers import Shard
from launcher.trainer.replica_consistency import checksums
from recipes.resnet import BasicBlock, Bottleneck, ResNet
from tests.meta_device import META

OPTIONS = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
NO_KERNELS = {
    *(
        "empty",
        "new_empty",
        "alias",
        "as_strided",
        "detach",
        "expand",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
    ),
    *("squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
}


class Operations(TorchDispatchMode):
    """The names of all operations on a device; those that `meta` has no form of change nothing."""

    def __init__(self, device: torch.device = META) -> None:
        super().__init__()
        self.device = device
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if any(getattr(leaf, "device", leaf) == self.device for leaf in tree_leaves((args, kwargs))):
            self.names.append(name)
        if name.startswith(("_fused_", "_amp_")):
            return None
        return func(*args, **(kwargs or {}))

    def counts(self) -> tuple[int, int]:
        """Of all operations, and of those that launch a kernel: views and fresh memory do not."""
        return len(self.names), sum(name not in NO_KERNELS for name in self.names)


class Autocast(TorchFunctionMode):
    """What torch.autocast does on CUDA to the operations of a ResNet: torch has none for this device."""

    def __init__(self) -> None:
        super().__init__()
        self._casts: dict[Tensor, Tensor] = {}  # of weights, which it makes once

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.conv2d, F.linear):
            args = tuple(self._half(value) for value in args)
        return func(*args, **(kwargs or {}))

    def _half(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.half()
        if value not in self._casts:
            self._casts[value] = value.half()
        return self._casts[value]


def resnet18() -> nn.Module:
    return ResNet(BasicBlock, (2, 2, 2, 2), 10, 3, small_stem=True).to(META)


def resnet50() -> nn.Module:
    return ResNet(Bottleneck, (3, 4, 6, 3), 10, 3, small_stem=True).to(META)


def batch() -> tuple[Tensor, Tensor]:
    return torch.empty(8, 3, 32, 32, device=META), torch.empty(8, dtype=torch.int64, device=META)


def counted(step: Callable[[], None]) -> tuple[int, int]:
    """Of a third step: all states are there."""
    for _ in range(2):
        with Operations():
            step()
    with Operations() as operations:
        step()
    return operations.counts()


def with_grad_scaler(build: Callable[[], nn.Module] = resnet18) -> Callable[[], None]:
    model, (x, classes) = build(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **OPTIONS)  # type: ignore[arg-type]
    optimizer.param_groups[0] |= {"fused": True, "foreach": False}  # which torch refuses for this device
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer._need_device_dtype_check_for_fused = False  # type: ignore[attr-defined]
    scaler = torch.amp.GradScaler("meta")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with Autocast():
            loss = F.cross_entropy(model(x).float(), classes)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def ours(build: Callable[[], nn.Module] = resnet18, micro_batches: int = 1) -> Callable[[], None]:
    with Operations():
        stepper = Stepper(
            build(),
            SGD(0.1, **OPTIONS),  # type: ignore[arg-type]
            Policy.fp16(),
            reference_count=8,
            micro_batches=micro_batches,
        )
    assert not stepper.emulation.used
    x, classes = batch()

    def step() -> None:
        for _ in range(micro_batches):
            with Autocast():
                loss = F.cross_entropy(stepper.model(x).float(), classes, reduction="sum")
            stepper.backward(loss, len(x))
        stepper.step()

    return step


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("build", "operations", "kernels"), [(resnet18, 1.15, 1.15), (resnet50, 1.0, 0.95)], ids=["18", "50"]
)
def test_a_step_launches_no_more_than_one_of_autocast_and_grad_scaler(build, operations, kernels) -> None:
    """Without a compiler, which makes fewer kernels still of a step's scalars and of its update."""
    own, theirs = counted(ours(build)), counted(with_grad_scaler(build))
    assert theirs[0] > 300
    text = "{} operations, {} of them kernels; with GradScaler {} and {}".format(*own, *theirs)
    assert own[0] <= operations * theirs[0], text
    assert own[1] <= kernels * theirs[1], text


@pytest.mark.parametrize("optimizer", [AdamW(1e-3), SGD(0.1, momentum=0.9)], ids=["adamw", "sgd"])
def test_a_checkpoint_compares_large_models_in_as_few_operations_as_small_ones(optimizer) -> None:
    """Replicas with each other, and weights with masters: by parameter the former were 391 operations."""

    def kernels(layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        stepper = Stepper(model, optimizer, Policy.fp16(), reference_count=1)
        with Operations(torch.device("cpu")) as operations:
            checksums(stepper.replicas(by_parameter=False))
            stepper.state()
        return operations.counts()[1]

    assert kernels(30) == kernels(3) < 80


@pytest.mark.slow
def test_a_further_micro_batch_adds_two_kernels_a_bucket_to_its_passes() -> None:
    """Its gradients are copied to the message and added to the sums, which widens them all at once."""
    alone, two, three = (counted(ours(resnet18, micro_batches=k))[1] for k in (1, 2, 3))
    model, (x, classes) = resnet18().half(), batch()
    with Operations() as passes, Autocast():
        F.cross_entropy(model(x.half()).float(), classes, reduction="sum").backward()
    added = three - two
    buckets, counts, slope = 2, 6, 1
    assert added <= passes.counts()[1] + 2 * buckets + counts + slope, (alone, two, three, passes.counts())


class Moved(TorchDispatchMode):
    """The bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in NO_KERNELS:
            return func(*args, **(kwargs or {}))
        self.bytes += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        if name.startswith("_fused_"):  # all but the gradients are written, too
            masters, _, *states = args
            written = [masters, *(each for each in states if each and each[0].shape == masters[0].shape)]
            self.bytes += sum(tensor.nbytes for tensors in written for tensor in tensors)
            return None
        found = func(*args, **(kwargs or {}))
        if not name.endswith("_"):  # in place: what was counted above
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        return found


@pytest.mark.parametrize(
    ("optimizer", "gradient_dtype", "most"),
    [
        (SGD(0.1, momentum=0.9), torch.float16, 32),
        (AdamW(0.1), torch.float16, 40),
        (SGD(0.1, momentum=0.9), torch.float32, 34),
    ],
)
def test_an_update_moves_no_more_bytes_a_parameter(
    optimizer: SGD | AdamW, gradient_dtype: torch.dtype, most: int
) -> None:
    """Widening the gradient, torch's fused kernel and rounding the weights, each in one pass."""
    numel = 1 << 20
    weight = torch.empty(numel, dtype=torch.float16, device=META)
    shard = Shard(
        weight, torch.empty(numel, device=META), torch.empty(numel, dtype=gradient_dtype, device=META)
    )
    multiplier, rate, number, skip = torch.empty(4, device=META).unbind()
    scalars = StepScalars(multiplier, rate.double(), number.double(), skip > 0)
    updater = Updater([shard], optimizer)
    with Moved() as moved:
        updater.step(scalars)
    assert moved.bytes / numel <= most + 0.01
