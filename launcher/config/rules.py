"""The valid values of every key.

Owns the table of rules and their kinds. Pure; relations between keys are in `validation`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.config.messages import nearest, show, suggestion

SCHEDULES = ("constant", "linear", "cosine", "onecycle")
TRACKERS = ("wandb", "tensorboard", "trackio", "none")
PRECISIONS = ("fp32", "amp_fp16", "fp16", "pure_fp16", "bf16", "amp_bf16")
BLOCKS = "blocks"  # train.compile: each repeated block instead of the whole model


@dataclass(frozen=True)
class Rule:
    text: str
    holds: Callable[[Any], bool]
    nearest: Callable[[Any], Sequence[Any]] = lambda value: ()


def is_number(value: Any) -> bool:
    """Whether the value is a finite number within the range of a float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return (
        -sys.float_info.max <= value <= sys.float_info.max
    )  # works for any int; isfinite would convert it first


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_power_of_two(value: Any) -> bool:
    return is_whole(value) and value > 0 and value & (value - 1) == 0


def whole(low: int, high: int = 2**53) -> Rule:
    return Rule(
        f"a whole number of at least {low}",
        lambda value: is_whole(value) and low <= value <= high,
        lambda value: (high,) if is_whole(value) and value > high else (),
    )


def number(text: str, holds: Callable[[float], bool]) -> Rule:
    return Rule(f"a number {text}", lambda value: is_number(value) and holds(value))


def one_of(*choices: str) -> Rule:
    return Rule(
        f"one of {', '.join(choices)}",
        lambda value: isinstance(value, str) and value in choices,
        lambda value: nearest(show(value), choices),
    )


def optional(rule: Rule) -> Rule:
    return Rule(f"null or {rule.text}", lambda value: value is None or rule.holds(value), rule.nearest)


def auto_or(rule: Rule) -> Rule:
    return Rule(f"auto or {rule.text}", lambda value: value == "auto" or rule.holds(value), rule.nearest)


def flag_or(word: str) -> Rule:
    return Rule(
        f"true, false or {word}",
        lambda value: isinstance(value, bool) or value == word,
        lambda value: nearest(show(value), ("true", "false", word)),
    )


def power_of_two(high: int) -> Rule:
    return Rule(
        f"a power of two up to 2**{high.bit_length() - 1}",
        lambda value: is_power_of_two(value) and value <= high,
        lambda value: [power for power in surrounding_powers(value) if power <= high] or [high],
    )


def surrounding_powers(value: Any) -> Sequence[int]:
    if not (is_whole(value) or is_number(value)) or value < 1:
        return (1,)
    below = 1 << int(value).bit_length() - 1
    return (below, 2 * below)


def _has_giant(value: Any) -> bool:
    """Whether the value holds, at any depth, a whole number beyond the range of a float."""
    if isinstance(value, Mapping):
        return any(map(_has_giant, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_giant, value))
    return is_whole(value) and not is_number(value)


flag = Rule("true or false", lambda value: isinstance(value, bool))
name = Rule(
    "a name of letters, digits, '.', '_' and '-' that begins with a letter or digit",
    lambda value: isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is not None,
)
text = Rule(
    "a string without NUL characters",
    lambda value: isinstance(value, str) and value.strip() != "" and "\0" not in value,
)
sha256 = Rule(
    "a SHA-256 of 64 hexadecimal digits",
    lambda value: isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None,
)
texts = Rule(
    "a list of strings", lambda value: isinstance(value, list | tuple) and all(map(text.holds, value))
)
wandb_name = Rule(
    "a string of at most 128 characters without / \\ # ? % : and spaces around it",
    lambda value: (
        isinstance(value, str)
        and 0 < len(value) <= 128
        and value == value.strip()
        and not set(value) & set("/\\#?%:\0")
    ),
)
options = Rule(
    "a section with whole numbers below 2**1024",  # int to text is limited to 4,300 digits
    lambda value: (
        isinstance(value, dict) and all(isinstance(key, str) for key in value) and not _has_giant(value)
    ),
)
predivide = power_of_two(2**16)  # more would round even the largest fp16 gradients to zero
loss_scale = power_of_two(2**127)  # the largest in fp32
positive = number("above 0", lambda value: value > 0)
rate = number("above 0 and at most 1e30", lambda value: 0 < value <= 1e30)  # a step computes in fp32
seconds = number("above 0 and at most 1e9", lambda value: 0 < value <= 1e9)  # timers cannot wait longer
not_negative = number("of at least 0", lambda value: value >= 0)
share = number("from 0 to below 1", lambda value: 0 <= value < 1)
betas = Rule(
    "two numbers from 0 to below 1",
    lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(share.holds, value)),
)

no_compression = Rule(
    "none (PowerSGD, 1-bit and top-k keep an error-feedback buffer between steps, which one overflow under a "
    "dynamic loss scale corrupts; wire.dtype halves the bytes without such a buffer)",
    lambda value: value == "none",
)

trackers = Rule(
    f"one of {', '.join(TRACKERS)}, or a list of different ones without none",
    lambda value: (
        name.holds(value)
        if isinstance(value, str)
        else isinstance(value, list | tuple)
        and len(value) == len({*map(str, value)})
        and "none" not in value
        and len(value) > 0
        and all(map(name.holds, value))
    ),  # others than these are checked where recipe files are known
)
no_watch = Rule(
    "false (wandb.watch reads every gradient on the training thread, fp16 and still multiplied by the loss "
    "scale; telemetry.gradients_every_steps records where they lie without waiting for the device)",
    lambda value: value is False,
)

RULES: Mapping[str, Rule] = {
    "seed": whole(0, 2**63 - 1),
    "recipe.name": name,
    "recipe.uses": name,
    "run.dir": optional(text),
    "model.name": name,
    "model.sync_bn": flag,
    "model.weights": optional(text),
    "model.weights_strict": flag,
    "model.weights_sha256": optional(sha256),
    "model.options": options,
    "data.name": name,
    "data.path": optional(text),
    "data.batch_size": whole(1),
    "data.micro_batch": optional(auto_or(whole(1))),
    "data.val_fraction": number("at least 0 and below 1", lambda value: 0 <= value < 1),
    "data.workers": auto_or(whole(0, 1024)),
    "data.max_bad": whole(0),
    "data.drop_last": flag,
    "data.augment.crop_padding": whole(0),
    "data.augment.flip": flag,
    "data.augment.mixup": number("from 0 to 1000", lambda value: 0 <= value <= 1000),
    "data.options": options,
    "train.epochs": whole(1),
    "train.max_steps": optional(whole(1)),
    "train.eval_every_epochs": whole(1),
    "train.eval_every_steps": optional(whole(1)),
    "train.log_every_steps": whole(1),
    "train.on_oom": one_of("halve", "stop"),
    "train.compile": flag_or(BLOCKS),
    "train.cuda_graph": auto_or(flag),
    "train.channels_last": auto_or(flag),
    "train.label_smoothing": share,
    "train.deterministic": flag,
    "train.tf32": flag,
    "optim.name": name,  # one of OPTIMIZERS, or of a recipe file's
    "optim.lr": rate,
    "optim.momentum": share,
    "optim.nesterov": flag,
    "optim.betas": betas,
    "optim.alpha": share,
    "optim.eps": positive,
    "optim.weight_decay": not_negative,
    "optim.clip_norm": optional(positive),
    "optim.groups": Rule("a list of groups", lambda value: isinstance(value, list | tuple)),
    "optim.decay_vectors": flag,
    "optim.options": options,
    "optim.layer_decay": optional(number("above 0 and at most 1", lambda value: 0 < value <= 1)),
    "schedule.name": name,  # one of SCHEDULES, or of a recipe file's
    "schedule.warmup_fraction": share,
    "schedule.base_batch": optional(whole(1)),
    "ema.decay": optional(share),
    "ema.every_steps": whole(1),
    "early_stopping.patience": optional(whole(1)),
    "early_stopping.min_delta": not_negative,
    "early_stopping.metric": optional(text),
    "precision.name": one_of(*PRECISIONS),
    "precision.emulate": auto_or(flag),
    "precision.fp32_modules": texts,
    "precision.rescue": flag,
    "precision.max_rescues": whole(1),
    "precision.scale.mode": one_of("dynamic", "static", "none", "auto"),
    "precision.scale.init": loss_scale,
    "precision.scale.growth_interval": whole(1),
    "precision.scale.hysteresis": whole(1),
    "precision.scale.min": loss_scale,
    "precision.scale.max": loss_scale,
    "precision.scale.max_bad_losses": whole(1),
    "precision.scale.max_floor_skips": whole(1),
    "wire.dtype": one_of("auto", "fp16", "bf16", "fp32"),
    "wire.sum": one_of("native", "fp32"),
    "wire.shard": flag,
    "wire.compression": no_compression,
    "wire.bucket_mb": auto_or(positive),
    "wire.overlap": flag,
    "wire.predivide": auto_or(predivide),
    "checkpoint.every_steps": optional(whole(1)),
    "checkpoint.every_s": optional(seconds),
    "checkpoint.keep": whole(1),
    "checkpoint.resume": text,
    "checkpoint.on_error": one_of("warn", "stop"),
    "consistency.every_steps": optional(whole(1)),
    "tracker.name": trackers,
    "tracker.project": wandb_name,
    "tracker.mode": one_of("auto", "online", "offline"),
    "tracker.group": optional(text),
    "tracker.tags": texts,
    "tracker.entity": optional(wandb_name),
    "tracker.run_name": optional(text),
    "tracker.run_id": optional(wandb_name),
    "tracker.notes": optional(text),
    "tracker.artifacts": one_of("none", "last", "best"),
    "tracker.watch": no_watch,
    "telemetry.nvml": auto_or(flag),
    "telemetry.gradients_every_steps": optional(whole(0)),
    "launch.nproc": auto_or(whole(1)),
    "launch.max_restarts": whole(0),
    "launch.init_timeout_s": seconds,
    "launch.stall_s": seconds,
    "launch.grace_s": seconds,
    "launch.preempt_signals": one_of("auto", "save", "stop"),
    "launch.log_level": one_of("debug", "info", "warning", "error"),
    "recipes.path": optional(text),
}


def value_problem(path: str, value: Any, rule: Rule) -> str:
    return f"{path}={show(value)}: must be {rule.text}.{suggestion(map(show, rule.nearest(value)))}"
