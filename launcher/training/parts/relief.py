"""What a run does where a rank runs out of memory in the pass of a step: train.on_oom.

Owns the smaller micro-batch, on which all ranks agree without a further collective per step, and the state
that a repeated step needs. A rank that runs out abandons the step, which drops it on all ranks. They read
that one step late, so the rank abandons the next step as well: all ranks then return to the same weights.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from launcher.data.random_state import States, restore, states
from launcher.distributed.collectives import exchange_texts
from launcher.errors import OutOfMemoryError
from launcher.process import frames
from launcher.process.shortage import ran_out
from launcher.run_dir.result import Result
from launcher.telemetry.events import OutOfMemoryEvent
from launcher.training.answers import Kept
from launcher.training.device import free_memory
from launcher.training.job import Job
from launcher.training.progress import Position
from launcher.training.setup.trials import half_of, search

log = logging.getLogger("launcher")


class Relief:
    """Halves the micro-batch once, on all ranks, where one of them has run out of memory.

    Only with train.on_oom=halve. Not with model.sync_bn on several ranks, whose passes wait for each other.
    """

    name = "relief"

    def __init__(self, job: Job) -> None:
        run = job.run
        self._job, self._run = job, run
        # The value of data.micro_batch, and the size per rank that the run uses in its place, if it does.
        self._chosen: tuple[str | int | None, int] | None = None
        self._waits_for_others = run.config.model.sync_bn and run.env.group is not None
        self._active = run.config.train.on_oom == "halve"
        self._gpu = run.env.device if run.env.device.type == "cuda" else None
        # What the passes of a step change besides the state of the Stepper: the generators of the host and of
        # the GPU, and the right answers. By step, of the latest two.
        self._before: dict[int, tuple[States, Tensor | None, Kept]] = {}
        self._halved = ""  # how, once it has been
        self._shortage = ""  # of this rank, until the micro-batch is halved

    def state(self) -> dict[str, object]:
        return {"micro_batch": self._chosen and dict(zip(("wish", "size"), self._chosen, strict=True))}

    def load_state(self, values: dict[str, Any]) -> None:
        if (saved := values["micro_batch"]) is not None:
            self._chosen = saved["wish"], saved["size"]

    def add_to(self, result: Result) -> Result:
        return replace(result, micro_batch=self._job.batches.plan.largest_micro_batch)

    def choose(self, steps_left: bool) -> None:
        """Divide the batches as data.micro_batch says, as in the run so far, or as found by trying.

        A collective. Raises OutOfMemoryError, on all ranks, where not even one sample fits.
        """
        job, run, wish = self._job, self._run, self._run.config.data.micro_batch
        if self._chosen is not None and self._chosen[0] == wish:
            size = self._chosen[1]
            run.telemetry.decision("micro-batch", f"{size} per rank, as in the run so far")
        elif wish == "auto" and steps_left:
            size = search(job)
        else:
            self._chosen = None
            return
        job.plan = replace(job.plan, micro_batch=size)
        run.stepper.set_micro_batches(job.plan.micro_batches)
        self._use(size)

    def _use(self, size: int) -> None:
        """Record another micro-batch than that of the config, in config.yaml too."""
        data = self._run.config.data
        self._chosen = (data.micro_batch, size)
        self._run.record(data=replace(data, micro_batch=size))

    @property
    def dropping(self) -> bool:
        """Whether this rank abandons the coming step, because it has abandoned the one before."""
        return bool(self._shortage)

    @property
    def _half(self) -> int | None:
        """The size after halving; None where it cannot be smaller."""
        return half_of(self._job.batches.plan)

    def keep(self, position: Position) -> None:
        """Keep what the passes of a step change besides the state of the Stepper."""
        if self._active and not (self._waits_for_others or self._halved):
            of_gpu = None if self._gpu is None else torch.cuda.get_rng_state(self._gpu)
            self._before[position.step] = states(), of_gpu, self._job.answers.kept
            self._before.pop(position.step - 2, None)

    def accepts(self, error: Exception, position: Position) -> bool:
        """Whether this rank abandons the step after `error`, to take it again in smaller pieces.

        False for every other error, and with train.on_oom=stop. Raises OutOfMemoryError if that has been done
        already, where nothing can be halved, and under model.sync_bn on several ranks.
        """
        shortage = ran_out(error)
        if not (shortage and self._active):
            return False
        if obstacle := self._obstacle():
            raise OutOfMemoryError(
                f"rank {self._run.env.rank} ran out of {shortage} in the forward or backward pass of step "
                f"{position.step}. {obstacle}"
            ) from error
        log.warning("step %d: this rank ran out of %s", position.step, shortage, exc_info=error)
        self._shortage = shortage
        frames.release(error)
        free_memory(self._run.env.device)
        return True

    def _obstacle(self) -> str:
        """Why no step is taken again in smaller pieces, and what helps; empty where one is."""
        size, helps = self._job.batches.plan.largest_micro_batch, "a smaller model or smaller samples"
        if self._waits_for_others:
            below = f"data.micro_batch below {size}; " if size > 1 else ""
            return (
                "With model.sync_bn=true on several ranks a step is not repeated in smaller pieces "
                "(train.on_oom), because their passes wait for each other. What helps: "
                f"{below}model.sync_bn=false; {helps}."
            )
        if self._half is None:
            return f"The micro-batch is {size} already, which cannot be halved. What helps: {helps}."
        if self._halved:
            return (
                f"{self._halved}, and that is done once per start. Set data.micro_batch=auto, which finds "
                "the largest that fits; if the memory in use grows from step to step, correct that first."
            )
        return ""

    def retake(self, position: Position) -> None:
        """Divide the batches from `position` on into smaller pieces, and return there. A collective."""
        texts = exchange_texts(self._run.env, self._shortage)
        plan = self._job.batches.plan
        smaller = replace(plan, micro_batch=self._half)
        free_memory(self._run.env.device)
        self._job.batches.divide(smaller, position.epoch, position.step_of_epoch)
        self._run.stepper.set_micro_batches(smaller.micro_batches)
        generators, of_gpu, self._job.answers.kept = self._before[position.step]
        restore(generators)
        if of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu, self._run.env.device)
        self._before.clear()
        self._shortage = ""
        self._report(position.step, plan.largest_micro_batch, smaller.largest_micro_batch, texts)

    def _report(self, step: int, before: int, size: int, texts: list[str]) -> None:
        run = self._run
        self._halved = f"The micro-batch was halved from {before} to {size} in step {step}"
        self._use(size)
        short = {rank: text for rank, text in enumerate(texts) if text}
        run.telemetry.emit(OutOfMemoryEvent(step - 1, ranks=list(short), micro_batch=size, dropped=step))
        said = "; ".join(f"rank {rank} ran out of {text}" for rank, text in short.items())
        run.telemetry.warn(
            f"{said} in step {step}: the micro-batch is {size} per rank from this step on, not {before}, on "
            "all ranks. The step is repeated with the same samples, and updates stay those of "
            f"data.batch_size={run.config.data.batch_size}. To start with it: data.micro_batch={size}. To "
            "end the run instead: train.on_oom=stop."
        )
