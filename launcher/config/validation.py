"""Validation of a whole config.

Owns the checks of keys, values and relations between keys; reports all problems, not just the first. Pure:
touches neither files nor environment, and never imports torch or Hydra.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from launcher.config.messages import show, summary, unknown_key
from launcher.config.optimizers import GROUPS, OPTIMIZERS, completed_groups, group_problems, is_fused
from launcher.config.rules import name, value_problem
from launcher.config.schema import (
    DEFAULT_EPOCHS,
    Config,
    from_dict,
    is_section,
    leaves,
    rules,
    section_types,
    types_of,
)
from launcher.errors import ConfigError

# Groups besides optim with keys that conf/config.yaml lacks, and the file that has them.
BASES = {"precision": "fp16", "tracker": "wandb"}
NOT_GLOBAL = " A file of recipe/ or experiment/ sets all sections: its first line is `# @package _global_`."
OPTIONS = "options"  # the dataclass field for keys of one recipe, model or data set only


def parse(tree: Mapping[str, object]) -> Config:
    """The typed config of a composed YAML tree; raises one ConfigError with all its problems."""
    gathered = gather_options(tree)
    problems = find_problems(gathered)
    if problems:
        raise ConfigError(summary(problems))
    groups = completed_groups(gathered["optim"]["groups"])
    optim, run = {**gathered["optim"], "groups": groups}, {"dir": gathered["run"]["dir"] or ""}
    return from_dict({**gathered, "optim": optim, "run": run})


def find_problems(values: Mapping[str, object]) -> list[str]:
    """One line per problem of a tree from `gather_options`; empty if `from_dict` accepts it."""
    optim = values.get("optim")
    optimizer = optim.get("name") if isinstance(optim, Mapping) else None
    if not name.holds(optimizer):  # which keys the others are is not known then
        return [value_problem("optim.name", optimizer, name)]
    wrong_keys = list(key_problems(values, section_types(str(optimizer)), ""))
    if wrong_keys:
        return wrong_keys
    found = dict(leaves(values, whole=OPTIONS))
    in_groups = list(group_problems(found.pop(GROUPS)))
    wrong = {path: value for path, value in found.items() if not rules()[path].holds(value)}
    lines = [value_problem(path, value, rules()[path]) for path, value in wrong.items()]
    broken = (relation_problem(keys, found, wrong.keys()) for keys in RELATIONS)
    return [*lines, *in_groups, *filter(None, broken)]


def key_problems(values: Mapping[str, Any], kinds: Mapping[str, object], prefix: str) -> Iterator[str]:
    for key in values.keys() - kinds.keys():
        path = f"{prefix}{key}"
        of_file = path == "experiment" or (prefix == "recipe." and key in types_of(Config))
        known = [f"{prefix}{name}" for name in kinds]
        yield f"{unknown_key(path, path, known)}{NOT_GLOBAL if of_file else ''}"
    for key, kind in kinds.items():
        path = f"{prefix}{key}"
        if key not in values:
            yield f"{path}: the key is missing; {inheritance(prefix, values)}"
        elif is_section(kind):
            if isinstance(values[key], Mapping):
                yield from key_problems(values[key], types_of(kind), f"{path}.")
            else:
                yield f"{path}={show(values[key])}: must be a section with keys of its own."


def inheritance(prefix: str, values: Mapping[str, object]) -> str:
    """Where a section's keys come from, and how a user's group file inherits them."""
    group = prefix.partition(".")[0]
    base = values.get("name") if prefix == "optim." else BASES.get(group)
    base = None if prefix == "optim." and base not in OPTIMIZERS else base
    if base is None:
        return "conf/config.yaml and the groups define all keys."
    return f"a file of your own in {group}/ inherits it with `defaults: [{base}, _self_]` at its top."


def relation_problem(keys: tuple[str, ...], found: Mapping[str, object], wrong: Set[str]) -> str | None:
    """The message where the rule about these keys is broken; None also where one is absent or wrong."""
    if not found.keys() >= set(keys) or not wrong.isdisjoint(keys):
        return None
    values, (broken, line) = [found[key] for key in keys], RELATIONS[keys]
    return line.format(*map(show, values)) if broken(*values) else None


# Rules about several keys: when values break one, and the message, formatted with them as they are typed.
RELATIONS: Mapping[tuple[str, ...], tuple[Callable[..., bool], str]] = {
    ("precision.loss_scale.init_scale", "precision.loss_scale.min_scale", "precision.loss_scale.max_scale"): (
        lambda init, low, high: not low <= init <= high,
        "precision.loss_scale.init_scale={}: must lie between precision.loss_scale.min_scale={} and "
        "max_scale={}.",
    ),
    ("precision.loss_scale.mode", "precision.name"): (
        lambda mode, precision: mode != "none" and "fp16" not in precision,
        "precision.loss_scale.mode={}: must be none: {} has no loss scale.",
    ),
    ("data.micro_batch_size", "data.batch_size"): (
        lambda micro, batch: isinstance(micro, int) and micro > batch,
        "data.micro_batch_size={}: must be at most data.batch_size={}.",
    ),
    ("model.init_from_sha256", "model.init_from"): (
        lambda digest, file: digest is not None and file is None,
        "model.init_from_sha256: is that of a file, but model.init_from={1} names none. Give it: "
        "model.init_from=FILE.",
    ),
    ("ddp.shard_optimizer", "optim.name"): (
        lambda shard, optimizer: shard and not is_fused(optimizer),
        "ddp.shard_optimizer={}: excludes optim={}, which needs whole parameters. Use sgd or adamw.",
    ),
    ("precision.name", "optim.name"): (
        lambda precision, optimizer: precision == "pure_fp16" and not is_fused(optimizer),
        "precision={}: excludes optim={}, which needs fp32 masters. Use sgd or adamw.",
    ),
    ("model.sync_bn", "train.compile"): (
        lambda sync_bn, compiles: sync_bn and compiles,
        "model.sync_bn={}: excludes train.compile={}, because its collectives cannot be compiled.",
    ),
    ("train.activation_checkpointing", "train.compile"): (
        lambda recomputes, compiles: recomputes and compiles,
        "train.activation_checkpointing={}: excludes train.compile={}, whose graphs decide themselves "
        "what they recompute.",
    ),
    ("model.sync_bn", "data.micro_batch_size"): (
        lambda sync_bn, micro: sync_bn and micro == "auto",
        "model.sync_bn={}: excludes data.micro_batch_size={}, because a rank that runs out of memory in a "
        "trial would leave the others waiting in the batch norms. Give data.micro_batch_size a number.",
    ),
    ("data.share", "data.batch_size"): (
        lambda share, batch: (
            not isinstance(share, str)
            and abs(math.fsum(share) - 1) > 1e-6  # of fractions such as [0.333333,0.666667]
            and (math.fsum(share) != batch or any(each != int(each) for each in share))
        ),
        "data.share={}: must be the samples of each rank, whole numbers that sum to data.batch_size={}, or "
        "fractions that sum to 1.",
    ),
    ("data.share", "model.sync_bn"): (
        lambda share, sync_bn: share == "auto" and sync_bn,
        "data.share={}: excludes model.sync_bn={}, because ranks with other shares make another number of "
        "forward passes, each of which waits for the others. Use data.share=equal.",
    ),
    ("data.share", "train.deterministic"): (
        lambda share, deterministic: share == "auto" and deterministic,
        "data.share={}: excludes train.deterministic={}, because measured times decide which samples a rank "
        "adds up. Give fixed shares, such as data.share=[0.75,0.25].",
    ),
    **{
        (key, "train.compile"): (
            lambda modules, compiles: modules and compiles,
            key + "={}: excludes train.compile={}, because a compiled graph would not run the hooks that "
            "change the arithmetic.",
        )
        for key in ("precision.fp32_modules", "precision.fp32_fallback")
    },
    ("reduce_lr_on_plateau.factor", "schedule.name", "schedule.warmup_fraction"): (
        lambda factor, schedule, warmup: factor is not None and (schedule != "constant" or warmup > 0),
        "reduce_lr_on_plateau.factor={}: excludes schedule={} with schedule.warmup_fraction={}, which sets "
        "the rate of each step. Use schedule=constant without warm-up.",
    ),
    # Each of these decides by evaluations within a run. With that at its end alone nothing would ever happen.
    **{
        (key, "train.eval_every_epochs", "train.epochs", "train.eval_every_steps", "train.max_steps"): (
            lambda value, every, epochs, steps, max_steps: (
                value not in (None, "none")
                and steps is None
                and (epochs or not max_steps)
                and every >= (epochs or DEFAULT_EPOCHS)
            ),
            key
            + "={}: needs evaluations during a run, and train.eval_every_epochs={} of train.epochs={} leaves "
            "only that at its end. Evaluate more often: train.eval_every_steps=N.",
        )
        for key in ("early_stopping.patience", "reduce_lr_on_plateau.factor", "sweep.prune")
    },
    **{
        (key, "data.val_fraction"): (
            lambda value, fraction: value not in (None, "none") and fraction == 0,
            key + "={}: needs evaluations, and data.val_fraction={} holds nothing out to evaluate on.",
        )
        for key in ("early_stopping.patience", "reduce_lr_on_plateau.factor", "sweep.prune")
    },
    ("optim.nesterov", "optim.momentum"): (
        lambda nesterov, momentum: nesterov and momentum == 0,
        "optim.nesterov={}: needs optim.momentum above 0. Set optim.nesterov=false or a momentum.",
    ),
}


def gather_options(tree: Mapping[str, object]) -> dict[str, Any]:
    """The tree with the keys of one model, data set or own optimizer only collected below `options`."""
    gathered = dict(tree)
    for section in ("recipe", "model", "data", "optim"):
        values = tree.get(section)
        if isinstance(values, Mapping):
            known = dict(types_of(section_types(str(values.get("name")))[section]))
            if known.pop(OPTIONS, None) is None:
                continue  # an optimizer of the launcher: all its keys are known
            # No argument of a function: a section, of a file without `# @package _global_`, or a text.
            misplaced = {
                key
                for key, value in values.items()
                if section == "recipe" and (isinstance(value, Mapping) or not str(key).isidentifier())
            }
            own = {key: value for key, value in values.items() if key not in known.keys() | misplaced}
            gathered[section] = {**{key: values[key] for key in values if key not in own}, OPTIONS: own}
    return gathered
