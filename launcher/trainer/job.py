"""One rank's job, from which its callbacks are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from launcher.data.batch_plan import BatchPlan
from launcher.data.sources import DataSets
from launcher.data.tensors import Batches
from launcher.recipe.contract import Recipe, Used
from launcher.trainer.answers import Answers
from launcher.trainer.callback import CallbackList
from launcher.trainer.progress import Course
from launcher.trainer.run import Run


@dataclass
class Job:
    """What one rank trains, with which callbacks. The batches exist once it is known where the run starts."""

    run: Run
    recipe: Recipe
    data: DataSets
    fingerprint: Mapping[str, str]  # of the data
    used: Used
    plan: BatchPlan
    course: Course
    model: nn.Module
    answers: Answers
    host_ms: float  # per layer: what the host spends on it, however small
    callbacks: CallbackList = field(init=False)
    batches: Batches = field(init=False)
