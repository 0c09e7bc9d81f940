"""Keys that a config has not, and what does the same here: of other programs, and of earlier versions.

Owns the words of Lightning, Accelerate, HF Trainer, timm, DeepSpeed and nanoGPT, each with the override to
write in its place, or the sentence that says it; and the keys that are gone or renamed, kept for one release.
"""

from __future__ import annotations

from collections.abc import Mapping

BATCH = (
    "data.batch_size has the samples of one update over all ranks, data.micro_batch_size those of one "
    "forward pass of a rank"
)
KEYS: Mapping[str, str] = {  # the override here, and the keys elsewhere; {value}: as it was typed
    "launch.nproc={value}": "gpus num_gpus devices nproc nproc_per_node num_processes",
    "launch.nnodes={value}": "num_nodes num_machines nnodes",
    "optim.lr={value}": "learning_rate lr base_lr",
    "optim.weight_decay={value}": "weight_decay wd",
    "optim.clip_norm={value}": "gradient_clip_val max_grad_norm gradient_clipping grad_clip clip_grad "
    "clip_grad_norm",
    "optim={value}": "optimizer opt",
    "schedule={value}": "scheduler sched lr_scheduler lr_scheduler_type",
    "schedule.warmup_fraction={value}": "warmup_ratio",
    "train.epochs={value}": "num_epochs max_epochs num_train_epochs epochs n_epochs",
    "train.max_steps={value}": "max_steps max_iters max_train_steps num_steps",
    "train.eval_every_steps={value}": "eval_interval eval_steps val_check_interval",
    "train.log_every_steps={value}": "log_interval logging_steps log_every_n_steps log_every",
    "train.compile={value}": "compile torch_compile torchcompile",
    "train.activation_checkpointing={value}": "gradient_checkpointing grad_checkpointing "
    "activation_checkpointing",
    "train.label_smoothing={value}": "label_smoothing smoothing label_smoothing_factor",
    "checkpoint.every_steps={value}": "save_steps save_interval every_n_train_steps checkpoint_interval",
    "checkpoint.keep={value}": "save_total_limit save_top_k total_limit",
    "checkpoint.resume={value}": "resume resume_from_checkpoint ckpt_path resume_from",
    "data.num_workers={value}": "num_workers dataloader_num_workers workers",
    "data.micro_batch_size={value}": "micro_batch_size train_micro_batch_size_per_gpu",
    "run.dir={value}": "output_dir default_root_dir out_dir save_dir",
    "seed={value}": "seed_everything random_seed",
    "tracker={value}": "report_to logger",
    "precision=fp16": "fp16 use_fp16 mixed_precision",
    "precision=amp_fp16": "amp use_amp",
    "precision=bf16": "bf16 use_bf16",
}
SENTENCES: Mapping[str, str] = {  # what has no single key here
    f"Gradient accumulation follows from two sizes: {BATCH}. For {{value}} steps write "
    "data.micro_batch_size=N, with N = data.batch_size / ranks / {value}.": "gradient_accumulation_steps "
    "accumulate_grad_batches grad_accum_steps accum_steps accum_iter iters_to_accumulate",
    f"{BATCH}. Write data.micro_batch_size={{value}}, and data.batch_size with that times the ranks.": ""
    "per_device_train_batch_size per_gpu_train_batch_size",
    "All ranks take part in one evaluation; its batches follow from data.micro_batch_size.": ""
    "per_device_eval_batch_size eval_batch_size",
    f"{BATCH}. Write data.batch_size={{value}}, or that times the ranks if it was the size per process.": ""
    "batch_size train_batch_size global_batch_size",
    "The warm-up is a fraction of all steps. Write schedule.warmup_fraction=F, with F the steps or epochs of "
    "the warm-up over those of the run.": "warmup_steps warmup_iters num_warmup_steps warmup_epochs warmup",
    "Processes and devices are found by themselves: launch.nproc=N chooses their number, and gradients are "
    "reduced as ddp says.": "strategy accelerator distributed_backend backend device",
}
PRECISIONS: Mapping[str, str] = {  # of Lightning and Accelerate
    "16-mixed": "amp_fp16",
    "fp16-mixed": "amp_fp16",
    "16": "amp_fp16",
    "16-true": "pure_fp16",
    "bf16-mixed": "amp_bf16",
    "bf16-true": "bf16",
    "32": "fp32",
    "32-true": "fp32",
    "no": "fp32",
    "half": "fp16",
    "float16": "fp16",
    "float32": "fp32",
    "bfloat16": "bf16",
}


REMOVED_KEYS: dict[str, str] = {
    "optim.layer_decay": "Give each layer its rate with optim.groups or Recipe.groups, by lr_scale.",
    "data.augment.mixup": "Mix the samples of a batch in Recipe.train_transform or in its loss.",
    "data.target": "The tabular recipe is gone: read your table in a recipe of your own, as TensorData.",
    "train.cuda_graph": "Steps run without CUDA graphs; train.compile=true launches fewer kernels.",
    "wire.sum": "Gradients are summed in ddp.gradient_dtype; ddp.shard_optimizer=true sums in fp32.",
    "launch.hosts": "Rank 0 reads checkpoints for all machines, which need no shared disk; leave it out.",
    "sweep.stop.hours": "timeout 8h scripts/run -m ... stops a sweep, -m sweep.resume=DIR continues it.",
    "sweep.stop.gpu_hours": "timeout 8h scripts/run -m ... stops a sweep, -m sweep.resume=DIR continues it.",
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


def advice_for(key: str, value: str) -> str:
    """What to write in place of a key that is none here, with the value as it was typed; empty if unknown."""
    name = key.rpartition(".")[2]  # trainer.max_epochs, training.fp16
    for override, names in KEYS.items():
        if name in names.split() and override.partition("=")[0] != key:
            if override.startswith("precision="):
                here = "fp32" if value in ("false", "null") else PRECISIONS.get(value)
                here = value if value in PRECISIONS.values() else here
                return f"Write precision={here}." if here else f"Write {override}."
            return f"Write {override.format(value=value)}."
    return next((said.format(value=value) for said, names in SENTENCES.items() if name in names.split()), "")


def removed_key(path: str) -> str | None:
    """What to do instead of the key, or of the section it is in; None if neither is a removed one."""
    if path in RENAMED_KEYS:
        return f"It is called {RENAMED_KEYS[path]} now."
    if inner := [new for old, new in RENAMED_KEYS.items() if old.startswith(f"{path}.")]:
        return f"Its keys are called {', '.join(inner)} now."
    section = path.rpartition(".")[0]
    return REMOVED_KEYS.get(path) or REMOVED_KEYS.get(section)
