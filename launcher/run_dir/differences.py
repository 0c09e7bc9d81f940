"""How the settings of the run in a directory differ from those of a command.

Owns which keys make another run of it, and which have no part in what a run learns. Reads config.yaml alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from launcher.config.messages import to_override
from launcher.config.schema import Config, leaves, to_dict
from launcher.run_dir.records import CONFIG

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
OTHER_SECTIONS = ("run", "recipes", "early_stopping", "checkpoint", "tracker", "telemetry", "launch", "sweep")
LENGTH_KEYS = ("train.epochs", "train.max_steps")  # a schedule that is not constant is spread over it
# Within these sections: how long and how fast a run trains, and what it finds out for itself.
IGNORED_KEYS = (
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

    With a key of IDENTITY it is another run, and by the others it was trained otherwise. None where its
    config.yaml is lost: its checkpoints say of which run they are, and are compared when they are loaded.
    """
    import yaml

    try:
        there = _texts(yaml.safe_load((directory / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError):
        return {}
    found = changes(there, settings_of(config))
    return {key: text for key, text in found.items() if key not in LENGTH_KEYS}


def settings_of(config: Config) -> dict[str, str]:
    """What a run learns from, as texts by dotted key. A checkpoint keeps them."""
    return _texts(to_dict(config))


def changes(there: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """The keys whose values differ, each with both values in a text."""
    return {
        key: f"{key} is {there.get(key, 'missing')} there and {here.get(key, 'missing')} here"
        for key in dict.fromkeys((*there, *here))
        if there.get(key) != here.get(key)
    }


def _texts(tree: Mapping[str, object]) -> dict[str, str]:
    return {
        key: to_override(value)
        for key, value in leaves(tree)
        if key.partition(".")[0] not in OTHER_SECTIONS
        and not any(fnmatch(key, each) for each in IGNORED_KEYS)
    }
