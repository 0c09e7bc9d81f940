"""Words of Lightning, Accelerate, HF Trainer, timm, DeepSpeed and nanoGPT, and what does the same here.

Owns these words, each with the override to write in its place, or the sentence that says it. Pure.
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


def advice_for(key: str, value: str) -> str:
    """What to write in place of a key that is none here, with the value as it was typed; empty if unknown."""
    name = key.rpartition(".")[2]  # trainer.max_epochs, training.fp16
    for override, names in KEYS.items():
        if name in names.split() and override.partition("=")[0] != key:
            if override.startswith("precision="):
                here = "fp32" if value in ("false", "null") else PRECISIONS.get(value)
                return f"Write precision={here}." if here else f"Write {override}."
            return f"Write {override.format(value=value)}."
    return next((said.format(value=value) for said, names in SENTENCES.items() if name in names.split()), "")
