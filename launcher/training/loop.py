"""The training loop: a table of contents of a run.

Owns the order of training, logging, evaluation and saving. Every line it runs is the same on all ranks.
"""

from __future__ import annotations

from launcher.training.job import Job
from launcher.training.parts.evaluation import Evaluator
from launcher.training.progress import Start
from launcher.training.task import Task


def train(job: Job, start: Start, task: Task) -> int:
    """Train from `start` to the last step, and return its number. A collective.

    Ends earlier where a part says so. Raises PreemptedError, on all ranks after the same step, if any of them
    was asked to stop.
    """
    run, parts, course = job.run, job.parts, job.course
    evaluator = parts.of(Evaluator)
    task.network.train()
    if start.owes_evaluation:
        position = course.position_of(start.step)
        parts.end_step(position, evaluator.evaluate(position))
    run.reports.restart_timer()
    done = start.step
    while done < course.total_steps and not parts.ends:
        position = course.position_of(done + 1)
        run.heartbeat.beat("data", position.step)
        parts.vote(position)
        parts.after_launch(position, task.train_on(position))
        parts.end_step(position, evaluator.after(position))
        done = position.step
    return done
