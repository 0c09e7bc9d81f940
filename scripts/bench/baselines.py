"""Training steps of other libraries, as their authors would write them, behind one interface.

`PEERS[name](model, setup)` returns a function that trains on one batch and returns its mean loss. Nothing
here shares code with the engine. `refuse_disagreement` compares the losses of all sides of a benchmark, so
that no side is fast because it computes something else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[Tensor, Tensor]  # inputs [samples, ...], class of each [samples]
Step = Callable[[Batch], SupportsFloat]  # trains on a batch; its mean loss
CPU = torch.device("cpu")

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "weight_decay": 0.01},
    "sgd": {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
}
TORCH_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class Setup:
    """What all sides of a comparison have in common.

    `half` runs the model under autocast to fp16, natively; without it the arithmetic is fp32. `scaled` runs a
    GradScaler, from `init_scale`: low enough that no side skips a step, or their losses would differ.
    `bucket_mb` None means DDP's default of 25.
    """

    optimizer: str = "sgd"
    device: torch.device = CPU
    half: bool = True
    scaled: bool = True
    channels_last: bool = False
    bucket_mb: float | None = None
    broadcasts: bool = True  # DDP's default: buffers of rank 0 before each forward pass
    init_scale: int = 2**16

    def fused(self, model: nn.Module) -> torch.optim.Optimizer:
        kind = TORCH_OPTIMIZERS[self.optimizer]
        return kind(model.parameters(), fused=True, **OPTIONS[self.optimizer])  # type: ignore[call-arg]

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, float(self.init_scale), enabled=self.scaled)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.float16) if self.half else contextlib.nullcontext()

    def laid_out(self, images: Any) -> Any:
        """A module or a batch of images in the memory format of this setup."""
        if self.channels_last and (isinstance(images, nn.Module) or images.ndim == 4):
            return images.to(memory_format=torch.channels_last)
        return images


def raw(model: nn.Module, setup: Setup) -> Step:
    """The loop of torch's AMP recipe: autocast, GradScaler, fused optimizer; no synchronization by itself."""
    model = setup.laid_out(model.to(setup.device))
    return _loop(model, setup.fused(model), setup)


def ddp(model: nn.Module, setup: Setup) -> Step:
    """The same in DistributedDataParallel, gradients as views of the buckets."""
    wrapped = _wrapped(model, setup)
    return _loop(wrapped, setup.fused(wrapped), setup)


def ddp_with_hook(model: nn.Module, setup: Setup) -> Step:
    """DistributedDataParallel that sends fp16, by torch's own communication hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = _wrapped(model, setup)
    wrapped.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    return _loop(wrapped, setup.fused(wrapped), setup)


def replicated(model: nn.Module, setup: Setup) -> Step:
    """`replicate` of FSDP2 with parameters and reduction in fp16, fp32 in the optimizer."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model = setup.laid_out(model.to(setup.device))
    mesh = dist.device_mesh.init_device_mesh(
        setup.device.type, (dist.get_world_size(),), mesh_dim_names=("replicate",)
    )
    replicate(model, mesh=mesh, mp_policy=half if setup.half else MixedPrecisionPolicy())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    # Its parameters are DTensors, which torch's fused optimizers refuse beside GradScaler's plain tensors.
    optimizer = TORCH_OPTIMIZERS[setup.optimizer](
        model.parameters(), foreach=True, **OPTIONS[setup.optimizer]
    )  # type: ignore[call-arg]
    scale = (
        2.0**10 if setup.scaled else 1.0
    )  # constant, so that nothing is checked: less work than GradScaler

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        inputs, labels = batch
        loss = F.cross_entropy(model(inputs).float(), labels)
        (loss * scale).backward()
        if setup.scaled:
            with torch.no_grad():
                torch._foreach_mul_([p.grad.to_local() for p in model.parameters()], 1 / scale)
        optimizer.step()
        return loss.detach()

    return step


def accelerate(model: nn.Module, setup: Setup) -> Step:
    """Accelerate, as its examples have it.

    On a CPU it would train in fp32 without a word when asked for fp16, so what it has on a GPU is set here.
    In fp32 it has no scaler, which is less work than the other sides do.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="fp16" if setup.half else "no", cpu=setup.device.type == "cpu")
    if setup.half and setup.device.type == "cpu":
        accelerator.native_amp, accelerator.scaler = True, setup.scaler()
    model = setup.laid_out(model)
    prepared, optimizer = accelerator.prepare(model, setup.fused(model))

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        inputs, labels = batch
        with accelerator.autocast():
            loss = F.cross_entropy(prepared(inputs).float(), labels)
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def fabric(model: nn.Module, setup: Setup) -> Step:
    """Lightning Fabric: a loop of one's own, in which the library wraps model, backward and optimizer.

    On a CPU it would train in bf16 when asked for fp16, so its own precision plugin is passed instead. With
    `scaled` alone it has that plugin with autocast to fp32, which does nothing.
    """
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    class Scaled(MixedPrecision):
        """GradScaler without autocast."""

        def forward_context(self) -> contextlib.AbstractContextManager[Any]:
            return contextlib.nullcontext()

        def convert_input(self, data: Any) -> Any:
            return data

        def convert_output(self, data: Any) -> Any:
            return data

    kind = MixedPrecision if setup.half else Scaled
    plugin = kind("16-mixed", setup.device.type, setup.scaler())
    own = Fabric(accelerator=setup.device.type, devices=1, plugins=[plugin])
    model = setup.laid_out(model)
    prepared, optimizer = own.setup(model, setup.fused(model))

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        inputs, labels = batch
        loss = F.cross_entropy(prepared(inputs).float(), labels)
        own.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def lightning(model: nn.Module, setup: Setup) -> Step:
    """Lightning's Trainer with `barebones=True`, its mode for measuring overhead: all else adds to a step.

    Called, it fits one batch. A round of many steps is one fit, timed from its first batch to its last.
    """
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision

    class Scaled(MixedPrecision):
        """GradScaler without autocast."""

        def forward_context(self) -> contextlib.AbstractContextManager[Any]:
            return contextlib.nullcontext()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = setup.laid_out(model)
            self.optimizer = setup.fused(self.net)
            self.loss = torch.zeros(())
            self.clock: Callable[[], float] = time.perf_counter
            self.began = self.ended = 0.0

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            inputs, labels = batch
            loss = F.cross_entropy(self.net(inputs).float(), labels)
            self.loss = loss.detach()
            return loss

        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
            if batch_idx == 0:
                self.began = self.clock()

        def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
            self.ended = self.clock()

    module = Module()
    plugin = (MixedPrecision if setup.half else Scaled)("16-mixed", setup.device.type, setup.scaler())

    def fit(batch: Batch, steps: int) -> None:
        trainer = Trainer(
            accelerator=setup.device.type, devices=1, max_epochs=1, barebones=True, plugins=[plugin]
        )
        trainer.fit(module, Repeated(batch, steps))

    class Fitting:
        def __call__(self, batch: Batch) -> Tensor:
            fit(batch, 1)
            return module.loss

        def seconds(self, batch: Batch, steps: int, clock: Callable[[], float]) -> float:
            module.clock = clock
            fit(batch, steps)
            return module.ended - module.began

    return Fitting()


class Repeated:
    """An epoch of one batch, given `times`."""

    def __init__(self, batch: Batch, times: int) -> None:
        self._batch, self._times = batch, times

    def __len__(self) -> int:
        return self._times

    def __iter__(self) -> Iterator[Batch]:
        return itertools.repeat(self._batch, self._times)


Build = Callable[[nn.Module, Setup], Step]
PEERS: dict[str, Build] = {
    "raw": raw,
    "ddp": ddp,
    "ddp + hook": ddp_with_hook,
    "replicate": replicated,
    "accelerate": accelerate,
    "fabric": fabric,
    "lightning": lightning,
}
OF_PACKAGE = {"accelerate": "accelerate", "fabric": "lightning", "lightning": "lightning"}


def installed(name: str) -> bool:
    """Whether a peer can run here: Accelerate and Lightning are the extra `bench`."""
    return name not in OF_PACKAGE or importlib.util.find_spec(OF_PACKAGE[name]) is not None


def _wrapped(model: nn.Module, setup: Setup) -> DistributedDataParallel:
    device_ids = [setup.device] if setup.device.type == "cuda" else None
    options: dict[str, Any] = {"gradient_as_bucket_view": True}
    if setup.bucket_mb is not None:
        options["bucket_cap_mb"] = setup.bucket_mb
    if not setup.broadcasts:
        options["broadcast_buffers"] = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "bucket_cap_mb")  # not a whole number
        warnings.filterwarnings("ignore", "`broadcast_buffers`")  # which torch 2.11 knows by no other name
        return DistributedDataParallel(setup.laid_out(model.to(setup.device)), device_ids, **options)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, setup: Setup) -> Step:
    scaler = setup.scaler()

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        inputs, labels = batch
        with setup.autocast():
            loss = F.cross_entropy(model(inputs).float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


class Disagreement(Exception):
    """A side of a benchmark does not compute what the others do."""


def refuse_disagreement(losses: Mapping[str, Sequence[float]], tolerance: float) -> None:
    """Compare the losses of the first steps of all sides, which start from the same weights and batch.

    `tolerance` is relative to the first loss. Raises Disagreement for a side that differs from the first by
    more, and where the losses of the first have moved by less than ten times that: such a comparison could
    not notice a side that does not train.
    """
    (name, first), *others = losses.items()
    scale = abs(first[0])
    moved = max(abs(loss - first[0]) for loss in first) / scale
    if not moved >= 10 * tolerance:
        raise Disagreement(
            f"the losses of {name} move by {moved:.2%} of the first in {len(first)} steps, {[*first]}. That "
            f"is too little for a comparison to {tolerance:.2%}: take more steps or a higher learning rate."
        )
    for other, found in others:
        apart = [abs(one - two) / scale for one, two in zip(first, found, strict=True)]
        if not all(each <= tolerance for each in apart):  # a nan is a difference, which max() may drop
            raise Disagreement(
                f"{other} does not train as {name} does: its losses are {max(apart):.2%} apart, of at most "
                f"{tolerance:.2%}. {name}: {[*first]}; {other}: {[*found]}."
            )
