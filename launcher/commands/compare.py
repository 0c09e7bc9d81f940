"""`compare`: the same training in several precisions, side by side.

Owns which overrides may vary, and the order of the runs: the precisions take turns, seed by seed, so that a
machine that gets slower or busier does so for all of them.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

from launcher.commands.arguments import Arguments
from launcher.config.messages import command_name
from launcher.errors import DIVERGED, ConfigError
from launcher.launch.config_broadcast import ConfigBroadcast

VARIED = ("seed", "precision")  # the last one changes from run to run
ONE_AT_A_TIME = "sweep.parallel=1"  # their times are compared


def compare(arguments: Arguments, broadcast: ConfigBroadcast) -> int:
    """compare recipe=resnet18 precision=fp32,fp16: trains with each precision; compares time, memory and loss

    For each seed, trains one run per precision. Prints and writes side_by_side.md: time per step and its
    parts, memory, bytes sent, skipped steps, loss and metric, each compared with the first precision. Other
    arguments are key=value as in training, with one value each. A run that diverges does not change the exit
    code.

      precision=A,B      two precisions or more
      seed=0,1,2         with several seeds, differences have an interval

    Example: {program} compare recipe=resnet18 precision=fp32,fp16 seed=0,1,2
    """
    from launcher.commands.train import train

    return train(as_sweep(arguments), broadcast, findings=(DIVERGED,))


def as_sweep(arguments: Arguments) -> Arguments:
    """The arguments of `train` that stand for those of `compare`. Raises ConfigError."""
    from hydra.errors import HydraException

    from launcher.config.resolve import space_of

    with suppress(HydraException):  # the composition refuses a word that cannot be read, with the reason
        varied = {each.key: each for each in space_of(arguments.positionals).dimensions}
        if "precision" not in varied or len(set(varied["precision"].representative_values)) < 2:
            rule = "give two precisions or more. The others are compared with the first"
            example = f"{command_name()} compare recipe=resnet18 precision=fp32,fp16 seed=0,1,2"
            raise ConfigError(f"compare: {rule}: {example}")
        if others := varied.keys() - VARIED:
            rule = "only precision and seed may have several values"
            why = "so that nothing else can be the cause of a difference"
            advice = "Compare other settings with a sweep: -m."
            raise ConfigError(f"compare: {rule}, not {', '.join(sorted(others))}, {why}. {advice}")
    # Of a key given twice the last word.
    given = {word.partition("=")[0]: word for word in arguments.positionals}
    last = [given.pop(key) for key in VARIED if key in given]
    flags = {**arguments.flags, "--multirun": None}
    words = (*given.values(), *last, ONE_AT_A_TIME)
    return dataclasses.replace(arguments, command="train", positionals=words, flags=flags)
