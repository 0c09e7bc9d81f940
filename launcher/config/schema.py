"""The typed config of a run: each key with the type that is also its constraint.

Owns the keys of a config, its JSON form, and walks over its keys. What a key means stands in conf/, where
users read it. What values must be is in `constraints`, relations between keys in `validation`.
Never imports torch or Hydra.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from launcher.config import constraints as must_be
from launcher.config.codec import FLAT, decoded, encoded
from launcher.config.constraints import Constraint, Name, NotNegative, Positive, Share, constraint_of
from launcher.config.optimizers import OPTION_CONSTRAINTS, OptimConfig

Auto = Literal["auto"]
Text = Annotated[str, must_be.text]
Texts = Annotated[tuple[str, ...], must_be.list_of(must_be.text, "a list of strings")]
Sha256 = Annotated[str, must_be.matching("a SHA-256 of 64 hexadecimal digits", r"[0-9a-f]{64}")]
_wandb_name = must_be.string(
    "a string of at most 128 characters without / \\ # ? % : and spaces around it",
    lambda value: 0 < len(value) <= 128 and value == value.strip() and not set(value) & set("/\\#?%:\0"),
)
WandbName = Annotated[str, _wandb_name]
Trackers = Annotated[str | list[str], must_be.trackers]
Count = Annotated[int, must_be.whole(1)]
CountOrZero = Annotated[int, must_be.whole(0)]
Endpoint = Annotated[str, must_be.matching("HOST:PORT", r"\S+:\d{1,5}")]
# Timers cannot wait longer than 1e9 s.
Seconds = Annotated[float, must_be.number("above 0 and at most 1e9", lambda value: 0 < value <= 1e9)]
LossScale = Annotated[int, must_be.power_of_two(2**127)]  # the largest in fp32
# More would round even the largest fp16 gradients to zero.
PredivideFactor = Annotated[int, must_be.power_of_two(2**16)]


@dataclass(frozen=True)
class RecipeConfig:
    name: Name
    uses: Name
    # The arguments of the recipe's function, as its file or its YAML lists them.
    options: dict[str, Any] = field(default_factory=dict, metadata=FLAT)


@dataclass(frozen=True)
class RunConfig:
    """`dir` is null in YAML, and an empty string here, until rank 0 has chosen a directory."""

    dir: Annotated[str, must_be.either(must_be.null, must_be.text)]


@dataclass(frozen=True)
class ModelConfig:
    name: Name | None
    sync_bn: bool
    init_from: Text | None
    init_from_strict: bool
    init_from_sha256: Sha256 | None
    options: dict[str, Any] = field(metadata=FLAT)  # the model's own keys, as its YAML lists them


@dataclass(frozen=True)
class AugmentConfig:
    random_crop_padding: CountOrZero
    random_horizontal_flip: bool


@dataclass(frozen=True)
class DataConfig:
    name: Name | None
    path: Text | None
    batch_size: Count
    micro_batch_size: Auto | Count | None
    share: Annotated[str | list[float], must_be.either(must_be.one_of("equal", "auto"), must_be.shares)]
    val_fraction: Share
    num_workers: Auto | Annotated[int, must_be.whole(0, 1024)]
    max_bad_samples: CountOrZero
    drop_last: bool
    augment: AugmentConfig
    options: dict[str, Any] = field(metadata=FLAT)  # the data set's own keys, as its YAML lists them


DEFAULT_EPOCHS = 10  # of a run for which neither train.epochs nor train.max_steps is given


@dataclass(frozen=True)
class TrainConfig:
    epochs: Count | None
    max_steps: Count | None
    eval_every_epochs: Count
    eval_every_steps: Count | None
    log_every_steps: Count
    on_oom: Literal["halve", "stop"]
    compile: bool
    activation_checkpointing: bool
    channels_last: Auto | bool
    label_smoothing: Share
    deterministic: bool
    tf32: bool

    def total_steps(self, steps_per_epoch: int) -> int:
        """Updates of the whole run, skipped ones included: the first of both lengths that is reached."""
        if self.epochs is None and self.max_steps is not None:
            return self.max_steps
        steps = steps_per_epoch * (self.epochs or DEFAULT_EPOCHS)
        return min(steps, self.max_steps or steps)


@dataclass(frozen=True)
class ScheduleConfig:
    name: Name
    warmup_fraction: Share
    lr_base_batch_size: Count | None


@dataclass(frozen=True)
class LossScaleConfig:
    mode: Literal["dynamic", "static", "none"]
    init_scale: LossScale
    growth_interval: Count
    hysteresis: Count
    min_scale: LossScale
    max_scale: LossScale
    max_bad_losses: Count
    max_skips_at_min_scale: Count


@dataclass(frozen=True)
class EarlyStoppingConfig:
    patience: Count | None
    min_delta: NotNegative
    metric: Text | None


@dataclass(frozen=True)
class ReduceLROnPlateauConfig:
    factor: Annotated[float, must_be.number("above 0 and below 1", lambda value: 0 < value < 1)] | None
    patience: CountOrZero
    threshold: Share
    metric: Text | None


@dataclass(frozen=True)
class EmaConfig:
    decay: Share | None
    every_steps: Count


@dataclass(frozen=True)
class PrecisionConfig:
    name: Literal["fp32", "amp_fp16", "fp16", "pure_fp16", "bf16", "amp_bf16"]
    emulate: Auto | bool
    fp32_modules: Texts
    fp32_fallback: bool
    max_fp32_fallbacks: Count
    skip_outliers: Positive | None
    outlier_window: Annotated[int, must_be.whole(8)]
    loss_scale: LossScaleConfig


@dataclass(frozen=True)
class DdpConfig:
    gradient_dtype: Literal["auto", "fp16", "bf16", "fp32"]
    shard_optimizer: bool
    bucket_cap_mb: Auto | Positive
    overlap: bool
    gradient_predivide_factor: Auto | PredivideFactor
    check_replicas_every_steps: Count | None


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: Count | None
    every_s: Seconds | None
    keep: Count
    resume: Text
    allow_other_data: bool
    on_error: Literal["warn", "stop"]


@dataclass(frozen=True)
class TrackerConfig:
    name: Trackers
    project: WandbName
    mode: Literal["auto", "online", "offline"]
    group: Text | None
    tags: Texts
    entity: WandbName | None
    run_name: Text | None
    run_id: WandbName | None
    notes: Text | None

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers; () without one."""
        names = (self.name,) if isinstance(self.name, str) else tuple(self.name)
        return () if names == ("none",) else names


@dataclass(frozen=True)
class TelemetryConfig:
    gpu_stats: Auto | bool
    gradient_histogram_every_steps: CountOrZero | None


@dataclass(frozen=True)
class LaunchConfig:
    nproc: Auto | Count
    nnodes: Auto | Count
    node_rank: Auto | CountOrZero
    rdzv_endpoint: Endpoint | None
    max_restarts: CountOrZero
    init_timeout_s: Seconds
    hang_timeout_s: Seconds
    user_code_timeout_s: Seconds | None
    grace_s: Seconds
    preempt_signals: Literal["auto", "save", "stop"]
    log_level: Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True)
class SweepStopConfig:
    max_trials: Count | None


@dataclass(frozen=True)
class SweepConfig:
    launcher: Literal["devices", "slurm"]
    name: Literal["grid", "random", "tpe"]
    parallel: Auto | Count
    jobs_per_gpu: Count
    on_failure: Literal["continue", "stop"]
    retries: CountOrZero
    prune: Literal["none", "asha"]
    grace_period: Count
    keep_pruned: bool
    stop: SweepStopConfig
    resume: Text


@dataclass(frozen=True)
class RecipesConfig:
    path: Text | None


@dataclass(frozen=True)
class Config:
    """The whole config of a run after all checks, one field per group of `conf/`."""

    seed: Annotated[int, must_be.whole(0, 2**63 - 1)]
    recipe: RecipeConfig
    run: RunConfig
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    ema: EmaConfig
    early_stopping: EarlyStoppingConfig
    reduce_lr_on_plateau: ReduceLROnPlateauConfig
    precision: PrecisionConfig
    ddp: DdpConfig
    checkpoint: CheckpointConfig
    tracker: TrackerConfig
    telemetry: TelemetryConfig
    launch: LaunchConfig
    sweep: SweepConfig
    recipes: RecipesConfig


def to_dict(config: Config) -> dict[str, Any]:
    """The config as JSON values, with the keys that users type; the inverse of `from_dict`."""
    return encoded(config)


def from_dict(values: Mapping[str, object]) -> Config:
    """The config from values known to be valid: from `to_dict`, or checked in `validation`."""
    return decoded(Config, values)


@cache
def types_of(kind: Any) -> dict[str, object]:
    """The type of each key of a section, with its constraint. Evaluating its text takes 0.1 ms."""
    types = get_type_hints(kind, include_extras=True)
    return {each.name: types[each.name] for each in fields(kind) if "flat" not in each.metadata}


def has_options(kind: Any) -> bool:
    """Whether a section may have keys that its class does not name: those of one recipe, model, ..."""
    return any("flat" in each.metadata for each in fields(kind))


def options_of(section: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """The keys of a section that its class collects as `options`, with their values."""
    return {key: value for key, value in section.items() if key not in types_of(kind)}


@cache
def constraints() -> Mapping[str, Constraint]:
    """The constraint of each key, by its dotted path; those of all built-in optimizers."""
    of_optimizers = {f"optim.{key}": each for key, each in OPTION_CONSTRAINTS.items()}
    return dict(_constraints(types_of(Config), "")) | of_optimizers


def _constraints(kinds: Mapping[str, object], prefix: str) -> Iterator[tuple[str, Constraint]]:
    for key, kind in kinds.items():
        if is_dataclass(kind):
            yield from _constraints(types_of(kinds[key]), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", constraint_of(kind)


def leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted path and value of each leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def paths_of(values: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """The dotted path of every key of the tree, sections included."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from paths_of(value, f"{prefix}{key}.")


def value_at(values: object, path: str) -> object:
    """The value at a dotted path; None where there is none."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def typed_leaves(tree: Mapping[str, object]) -> dict[str, str]:
    """The values of `leaves` as users type them, by dotted path."""
    return {key: "null" if value is None else str(value) for key, value in leaves(tree)}
