"""Keys of earlier configs that are gone or renamed, each with the sentence that its error gives.

Kept for one release: whoever has an old command or config file reads here what does the same now.
"""

from __future__ import annotations

REMOVED_KEYS: dict[str, str] = {
    "optim.layer_decay": "Give each layer its rate with optim.groups or Recipe.groups, by lr_scale.",
    "data.augment.mixup": "Mix the samples of a batch in Recipe.train_transform or in its loss.",
    "data.target": "The tabular recipe is gone: read your table in a recipe of your own, as TensorData.",
    "train.cuda_graph": "Steps run without CUDA graphs; train.compile=true launches fewer kernels.",
    "wire.sum": "Gradients are summed in wire.dtype; wire.shard=true sends as many bytes and sums in fp32.",
    "launch.hosts": "Rank 0 reads checkpoints for all machines, which need no shared disk; leave it out.",
}


def removed_key(path: str) -> str | None:
    """What to do instead of the key, or of the section it is in; None if neither is a removed one."""
    section = path.rpartition(".")[0]
    return REMOVED_KEYS.get(path) or REMOVED_KEYS.get(section)
