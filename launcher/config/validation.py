"""Validation of a whole config.

Owns the checks of keys, values and relations between keys; reports all problems, not just the first. Pure:
touches neither files nor environment, and never imports torch or Hydra.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from launcher.config import parameter_groups
from launcher.config.messages import show, summary, unknown_key
from launcher.config.rules import BLOCKS, PRECISIONS, RULES, is_number, value_problem
from launcher.config.schema import OPTIMIZERS, Config, from_dict, section_types, types_of
from launcher.errors import ConfigError

OF_OUR_OWN = ("sgd", "adamw")  # optimizers that need neither whole parameters nor masters
BASES = {
    "precision": "fp16",
    "tracker": "wandb",
}  # groups besides optim with keys that conf/config.yaml lacks
OPTIONS = "options"  # the dataclass field for keys of one model or data set only


def parse(tree: Mapping[str, Any], recorded: Mapping[str, Any] = {}) -> Config:  # read only
    """The typed config of a composed YAML tree; raises one ConfigError with all its problems.

    `recorded` is the text recorded in place of values of the environment, by path.
    """
    gathered = gather_options(tree)
    problems = find_problems(gathered, recorded)
    if problems:
        raise ConfigError(summary(problems))
    groups = parameter_groups.completed(gathered["optim"]["groups"])
    optim = {**gathered["optim"], "groups": groups}
    values = {
        **gathered,
        "optim": optim,
        "run": {"dir": gathered["run"]["dir"] or ""},
        "from_environment": dict(recorded),
    }
    return from_dict(values)


def find_problems(values: Mapping[str, Any], recorded: Mapping[str, Any] = {}) -> list[str]:
    """One line per problem of a tree from `gather_options`; empty if `from_dict` accepts it."""
    optim = values.get("optim")
    optimizer = optim.get("name") if isinstance(optim, Mapping) else None
    if not RULES["optim.name"].holds(optimizer):
        return [value_problem("optim.name", recorded.get("optim.name", optimizer), RULES["optim.name"])]
    wrong_keys = list(key_problems(values, section_types(str(optimizer)), ""))
    if wrong_keys:
        return wrong_keys
    leaves = dict(flatten(values))
    in_groups = list(parameter_groups.problems(leaves.pop(parameter_groups.KEY)))
    wrong_values = {path: value for path, value in leaves.items() if not RULES[path].holds(value)}
    lines = [
        value_problem(path, recorded.get(path, value), RULES[path]) for path, value in wrong_values.items()
    ]
    return lines + in_groups + [line for paths, line in relations(leaves) if not paths & wrong_values.keys()]


def key_problems(values: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key in values.keys() - kinds.keys():
        yield unknown_key(f"{prefix}{key}", f"{prefix}{key}", [f"{prefix}{known}" for known in kinds])
    for key, kind in kinds.items():
        path = f"{prefix}{key}"
        if key not in values:
            yield f"{path}: the key is missing; {inheritance(prefix, values)}"
        elif is_dataclass(kind):
            if isinstance(values[key], Mapping):
                yield from key_problems(values[key], section_fields(kind), f"{path}.")
            else:
                yield f"{path}={show(values[key])}: must be a section with keys of its own."


def inheritance(prefix: str, values: Mapping[str, Any]) -> str:
    """Where a section's keys come from, and how a user's group file inherits them."""
    group = prefix.partition(".")[0]
    base = values.get("name") if prefix == "optim." else BASES.get(group)
    base = None if prefix == "optim." and base not in OPTIMIZERS else base
    if base is None:
        return "conf/config.yaml and the groups define all keys."
    return f"a file of your own in {group}/ inherits it with `defaults: [{base}, _self_]` at its top."


def section_fields(kind: Any) -> dict[str, Any]:
    hints = types_of(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def relations(leaves: Mapping[str, Any]) -> Iterator[tuple[set[str], str]]:
    """Checks of relations between keys: the keys that a problem concerns, and its line."""
    low, init, high = (leaves[f"precision.scale.{key}"] for key in ("min", "init", "max"))
    if is_number(low) and is_number(init) and is_number(high) and not low <= init <= high:
        paths = {f"precision.scale.{key}" for key in ("min", "init", "max")}
        yield (
            paths,
            f"precision.scale.init={init}: must lie between precision.scale.min={low} and max={high}.",
        )
    mode, precision = leaves["precision.scale.mode"], leaves["precision.name"]
    if precision in PRECISIONS and "fp16" not in precision and mode != "none":
        yield (
            {"precision.scale.mode"},
            f"precision.scale.mode={show(mode)}: must be none: {precision} has no loss scale.",
        )
    batch, micro = leaves["data.batch_size"], leaves["data.micro_batch"]
    if is_number(batch) and is_number(micro) and micro > batch:
        yield (
            {"data.batch_size", "data.micro_batch"},
            f"data.micro_batch={micro}: must be at most data.batch_size={batch}.",
        )
    if leaves["model.weights_sha256"] is not None and leaves["model.weights"] is None:
        yield (
            {"model.weights_sha256", "model.weights"},
            "model.weights_sha256: is that of a file, but model.weights=null names none. Give it: "
            "model.weights=FILE.",
        )
    yield from _exclusions(leaves)


def _exclusions(leaves: Mapping[str, Any]) -> Iterator[tuple[set[str], str]]:
    """Choices that do not go together."""
    name = leaves["optim.name"]
    if name not in OF_OUR_OWN and leaves["wire.shard"] is True:
        yield (
            {"optim.name", "wire.shard"},
            f"wire.shard=true: excludes optim={name}, which needs whole parameters. Use sgd or adamw.",
        )
    if name not in OF_OUR_OWN and leaves["precision.name"] == "pure_fp16":
        yield (
            {"optim.name", "precision.name"},
            f"precision=pure_fp16: excludes optim={name}, which needs fp32 masters. Use sgd or adamw.",
        )
    compiles = leaves["train.compile"]
    if leaves["model.sync_bn"] is True and compiles in (True, BLOCKS):
        yield (
            {"model.sync_bn", "train.compile"},
            f"model.sync_bn=true: excludes train.compile={show(compiles)}, because its collectives cannot be "
            "compiled.",
        )
    if leaves["model.sync_bn"] is True and leaves["data.micro_batch"] == "auto":
        yield (
            {"model.sync_bn", "data.micro_batch"},
            "model.sync_bn=true: excludes data.micro_batch=auto, because a rank that runs out of memory in a "
            "trial would leave the others waiting in the batch norms. Give data.micro_batch a number.",
        )
    for key, off in (("precision.fp32_modules", []), ("precision.rescue", False)):
        if leaves[key] != off and compiles in (True, BLOCKS):
            yield (
                {key, "train.compile"},
                f"{key}={show(leaves[key])}: excludes train.compile={show(compiles)}, because a compiled "
                "graph would not run the hooks that change the arithmetic.",
            )
    trackers = leaves["tracker.name"]
    if leaves["tracker.artifacts"] != "none" and trackers != "wandb" and "wandb" not in (trackers or ()):
        yield (
            {"tracker.artifacts", "tracker.name"},
            f"tracker.artifacts={show(leaves['tracker.artifacts'])}: needs tracker=wandb, which keeps them.",
        )
    if leaves.get("optim.nesterov") is True and leaves.get("optim.momentum") == 0:
        yield (
            {"optim.nesterov"},
            "optim.nesterov=true: needs optim.momentum above 0. Set optim.nesterov=false or a momentum.",
        )


def gather_options(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with the keys of one model, data set or own optimizer only collected below `options`."""
    gathered = dict(tree)
    for section in ("model", "data", "optim"):
        values = tree.get(section)
        if isinstance(values, Mapping):
            known = section_fields(section_types(str(values.get("name")))[section])
            if known.pop(OPTIONS, None) is None:
                continue  # an optimizer of the launcher: all its keys are known
            own = {key: value for key, value in values.items() if key not in known}
            gathered[section] = {**{key: values[key] for key in values if key in known}, OPTIONS: own}
    return gathered


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of each leaf; an `options` section counts as one leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and key != OPTIONS:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
