"""Keys of earlier configs that are gone or renamed, each with the sentence that its error gives.

Kept for one release: whoever has an old command or config file reads here what does the same now.
"""

from __future__ import annotations

REMOVED_KEYS: dict[str, str] = {
    "optim.layer_decay": "Give each layer its rate with optim.groups or Recipe.groups, by lr_scale.",
    "data.augment.mixup": "Mix the samples of a batch in Recipe.train_transform or in its loss.",
    "data.target": "The tabular recipe is gone: read your table in a recipe of your own, as TensorData.",
    "train.cuda_graph": "Steps run without CUDA graphs; train.compile=true launches fewer kernels.",
    "wire.sum": "Gradients are summed in ddp.gradient_dtype; ddp.shard_optimizer=true sums in fp32.",
    "launch.hosts": "Rank 0 reads checkpoints for all machines, which need no shared disk; leave it out.",
    "tracker.artifacts": "wandb artifact put uploads the folder of a checkpoint, in checkpoints/ of the run.",
}
RENAMED_KEYS: dict[str, str] = {
    "wire.dtype": "ddp.gradient_dtype",
    "wire.shard": "ddp.shard_optimizer",
    "wire.bucket_mb": "ddp.bucket_cap_mb",
    "wire.overlap": "ddp.overlap",
    "wire.predivide": "ddp.gradient_predivide_factor",
    "consistency.every_steps": "ddp.check_replicas_every_steps",
    "data.workers": "data.num_workers",
    "data.micro_batch": "data.micro_batch_size",
    "data.max_bad": "data.max_bad_samples",
    "data.augment.crop_padding": "data.augment.random_crop_padding",
    "data.augment.flip": "data.augment.random_horizontal_flip",
    "optim.decay_vectors": "optim.decay_norm_and_bias",
    "schedule.base_batch": "schedule.lr_base_batch_size",
    "model.weights": "model.init_from",
    "model.weights_strict": "model.init_from_strict",
    "model.weights_sha256": "model.init_from_sha256",
    "precision.scale.mode": "precision.loss_scale.mode",
    "precision.scale.init": "precision.loss_scale.init_scale",
    "precision.scale.growth_interval": "precision.loss_scale.growth_interval",
    "precision.scale.hysteresis": "precision.loss_scale.hysteresis",
    "precision.scale.min": "precision.loss_scale.min_scale",
    "precision.scale.max": "precision.loss_scale.max_scale",
    "precision.scale.max_bad_losses": "precision.loss_scale.max_bad_losses",
    "precision.scale.max_floor_skips": "precision.loss_scale.max_skips_at_min_scale",
    "precision.rescue": "precision.fp32_fallback",
    "precision.max_rescues": "precision.max_fp32_fallbacks",
    "plateau.factor": "reduce_lr_on_plateau.factor",
    "plateau.patience": "reduce_lr_on_plateau.patience",
    "plateau.threshold": "reduce_lr_on_plateau.threshold",
    "plateau.metric": "reduce_lr_on_plateau.metric",
    "launch.stall_s": "launch.hang_timeout_s",
    "telemetry.nvml": "telemetry.gpu_stats",
    "telemetry.gradients_every_steps": "telemetry.gradient_histogram_every_steps",
    "sweep.on": "sweep.launcher",
    "sweep.patience": "sweep.grace_period",
    "sweep.stop.trials": "sweep.stop.max_trials",
}


def removed_key(path: str) -> str | None:
    """What to do instead of the key, or of the section it is in; None if neither is a removed one."""
    if path in RENAMED_KEYS:
        return f"It is called {RENAMED_KEYS[path]} now."
    if inner := [new for old, new in RENAMED_KEYS.items() if old.startswith(f"{path}.")]:
        return f"Its keys are called {', '.join(inner)} now."
    section = path.rpartition(".")[0]
    return REMOVED_KEYS.get(path) or REMOVED_KEYS.get(section)
