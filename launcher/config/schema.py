"""The typed config of a run.

Owns the keys of a config and its JSON form. `rules` and `validation` define the valid values, `composition`
reads them. Never imports torch or Hydra.
"""

from __future__ import annotations

import types
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class RecipeConfig:
    name: str  # the user's choice, and the folder of its runs: resnet18
    uses: str  # the name in the registry of recipes: resnet


@dataclass(frozen=True)
class RunConfig:
    dir: str  # resolved by the leader before any worker sees it


@dataclass(frozen=True)
class ModelConfig:
    name: str
    sync_bn: bool  # BatchNorm statistics over the samples of all ranks in training
    weights: str | None  # a safetensors file that a new run starts from
    weights_strict: bool  # refuse a file that lacks tensors of the model, or has others
    weights_sha256: str | None  # of that file; null: any
    options: dict[str, Any]  # the model's own keys, as its YAML lists them


@dataclass(frozen=True)
class AugmentConfig:
    crop_padding: int  # pixels added on each side before a random crop; 0: none
    flip: bool  # mirror horizontally with probability 1/2
    mixup: float = 0.0  # alpha of the Beta distribution of the shares; 0: none


@dataclass(frozen=True)
class DataConfig:
    name: str
    path: str | None
    batch_size: int  # GLOBAL: samples per update over all ranks and micro-batches
    micro_batch: (
        str | int | None
    )  # per rank and forward; null: batch_size / world; auto: the largest that fits
    val_fraction: float  # share held out where the data set has no split of its own; 0: none
    workers: str | int  # auto or processes per rank that read samples; sets in memory need none
    max_bad: int  # samples that may be left out because they cannot be read, over all ranks
    drop_last: bool  # leave the last, smaller batch of an epoch out
    augment: AugmentConfig
    options: dict[str, Any]  # the data set's own keys, as its YAML lists them


@dataclass(frozen=True)
class TrainConfig:
    epochs: int
    max_steps: int | None
    eval_every_epochs: int
    eval_every_steps: int | None  # also after every so many steps; null: after epochs only
    log_every_steps: int
    on_oom: str  # halve the micro-batch of all ranks once, or stop the run
    compile: str | bool  # blocks: each repeated block instead of the whole model
    cuda_graph: str | bool  # auto: where the run can be captured
    channels_last: str | bool  # auto: on CUDA
    label_smoothing: float  # probability that is spread over all classes, in training
    deterministic: bool
    tf32: bool

    def total_steps(self, steps_per_epoch: int) -> int:
        """Updates of the whole run, skipped ones included."""
        steps = steps_per_epoch * self.epochs
        return min(steps, self.max_steps or steps)


@dataclass(frozen=True)
class GroupConfig:
    """Parameters with rates of their own; the first group that matches a parameter has it."""

    match: tuple[str, ...]  # patterns of names, as of fnmatch
    lr_scale: float  # times optim.lr
    weight_decay: float | None  # null: optim.weight_decay
    frozen: bool


@dataclass(frozen=True)
class SgdConfig:
    name: str
    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float
    clip_norm: float | None
    groups: tuple[GroupConfig, ...]
    decay_vectors: bool
    layer_decay: float | None


@dataclass(frozen=True)
class AdamWConfig:
    name: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float | None
    groups: tuple[GroupConfig, ...]
    decay_vectors: bool
    layer_decay: float | None


@dataclass(frozen=True)
class AdamConfig:
    """Adam, NAdam and RAdam of torch.optim; weight decay is added to the gradient."""

    name: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float | None
    groups: tuple[GroupConfig, ...]
    decay_vectors: bool
    layer_decay: float | None


@dataclass(frozen=True)
class RmspropConfig:
    name: str
    lr: float
    alpha: float
    eps: float
    momentum: float
    weight_decay: float
    clip_norm: float | None
    groups: tuple[GroupConfig, ...]
    decay_vectors: bool
    layer_decay: float | None


@dataclass(frozen=True)
class AdagradConfig:
    name: str
    lr: float
    eps: float
    weight_decay: float
    clip_norm: float | None
    groups: tuple[GroupConfig, ...]
    decay_vectors: bool
    layer_decay: float | None


@dataclass(frozen=True)
class OwnOptimConfig:
    """An optimizer that a recipe file registers."""

    name: str
    lr: float
    clip_norm: float | None
    groups: tuple[GroupConfig, ...]
    decay_vectors: bool
    layer_decay: float | None
    options: dict[str, Any]  # its own keys, which its constructor is given

    @property
    def weight_decay(self) -> float:
        """That of parameters whose group has none."""
        return float(self.options.get("weight_decay", 0.0))


OptimConfig = SgdConfig | AdamWConfig | AdamConfig | RmspropConfig | AdagradConfig | OwnOptimConfig


@dataclass(frozen=True)
class ScheduleConfig:
    name: str  # constant, linear, cosine, onecycle
    warmup_fraction: float
    base_batch: int | None  # the batch that optim.lr is for; null: any


@dataclass(frozen=True)
class ScaleConfig:
    mode: str  # dynamic, static, none, auto (dynamic, from a start found by one dry backward)
    init: int  # powers of two
    growth_interval: int
    hysteresis: int
    min: int
    max: int
    max_bad_losses: int  # non-finite losses in a row that end the run
    max_floor_skips: int  # overflows in a row at the smallest scale that end the run


@dataclass(frozen=True)
class EarlyStoppingConfig:
    """When a run ends before its last step."""

    patience: int | None  # evaluations in a row without an improvement; null: never
    min_delta: float  # that an improvement must exceed
    metric: str | None  # null: the one that runs are compared by


@dataclass(frozen=True)
class EmaConfig:
    """An exponential moving average of the weights."""

    decay: float | None  # per applied step; null: none
    every_steps: int  # steps from one pass over the weights to the next


@dataclass(frozen=True)
class PrecisionConfig:
    name: str  # fp32, amp_fp16, fp16, pure_fp16, bf16, amp_bf16
    emulate: str | bool  # auto: where the processor has no such arithmetic
    fp32_modules: tuple[str, ...]  # patterns of names of modules that compute in fp32
    rescue: bool  # add those whose outputs leave the range of fp16 in training
    max_rescues: int
    scale: ScaleConfig


@dataclass(frozen=True)
class WireConfig:
    dtype: str  # auto, fp16, bf16, fp32
    sum: str  # native: in the wire's dtype; fp32: exchanged in half, summed in fp32, rounded once
    shard: bool  # masters and optimizer states divided among the ranks
    compression: str  # none; everything else is refused with the reason
    bucket_mb: str | float  # auto or MB
    overlap: bool
    predivide: str | int  # auto or a power of two


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int | None
    every_s: float | None  # seconds after the last one; null in both: only at the end and when stopped
    keep: int  # the newest so many, and the best
    resume: str  # auto: resume if run.dir holds a checkpoint; never; the path of a checkpoint or run
    on_error: str  # warn: continue where one cannot be written; stop


@dataclass(frozen=True)
class ConsistencyConfig:
    every_steps: int | None  # compare the ranks' replicas, bit by bit; null: only where it must be


@dataclass(frozen=True)
class TrackerConfig:
    name: str | list[str]  # wandb, tensorboard, trackio, none, one of a recipe file, or a list of them
    project: str
    mode: str  # auto, online, offline
    group: str | None
    tags: tuple[str, ...]
    entity: str | None  # null: that of the API key
    run_name: str | None  # null: <recipe>-<name of the run's directory>
    run_id: str | None  # null: a new one, kept when the run resumes
    notes: str | None
    artifacts: str  # none, last, best: the checkpoint that is uploaded at the end
    watch: bool  # refused, with the reason

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers; () without one."""
        names = (self.name,) if isinstance(self.name, str) else tuple(self.name)
        return () if names == ("none",) else names


@dataclass(frozen=True)
class TelemetryConfig:
    nvml: str | bool  # auto: where the run uses GPUs and there is a driver; true: a missing one is a warning
    gradients_every_steps: int | None  # their exponents over the range of fp16; null or 0: never


@dataclass(frozen=True)
class LaunchConfig:
    nproc: str | int  # auto: all GPUs of this machine, one process where there are fewer than two
    max_restarts: int  # from the newest intact checkpoint, after a failure that a restart can fix
    init_timeout_s: float  # until all ranks have joined and finished their first step
    stall_s: float  # longest a rank may stay in one phase of a step after that
    grace_s: float  # after SIGTERM, until the workers are killed
    preempt_signals: str  # what SIGUSR1 and SIGUSR2 ask for: save; stop; auto: stop under Slurm, else save
    log_level: str  # of logs/rank<k>.log, not of the console: debug adds a line per step and rank


@dataclass(frozen=True)
class RecipesConfig:
    path: str | None  # a Python file with a recipe of your own


@dataclass(frozen=True)
class Config:
    """The whole config of a run after all checks, one field per group of `conf/`."""

    seed: int
    recipe: RecipeConfig
    run: RunConfig
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    ema: EmaConfig
    early_stopping: EarlyStoppingConfig
    precision: PrecisionConfig
    wire: WireConfig
    checkpoint: CheckpointConfig
    consistency: ConsistencyConfig
    tracker: TrackerConfig
    telemetry: TelemetryConfig
    launch: LaunchConfig
    recipes: RecipesConfig
    # Text recorded in place of values of the environment, by dotted path as users type it.
    from_environment: dict[str, Any] = field(default_factory=dict)


OPTIMIZERS: dict[str, type[OptimConfig]] = {
    "sgd": SgdConfig,
    "adamw": AdamWConfig,
    "adam": AdamConfig,
    "nadam": AdamConfig,
    "radam": AdamConfig,
    "rmsprop": RmspropConfig,
    "adagrad": AdagradConfig,
}


def to_dict(config: Config) -> dict[str, Any]:
    """The config as JSON values, the inverse of `from_dict`."""
    plain = as_json(asdict(config))
    assert isinstance(plain, dict)
    if not plain["from_environment"]:
        del plain["from_environment"]
    return plain


@cache
def types_of(kind: Any) -> dict[str, Any]:
    """The type of each field of a dataclass. Its text is evaluated once: that takes 0.1 ms."""
    return get_type_hints(kind)


def from_dict(values: dict[str, Any]) -> Config:
    """The config from values known to be valid: from `to_dict`, or checked in `validation`."""
    config = build(Config, {"from_environment": {}, **values})
    assert isinstance(config, Config)
    return config


def section_types(name: str | None) -> dict[str, Any]:
    """The type of each section (for `optim`, of the optimizer called `name`) and plain key."""
    hints = dict(types_of(Config))
    del hints["from_environment"]  # not a section of a tree
    hints["optim"] = SgdConfig if name is None else OPTIMIZERS.get(name, OwnOptimConfig)
    return hints


def as_json(value: Any) -> Any:
    """Tuples as lists, at any depth."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value


def build(kind: Any, value: Any) -> Any:
    """`value` as a `kind`: dataclasses from dictionaries, tuples from lists, floats from integers."""
    if value is None:
        return None
    if kind == OptimConfig:
        return build(OPTIMIZERS.get(value["name"], OwnOptimConfig), value)
    if is_dataclass(kind):
        assert isinstance(kind, type)
        hints = types_of(kind)
        parts = {each.name: build(hints[each.name], value[each.name]) for each in fields(kind)}
        return kind(**parts)
    if get_origin(kind) is tuple:
        return tuple(build(get_args(kind)[0], item) for item in value)
    if get_origin(kind) in (Union, types.UnionType):
        return float(value) if float in get_args(kind) and type(value) is int else value
    return float(value) if kind is float else value
