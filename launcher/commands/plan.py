"""`plan`: what a command would run, without running it.

Owns the flags of the command and who it asks: the config, the number of devices, and the estimate itself.
"""

from __future__ import annotations

import json
import sys
import warnings

from launcher.commands.arguments import Arguments
from launcher.errors import ConfigError, counted, escaped
from launcher.launch.config_broadcast import ConfigBroadcast
from launcher.launch.node_env import planned_launch
from launcher.launch.worker_count import count_gpus, num_ranks, refuse_small_batch


def plan(arguments: Arguments, broadcast: ConfigBroadcast) -> None:
    """plan recipe=resnet18 [--json]: says what would run, and what it would need

    Says what a command would run, and starts nothing: batches, steps and schedule; memory of a rank by
    kind, and the micro-batch that fits on GPUs; bytes that a step sends; size of checkpoints. Reads the data
    as the run would.

      --json               one line of JSON instead of the page
      --rates 3,1          speeds of the ranks, in any unit: what data.share=auto gains

    Example: {program} plan recipe=resnet50 data.path=photos
    """
    from launcher.config.composition import Request
    from launcher.config.resolve import compose_jobs

    if "--multirun" in arguments.flags:
        raise ConfigError("plan -m: plan is about one run. Leave -m out, and give each key one value.")
    (config,) = compose_jobs(Request(arguments.positionals, arguments.config_dir))
    launch = planned_launch(config.launch, broadcast.launch)
    refuse_small_batch(config, launch)
    world_size = num_ranks(config.launch, launch)
    rates: list[float] = arguments.flags.get("--rates", [])
    if rates and (len(rates) != world_size or min(rates) <= 0):
        each = f"a number above 0 for each of the {counted(world_size, 'rank')}"
        raise ConfigError(f"--rates: must be {each}, such as 3,1.")
    from launcher.plan.estimate import estimate
    from launcher.plan.page import lines_of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run gives them, once it is one
        found = estimate(config, world_size, launch.num_machines, count_gpus() > 0, rates)
    if "--json" in arguments.flags:
        print(json.dumps(found))
        return
    lines = [*lines_of(found)]
    print("\n".join(map(escaped, lines) if sys.stdout.isatty() else lines))
