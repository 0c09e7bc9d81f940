"""The training loop: a table of contents of a run.

Owns the order of training, logging, evaluation and saving. Every line it runs is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import replace

from launcher.trainer.callbacks.evaluation import Evaluator
from launcher.trainer.job import Job
from launcher.trainer.progress import Measured, Position, Start
from launcher.trainer.task import Task


def train(job: Job, start: Start, task: Task) -> int:
    """Train from `start` to the last step, and return its number. A collective.

    Ends earlier where a callback has a `stop_reason`. Raises PreemptedError, on all ranks after the same
    step, if any of them was asked to stop.
    """
    run, callbacks, course = job.run, job.callbacks, job.course
    evaluator = callbacks.get(Evaluator)
    task.network.train()
    if start.owes_evaluation:
        position = course.position_of(start.step)
        _end_step(job, position, evaluator.evaluate(position))
    run.reports.restart_timer()
    done = start.step
    while done < course.total_steps and not callbacks.stop_reason:
        position = course.position_of(done + 1)
        run.heartbeat.beat("data", position.step)
        callbacks.on_step_start(position)  # votes cast here are sent with the totals of this step
        result = task.train_on(position)
        # First what adds work to the device's queue, and then the wait for the step before.
        callbacks.on_step_launched(position, result)
        run.reports.push(position, result)
        _end_step(job, position, evaluator.after(position))
        done = position.step
    return done


def _end_step(job: Job, position: Position, measured: Measured | None) -> None:
    """Call the hooks after an evaluation, if there was one, at the end of the run, and of each step."""
    callbacks = job.callbacks
    if measured is not None:
        callbacks.on_eval_end(position, measured)
        if job.course.ends_with(position.step) or callbacks.stop_reason:
            measured = replace(measured, is_last=True)
            job.run.reports.drain()
            callbacks.on_train_end(position, measured)
    callbacks.on_step_end(position, measured)
