"""Turns the resolved config into what a job is made of: model and stepper.

Owns every translation from config words to engine values. What is printed of the choices is in `decisions`.
"""

from __future__ import annotations

import pkgutil
from typing import Any, cast

import torch
from torch import nn

from launcher.config.constraints import SCHEDULES
from launcher.config.optimizers import OPTIMIZERS, OptimConfig
from launcher.config.schema import Config
from launcher.data.batch_plan import BatchPlan
from launcher.distributed.env import WorkerEnv
from launcher.engine import (
    SGD,
    AdamW,
    DDPOptions,
    ExponentialMovingAverage,
    Policy,
    Scaling,
    SkipOutliers,
    Stepper,
    TorchOptimizer,
)
from launcher.engine.errors import UnusableError
from launcher.errors import ConfigError
from launcher.recipe.contract import Recipe
from launcher.recipe.registry import look_up, registry_of
from launcher.trainer.builders import lr_schedule, parameter_groups
from launcher.trainer.builders.activation_checkpointing import checkpoint_activations
from launcher.trainer.builders.sync_batchnorm import synchronised

GRADIENT_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def build_model(config: Config, recipe: Recipe, env: WorkerEnv, plan: BatchPlan) -> nn.Module:
    """The recipe's model on the device, its batch norms synchronised if asked for. A collective then."""
    built: object = recipe.build_model()
    if not isinstance(built, nn.Module):
        raise ConfigError(f"the recipe's build_model returned {built!r}: it must return an nn.Module.")
    model = built.to(env.device)
    if uses_channels_last(config, env, model):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.model.sync_bn and env.group is not None:
        model = synchronised(model, env, plan)
    if config.train.activation_checkpointing:
        checkpoint_activations(model)
    return model


def uses_channels_last(config: Config, env: WorkerEnv, model: nn.Module) -> bool:
    """Whether images and convolutions of `model` are in channels_last: train.channels_last."""
    asked = config.train.channels_last
    wanted = env.device.type == "cuda" if asked == "auto" else asked is True  # on a CPU it is slower
    return wanted and any(parameter.ndim == 4 for parameter in model.parameters())


def build_optimizer(optim: OptimConfig, recipes: str | None) -> SGD | AdamW | TorchOptimizer:
    """The optimizer that the config names, which the file `recipes` may have registered."""
    if optim.name not in OPTIMIZERS:
        names = dict.fromkeys(OPTIMIZERS) | dict(registry_of(recipes).optimizers)
        # TorchOptimizer refuses what is no such class.
        return TorchOptimizer(look_up("optim.name", optim.name, names), optim.lr, **optim.options)
    known = OPTIMIZERS[optim.name]
    kind: Any = pkgutil.resolve_name(known.place)
    if not known.is_fused:
        return TorchOptimizer(kind, optim.lr, **optim.options)
    built: SGD | AdamW = kind(optim.lr, **optim.options)
    return built


def build_scaling(config: Config) -> Scaling:
    scale = config.precision.loss_scale
    if Policy.named(config.precision.name).arithmetic != torch.float16:
        return Scaling(mode="none")  # only fp16 needs one for its range
    return Scaling(
        mode=scale.mode,
        init=scale.init_scale,
        growth_interval=scale.growth_interval,
        hysteresis=scale.hysteresis,
        min=scale.min_scale,
        max=scale.max_scale,
    )


def bucket_bytes(bucket_mb: float | str) -> int:
    """Any size above 0 is allowed: the smallest bucket holds one parameter."""
    return min(max(1, int(float(bucket_mb) * 2**20)), 2**53)


def build_ddp(config: Config, env: WorkerEnv) -> DDPOptions:
    ddp = config.ddp
    return DDPOptions(
        gradient_dtype=None if ddp.gradient_dtype == "auto" else GRADIENT_DTYPES[ddp.gradient_dtype],
        bucket_bytes=None if ddp.bucket_cap_mb == "auto" else bucket_bytes(ddp.bucket_cap_mb),
        overlap=ddp.overlap and not shares_communicator(config, env),
        gradient_predivide_factor=(
            None if ddp.gradient_predivide_factor == "auto" else int(ddp.gradient_predivide_factor)
        ),
        shard_optimizer=ddp.shard_optimizer,
    )


def shares_communicator(config: Config, env: WorkerEnv) -> bool:
    """Whether synchronised batch norms use the communicator of the gradients.

    Gradients are then reduced after the backward pass: a rank with unused parameters sends its buckets later,
    and would call collectives in another order than other ranks.
    """
    return config.model.sync_bn and env.group is not None


def lr_table(config: Config, recipe: Recipe, total_steps: int) -> list[float]:
    """One learning rate per applied step, of the recipe's own schedule where it has one."""
    peak, schedule = peak_lr(config), config.schedule
    if recipe.schedule is not None:
        return lr_schedule.custom_lr_table(recipe.schedule, named_schedule(config), peak, total_steps)
    return lr_schedule.learning_rates(schedule.name, peak, total_steps, schedule.warmup_fraction)


def peak_lr(config: Config) -> float:
    """optim.lr; scaled with the batch where schedule.lr_base_batch_size says for which one it is.

    The linear rule of Goyal et al., 2017 (arXiv:1706.02677, section 2.1).
    """
    base = config.schedule.lr_base_batch_size
    return config.optim.lr if base is None else config.optim.lr * config.data.batch_size / base


def named_schedule(config: Config) -> str:
    """What to call a recipe's own schedule."""
    name = config.schedule.name
    return "the recipe's schedule" if name in SCHEDULES else f"schedule.name={name}"


def build_stepper(
    config: Config, env: WorkerEnv, recipe: Recipe, model: nn.Module, plan: BatchPlan, rates: list[float]
) -> Stepper:
    """The Stepper of the config; `rates` are those of `lr_table`. A collective."""
    optim, emulate = config.optim, config.precision.emulate
    deviations, window = config.precision.skip_outliers, config.precision.outlier_window
    groups, _ = parameter_groups.parameter_groups(optim, recipe.groups, model)
    stepper = Stepper(
        model,
        build_optimizer(optim, config.recipes.path),
        Policy.named(config.precision.name),
        env.group,
        scaling=build_scaling(config),
        ddp=build_ddp(config, env),
        clip_norm=optim.clip_norm,
        learning_rates=rates,
        micro_batches=plan.own_micro_batches,
        emulate=None if emulate == "auto" else bool(emulate),
        groups=groups,
        skip_outliers=None if deviations is None else SkipOutliers(deviations, window),
    )
    try:
        stepper.compute_in_fp32(config.precision.fp32_modules)
    except UnusableError as error:
        raise ConfigError(f"precision.fp32_modules: {error}") from error
    return stepper


def compiled(model: nn.Module, stepper: Stepper) -> nn.Module:
    """The model as one graph, which keeps all rounding of half arithmetic that is emulated."""
    options: dict[str, Any] = {"emulate_precision_casts": stepper.emulation.used}
    return cast(nn.Module, torch.compile(model, options=options))


def weight_average(config: Config, stepper: Stepper) -> ExponentialMovingAverage | None:
    """The average of the weights that the config asks for."""
    ema = config.ema
    return None if ema.decay is None else ExponentialMovingAverage(stepper, ema.decay, ema.every_steps)
