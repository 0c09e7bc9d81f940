"""Where in a run memory ran out, and the settings that lower what is needed there.

Pure: a heartbeat and the config in, text out.
"""

from __future__ import annotations

from launcher.config.schema import Config
from launcher.distributed.heartbeat import Beat, where
from launcher.process.shortage import TO_LOWER

PARTS = {
    "compute": "the forward or backward pass",
    "wire": "the exchange of gradients",
    "update": "the update",
}
BUILDING = ("building the model", "comparing the models", "restoring")  # masters and states are made then
SHARDABLE = ("sgd", "adamw")
MORE_ROOM = "a smaller data.micro_batch leaves more room beside it"


def place_of_shortage(beat: Beat) -> str:
    """` in the update of step 7`."""
    if beat.phase in PARTS and beat.step:
        return f" in {PARTS[beat.phase]} of step {beat.step}"
    return f" {where(beat)}"


def advice_for(beat: Beat, config: Config, world_size: int) -> str:
    """What to change, for a shortage at this point of the run."""
    if beat.phase == "wire":
        return _any_of([*_of_the_wire(config), MORE_ROOM])
    if beat.phase == "update":
        return _any_of([*_of_the_states(config, world_size), MORE_ROOM])
    if beat.phase in BUILDING:
        return _any_of([*_of_the_states(config, world_size), "choose a smaller model"])
    return TO_LOWER


def _of_the_wire(config: Config) -> list[str]:
    found = ["a smaller wire.bucket_mb sends fewer gradients at once"]
    if config.wire.sum == "fp32" and not config.wire.shard:
        found.append("wire.sum=native receives into the same buffer")
    return found


def _of_the_states(config: Config, world_size: int) -> list[str]:
    found = []
    if world_size > 1 and not config.wire.shard and config.optim.name in SHARDABLE:
        found.append("wire.shard=true divides masters and optimizer states among the ranks")
    if config.optim.name != "sgd":
        found.append(f"optim=sgd has fewer states than {config.optim.name}")
    if config.ema.decay is not None:
        found.append("ema.decay=null saves 4 bytes per parameter")
    return found


def _any_of(changes: list[str]) -> str:
    return f"What helps: {'; '.join(changes)}."
