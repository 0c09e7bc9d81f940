"""How the settings of the run in a directory differ from those of a command.

Owns which keys make another run of it, and which have no part in what a run learns. Reads config.yaml alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from launcher.config.messages import to_override
from launcher.config.schema import Config, leaves
from launcher.errors import ConfigError
from launcher.run_dir.records import CHECKPOINTS, CONFIG, as_typed_config, config_yaml
from launcher.run_dir.status import FILE_NAME

# Keys that a resumed run cannot change. Checkpoints compare the shapes of all tensors as well.
IDENTITY = (
    "seed",
    "recipe.name",
    "model.name",
    "optim.name",
    "precision.name",
    "data.name",
    "data.batch_size",
    "data.drop_last",
)
TRAINING_SECTIONS = (
    "seed",
    "recipe",
    "recipes",
    "train",
    "schedule",
    "reduce_lr_on_plateau",
    "ema",
    "optim",
    "model",
    "data",
    "precision",
    "ddp",
)
LENGTH_KEYS = ("train.epochs", "train.max_steps")  # a schedule that is not constant is spread over it
# Within these sections: how long and how fast a run trains, and what it finds out for itself.
IGNORED_KEYS = (
    "recipes.path",  # where the code is, not what it is
    *LENGTH_KEYS,
    "train.eval_every_*",
    "train.log_every_steps",
    "train.on_oom",
    "train.compile",
    "train.activation_checkpointing",
    "train.channels_last",
    "train.deterministic",
    "data.micro_batch_size",
    "data.num_workers",
    "data.cache",
    "model.init_from_sha256",
    "precision.emulate",
    "precision.fp32_modules",
    "precision.*fp32_fallback*",
    "ddp.bucket_cap_mb",
    "ddp.overlap",
    "ddp.gradient_predivide_factor",
    "ddp.shard_optimizer",
    "ddp.check_replicas_every_steps",
)


def differences(config: Config, directory: Path) -> dict[str, str]:
    """Keys by which the run in `directory` differs from one of `config`, each with both values in a text.

    Keys of IDENTITY come first; with one of them it is another run, and by the others it was trained
    otherwise. A key that one of them lacks, and that is off in the other, is that of another version of the
    launcher. Raises ConfigError for files that have the names of a run's files but other content.
    """
    there, here = _settings(config, directory)
    keys = [*IDENTITY, *(key for key in (*there, *here) if _affects_training(key))]
    pairs = {key: (there.get(key), here.get(key)) for key in keys}
    return {
        key: f"{key} is {to_override(old)} there and {to_override(new)} here"
        for key, (old, new) in pairs.items()
        if old != new and (old or new)
    }


def settings_of(config: Config) -> dict[str, str]:
    """What a run learns from, as texts by dotted key: a checkpoint keeps them for `changed_settings`."""
    return {
        key: to_override(value)
        for key, value in leaves(as_typed_config(config))
        if _affects_training(key) or key in LENGTH_KEYS
    }


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Keys of `settings_of` that differ, each with both values in a text.

    One that either lacks is of another version.
    """
    return {
        key: f"{key} was {before[key]} and is {now[key]}"
        for key in before
        if before[key] != now.get(key, before[key])
    }


def _affects_training(key: str) -> bool:
    return key.partition(".")[0] in TRAINING_SECTIONS and not any(fnmatch(key, each) for each in IGNORED_KEYS)


def _settings(config: Config, directory: Path) -> tuple[dict[str, object], dict[str, object]]:
    """The values by dotted key of the run in `directory` and of `config`.

    Equal where config.yaml has been deleted beside checkpoints: these say of which run they are, and are
    compared when they are loaded.
    """
    import yaml

    has_checkpoints = any((directory / CHECKPOINTS).glob("step-*"))
    try:
        here = dict(leaves(yaml.safe_load(config_yaml(config))))
        if not (directory / CONFIG).exists() and has_checkpoints:
            return here, here
        there = dict(leaves(yaml.safe_load((directory / CONFIG).read_text(encoding="utf-8"))))
        if there.keys() >= set(IDENTITY):
            return there, here
    except (FileNotFoundError, ValueError, AttributeError, RecursionError, yaml.YAMLError):
        pass
    if has_checkpoints:
        raise ConfigError(
            f"{directory / CONFIG} is damaged: it is not what a run writes. The checkpoints beside it say of "
            "which run they are. To resume, delete it, and run the same command again."
        )
    raise ConfigError(
        f"run.dir={directory} holds a {CONFIG} or {FILE_NAME} that no run has written. "
        "Choose another directory: a run never overwrites the files of others."
    )
