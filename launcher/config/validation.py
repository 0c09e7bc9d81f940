"""Validation of a whole config.

Owns the checks of keys, values and relations between keys; reports all problems, not just the first. Pure:
touches neither files nor environment, and never imports torch or Hydra.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from launcher.config.constraints import OUTLIER_WINDOW, value_problem
from launcher.config.messages import show, summary, unknown_key
from launcher.config.optimizers import (
    OPTIMIZERS,
    OPTION_CONSTRAINTS,
    OptimConfig,
    completed,
    group_problems,
    is_fused,
)
from launcher.config.schema import (
    DEFAULT_EPOCHS,
    Config,
    constraints,
    from_dict,
    has_options,
    options_of,
    types_of,
    value_at,
)
from launcher.errors import ConfigError


def parse(tree: Mapping[str, Any]) -> Config:
    """The typed config of a composed YAML tree; raises one ConfigError with all its problems."""
    config, problems = checked(tree)
    if problems:
        raise ConfigError(summary(problems))
    assert config is not None
    return config


def checked(tree: Mapping[str, Any]) -> tuple[Config | None, list[str]]:
    """The typed config of a composed YAML tree, or one line for each of its problems.

    Relations between keys are checked where each value by itself is valid.
    """
    if problems := find_problems(tree):
        return None, problems
    config = from_dict({**tree, "optim": completed(tree["optim"]), "run": {"dir": tree["run"]["dir"] or ""}})
    return config, [*relation_problems(config)]


def find_problems(tree: Mapping[str, Any]) -> list[str]:
    """One line per missing, unknown or wrong key of a tree."""
    if wrong_keys := list(key_problems(tree, types_of(Config), "")):
        return wrong_keys
    optim, skipped = tree["optim"], {f"optim.{key}" for key in OPTION_CONSTRAINTS}
    if (built_in := OPTIMIZERS.get(str(optim["name"]))) is not None:  # another one checks its options
        options, known = options_of(optim, OptimConfig), dict.fromkeys(built_in.keys)
        if wrong_keys := list(key_problems(options, known, "optim.")):
            return wrong_keys
        skipped -= {f"optim.{key}" for key in known}
    values = ((path, value_at(tree, path), its) for path, its in constraints().items() if path not in skipped)
    wrong = [value_problem(path, value, its) for path, value, its in values if not its.is_valid(value)]
    return [*wrong, *group_problems(optim["groups"])]


def key_problems(
    values: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str, open_ended: bool = False
) -> Iterator[str]:
    """The keys that are missing, and the unknown ones unless the section is `open_ended`."""
    for key in () if open_ended else values.keys() - kinds.keys():
        yield unknown_key(f"{prefix}{key}", f"{prefix}{key}", [f"{prefix}{name}" for name in kinds])
    for key, kind in kinds.items():
        path = f"{prefix}{key}"
        if key not in values:
            group = path.partition(".")[0]
            yield (
                f"{path}: the key is missing. A file of your own in {group}/ inherits it from another one of "
                "the group with `defaults: [NAME, _self_]` at its top."
            )
        elif is_dataclass(kind):
            if isinstance(values[key], Mapping):
                yield from key_problems(values[key], types_of(kinds[key]), f"{path}.", has_options(kind))
            else:
                yield f"{path}={show(values[key])}: must be a section with keys of its own."


def relation_problems(config: Config) -> Iterator[str]:
    """One line for each rule about several keys that the config breaks. Those of the engine are its own."""
    yield from _arithmetic_problems(config)
    yield from _batch_problems(config)
    yield from _evaluation_problems(config)


def _arithmetic_problems(config: Config) -> Iterator[str]:
    """The broken rules about precision, optimizer, weights and compilation."""
    precision, train, model = config.precision, config.train, config.model
    compiles = f"train.compile={show(train.compile)}"
    scale, optim = precision.loss_scale, config.optim
    if not scale.min_scale <= scale.init_scale <= scale.max_scale:
        yield (
            f"precision.loss_scale.init_scale={scale.init_scale}: must lie between "
            f"precision.loss_scale.min_scale={scale.min_scale} and max_scale={scale.max_scale}."
        )
    if not is_fused(optim.name):
        excluded = f"excludes optim={optim.name}, which needs"
        if config.ddp.shard_optimizer:
            yield f"ddp.shard_optimizer=true: {excluded} whole parameters. Use optim=sgd or adamw."
        if precision.name == "pure_fp16":
            yield f"precision=pure_fp16: {excluded} fp32 masters. Use optim=sgd or adamw."
    if optim.options.get("nesterov") and not optim.options.get("momentum"):
        yield "optim.nesterov=true: needs optim.momentum above 0. Set it, or optim.nesterov=false."
    if model.init_from_sha256 is not None and model.init_from is None:
        yield "model.init_from_sha256: is that of a file, but model.init_from names none. Give it, too."
    if train.activation_checkpointing and train.compile:
        yield (
            f"train.activation_checkpointing=true: excludes {compiles}, whose graphs decide themselves what "
            "they recompute."
        )
    if train.compile and model.sync_bn:
        yield f"model.sync_bn=true: excludes {compiles}, because its collectives cannot be compiled."
    for key in ("fp32_modules", "fp32_fallback"):
        if train.compile and (value := getattr(precision, key)):
            yield (
                f"precision.{key}={show(value)}: excludes {compiles}, because a compiled graph would not run "
                "the hooks that change the arithmetic."
            )
    if precision.outlier_window != OUTLIER_WINDOW and precision.skip_outliers is None:
        yield (
            f"precision.outlier_window={precision.outlier_window}: is the window of precision.skip_outliers, "
            "which is null: nothing is skipped. Give the number of deviations: precision.skip_outliers=6."
        )


def _batch_problems(config: Config) -> Iterator[str]:
    """The broken rules about micro-batches and the ranks' shares of a batch."""
    data, sync_bn = config.data, "model.sync_bn=true"
    if config.model.sync_bn and data.micro_batch_size == "auto":
        yield (
            f"{sync_bn}: excludes data.micro_batch_size=auto, because a rank that runs out of memory in a "
            "trial would leave the others waiting in the batch norms. Give data.micro_batch_size a number."
        )
    if data.share == "auto" and config.model.sync_bn:
        yield (
            f"data.share=auto: excludes {sync_bn}, because ranks with other shares make another number of "
            "forward passes, each of which waits for the others. Use data.share=equal."
        )
    if data.share == "auto" and config.train.deterministic:
        yield (
            "data.share=auto: excludes train.deterministic=true, because measured times decide which samples "
            "a rank adds up. Give fixed shares, such as data.share=[0.75,0.25]."
        )
    if not isinstance(data.share, str) and not _are_shares_of(data.batch_size, data.share):
        yield (
            f"data.share={show(data.share)}: must be the samples of each rank, whole numbers that sum to "
            f"data.batch_size={data.batch_size}, or fractions that sum to 1."
        )


def _evaluation_problems(config: Config) -> Iterator[str]:
    """The broken rules about what evaluations decide."""
    data, train = config.data, config.train
    plateau, schedule = config.reduce_lr_on_plateau.factor, config.schedule
    if plateau is not None and (schedule.name != "constant" or schedule.warmup_fraction > 0):
        yield (
            f"reduce_lr_on_plateau.factor={plateau}: excludes schedule={schedule.name} with "
            f"schedule.warmup_fraction={schedule.warmup_fraction}, which sets the rate of each step. Use "
            "schedule=constant without warm-up."
        )
    # Each of these decides by evaluations within a run. With that at its end alone nothing would ever happen.
    for key, value in (
        ("early_stopping.patience", config.early_stopping.patience),
        ("reduce_lr_on_plateau.factor", plateau),
        ("sweep.prune", config.sweep.prune),
    ):
        if value in (None, "none"):
            continue
        if data.val_fraction == 0:
            yield f"{key}={value}: needs evaluations, and data.val_fraction=0 holds nothing out for them."
        elif _evaluates_only_at_the_end(config):
            yield (
                f"{key}={value}: needs evaluations during a run, and "
                f"train.eval_every_epochs={train.eval_every_epochs} of train.epochs={show(train.epochs)} "
                "leaves only that at its end. Evaluate more often: train.eval_every_steps=N."
            )


def _are_shares_of(batch_size: int, share: Sequence[float]) -> bool:
    total = math.fsum(share)
    if abs(total - 1) <= 1e-6:  # of fractions such as [0.333333,0.666667]
        return True
    return total == batch_size and all(each == int(each) for each in share)


def _evaluates_only_at_the_end(config: Config) -> bool:
    train = config.train
    if train.eval_every_steps is not None or (train.max_steps and not train.epochs):
        return False
    return train.eval_every_epochs >= (train.epochs or DEFAULT_EPOCHS)
