"""The recipe of `loop.py`: a perceptron whose run stops now and then for the same steps written by hand.

The recipe puts a call before each step of the launcher. Every `block` steps that call trains as many steps in
a loop by hand around a bare Stepper (or around torch's DataLoader), so that both sides take turns within one
process of the real program. Both train on the same batches from the same weights; the weights are compared
after every block.

The loop by hand prints and measures what a user of the launcher gets by default: a line every 10 steps with
the loss, the rate, the loss scale, the skipped steps and the speed, and after each epoch the loss and the
accuracy on its training samples, summed without reading a tensor in a step. It saves nothing, handles no
signal, and nobody notices if it hangs. The loop of the engine's README does none of this: it reads the report
of each step, and nothing else.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from launcher.data.batch_plan import epoch_order
from launcher.engine import SGD, Policy, Scaling, Stepper, StepReport, StepResult
from launcher.recipe import Batch, Config, Recipe, TensorData, cross_entropy, recipe
from scripts.bench.baselines import Disagreement
from scripts.bench.interleaved import Times
from scripts.bench.real_run import call_before_each_step

SETTINGS = "LAUNCHER_BENCH_LOOP"  # the environment variable with those of a run, as JSON
FEATURES, CLASSES = 64, 10
LOG_EVERY = 10  # steps: the launcher's default
CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


@dataclass(frozen=True)
class Settings:
    """`source`: tensors, loader, or readme. The first block of both sides is not counted."""

    source: str
    workers: int
    block: int  # steps
    rounds: int
    steps_per_epoch: int
    batch_size: int
    file: str  # for the times
    width: int = 256  # of the perceptron

    @property
    def total_steps(self) -> int:
        """The last of them only ends the last block of the launcher."""
        return (self.rounds + 1) * self.block + 1

    @property
    def num_samples(self) -> int:
        return self.steps_per_epoch * self.batch_size


class Samples:
    """A map-style data set of the rows of tensors."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self._images = columns["image"]
        self._labels = columns["label"].tolist()

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self._images[index], "label": self._labels[index]}


class OrderOfEpochs:
    """A sampler with the order of the launcher's epochs, the next one at each iteration."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples, self._seed = num_samples, seed
        self._epoch = 0

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(self._num_samples, self._seed, self._epoch)
        self._epoch += 1
        return iter(order.tolist())


def columns_of(num_samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(num_samples, FEATURES, generator=generator)
    return {"image": images, "label": torch.randint(CLASSES, (num_samples,), generator=generator)}


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def batches_in_memory(columns: dict[str, Tensor], settings: Settings, seed: int) -> Iterator[Batch]:
    """Of all epochs, gathered one after another."""
    for epoch in range(settings.total_steps):
        order = epoch_order(settings.num_samples, seed, epoch)
        for indices in order.split(settings.batch_size):
            yield {name: column[indices] for name, column in columns.items()}


def batches_of_loader(columns: dict[str, Tensor], settings: Settings, seed: int) -> Iterator[Batch]:
    """Of all epochs, from torch's DataLoader."""
    loader = DataLoader(
        Samples(columns),  # type: ignore[arg-type]
        batch_size=settings.batch_size,
        sampler=OrderOfEpochs(settings.num_samples, seed),
        num_workers=settings.workers,
        persistent_workers=settings.workers > 0,
    )
    while True:
        yield from loader


@dataclass
class Printed:
    """The lines of a loop by hand, from reports that are read one step late."""

    steps_per_epoch: int
    loss_sum: float = 0.0
    count: float = 0.0
    steps: int = 0
    began: float = field(default_factory=time.perf_counter)

    def step(self, report: StepReport, right: Tensor) -> None:
        """A step. `right` (int64, 0-dim) are the samples of the epoch so far that were classified rightly."""
        self.loss_sum += report.loss * report.count
        self.count += report.count
        self.steps += 1
        if self.steps % LOG_EVERY == 0:
            now = time.perf_counter()
            speed, self.began = LOG_EVERY * report.count / (now - self.began), now
            print(
                f"step {self.steps}  loss {report.loss:.4g}  lr {report.lr:g}  {speed:,.0f} samples/s  "
                f"scale {report.scale:g}  skipped {report.skipped_steps}"
            )
        if self.steps % self.steps_per_epoch == 0:
            loss, accuracy = self.loss_sum / self.count, right.item() / self.count
            print(f"epoch {self.steps // self.steps_per_epoch}  loss {loss:.4f}  accuracy {accuracy:.2%}")
            self.loss_sum = self.count = 0.0
            right.zero_()


def stepper_of(model: nn.Module, config: Config) -> Stepper:
    rule = SGD(lr=config.optim.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scaled = config.precision.name != "fp32"
    scaling = Scaling("dynamic", init=config.precision.loss_scale.init_scale) if scaled else None
    return Stepper(model, rule, Policy.named(config.precision.name), scaling=scaling)


def as_the_readme(model: nn.Module, config: Config, batches: Iterator[Batch]) -> Callable[[], None]:
    """One step on the next batch, as the README of the engine has it, but for its print."""
    stepper = stepper_of(model, config)

    def step() -> None:
        batch = next(batches)
        with stepper.forward():
            logits = model(batch["image"]).float()
        loss_sum = F.cross_entropy(logits, batch["label"], reduction="sum")
        stepper.backward(loss_sum, len(logits))
        stepper.step().read()

    return step


def by_hand(
    model: nn.Module, config: Config, batches: Iterator[Batch], steps_per_epoch: int
) -> Callable[[], None]:
    """One step on the next batch: what an author writes around a Stepper, each report read one step late."""
    stepper = stepper_of(model, config)
    waiting: list[StepResult] = []
    printed = Printed(steps_per_epoch)
    right = torch.zeros((), dtype=torch.int64)

    def step() -> None:
        batch = next(batches)
        with stepper.forward():
            logits = model(batch["image"]).float()
            loss = F.cross_entropy(logits, batch["label"], reduction="sum")
        stepper.backward(loss, len(logits))
        waiting.append(stepper.step())
        if len(waiting) > 1:
            printed.step(waiting.pop(0).read(), right)
        right.add_((logits.argmax(1) == batch["label"]).sum())

    return step


class Turns:
    """Lets both sides train by turns. `next_step` is called before each step of the launcher."""

    def __init__(self, settings: Settings, other: Callable[[nn.Module], Callable[[], None]]) -> None:
        self._settings = settings
        self._make_other = other
        self._model: nn.Module | None = None
        self._copy: nn.Module | None = None
        self._other: Callable[[], None] | None = None
        self._step = 0
        self._began: dict[str, float] = {}
        self.times: dict[str, Times] = {clock: {"launcher": [], "by hand": []} for clock in CLOCKS}

    def build_model(self) -> nn.Module:
        self._model = perceptron(self._settings.width)
        self._copy = copy.deepcopy(self._model)
        return self._model

    def next_step(self) -> None:
        if self._step % self._settings.block == 0:
            self._count("launcher", counted=self._step > self._settings.block)
            if self._step:
                self._train_by_hand(counted=self._step > self._settings.block)
                self._refuse_other_weights()
            if self._step == self._settings.total_steps - 1:
                Path(self._settings.file).write_text(json.dumps(self.times))
            self._restart()
        self._step += 1

    def _train_by_hand(self, counted: bool) -> None:
        assert self._copy is not None
        self._other = self._other or self._make_other(self._copy)
        self._restart()
        began = time.thread_time()
        for _ in range(self._settings.block):
            self._other()
        own_s = time.thread_time() - began
        self._count("by hand", counted)
        if counted and not self._settings.workers:
            self._charge_threads(own_s / self._settings.block)

    def _charge_threads(self, own_s: float) -> None:
        """What other threads did meanwhile is the launcher's: it writes its files there.

        What they do by the clock, however fast the steps are, is thereby counted twice. With loader
        processes the loop by hand has a thread too, and each side keeps what was done in its own time.
        """
        cpu = self.times["cpu"]
        cpu["launcher"][-1] += cpu["by hand"][-1] - own_s
        cpu["by hand"][-1] = own_s

    def _restart(self) -> None:
        self._began = {name: clock() for name, clock in CLOCKS.items()}

    def _count(self, side: str, counted: bool) -> None:
        for name, clock in CLOCKS.items():
            if counted:
                self.times[name][side].append((clock() - self._began[name]) / self._settings.block)

    def _refuse_other_weights(self) -> None:
        """Both have trained the same steps by now, on the same batches from the same weights."""
        assert self._model is not None
        assert self._copy is not None
        pairs = zip(self._model.parameters(), self._copy.parameters(), strict=True)
        if not all(torch.equal(one, two) for one, two in pairs):
            raise Disagreement(f"the weights of launcher and loop by hand differ after step {self._step}.")


@recipe("bench_loop")
def bench_loop(config: Config) -> Recipe:
    settings = Settings(**json.loads(os.environ[SETTINGS]))
    torch.set_num_threads(1)  # or processor time would count threads that only wait for each other
    columns = columns_of(settings.num_samples)
    made = batches_of_loader if settings.source == "loader" else batches_in_memory

    def other(model: nn.Module) -> Callable[[], None]:
        batches = made(columns, settings, config.seed)
        if settings.source == "readme":
            return as_the_readme(model, config, batches)
        return by_hand(model, config, batches, settings.steps_per_epoch)

    turns = Turns(settings, other)
    call_before_each_step(turns.next_step)
    held_out = TensorData({name: column[:64] for name, column in columns.items()})
    return Recipe(
        build_model=turns.build_model,
        train=Samples(columns) if settings.source == "loader" else TensorData(columns),
        validation=held_out,
        loss=cross_entropy,
        classes=tuple(map(str, range(CLASSES))),
    )
