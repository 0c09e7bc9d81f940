"""`export`: the weights of a finished run as one safetensors file."""

from __future__ import annotations

from pathlib import Path

from launcher.commands.arguments import Arguments
from launcher.config.messages import command_name
from launcher.errors import ConfigError
from launcher.launch.config_broadcast import ConfigBroadcast

OTHER_FORMATS = (".bin", ".ckpt", ".h5", ".onnx", ".pickle", ".pkl", ".pt", ".pth")


def export_weights(arguments: Arguments, broadcast: ConfigBroadcast) -> None:
    """export RUN FILE [--dtype fp16] [--best]: writes the weights to a safetensors file

    Writes the weights of RUN's newest checkpoint to a safetensors file, with the names of the model's
    state_dict. If the run has ema.decay, it writes the average of the weights. FILE is replaced only if an
    export wrote it.

    If FILE is a folder or ends with a slash, it writes model.safetensors and prediction.json (classes,
    normalisation of images) into that folder. For a model of transformers it adds config.json and the
    tokenizer, so that from_pretrained(FILE) loads it.

      --dtype fp32|fp16  dtype of floating-point tensors; default fp32
      --best             the checkpoint of the best evaluation instead of the newest
      --no-ema           the trained weights instead of their average

    Example: {program} export outputs/resnet18/20260101-120000-ab12 weights.safetensors --dtype fp16 --best
    """
    from launcher.checkpoint.export import export, with_model_folder

    if len(arguments.positionals) != 2:
        usage = f"{command_name()} export outputs/<recipe>/<run> weights.safetensors"
        raise ConfigError(f"export: give a run and a file: {usage} [--dtype fp16] [--best] [--no-ema]")
    run_dir, file = map(Path, arguments.positionals)
    if file.suffix in OTHER_FORMATS and not file.is_dir():
        other = file.with_suffix(".safetensors")
        raise ConfigError(f"export {file}: the file is written in the format safetensors: name it {other}.")
    if file.is_dir() or arguments.positionals[1].endswith("/"):  # a folder that one can predict with
        with_model_folder(run_dir, file)
        file /= "model.safetensors"
    flags = arguments.flags
    dtype, averaged = flags.get("--dtype") or "fp32", "--no-ema" not in flags
    done = export(run_dir, file, dtype, "--best" in flags, averaged)
    what = ", the average of the weights (--no-ema: the weights themselves)" if done.averaged else ""
    value = ""
    if done.metric is not None:
        best = "the best evaluation, " if "--best" in flags else ""
        value = f" ({best}after step {done.step}: {done.metric.name} {done.metric.value:.6g})"
    print(f"{file}: {len(done.tensors)} tensors of {done.checkpoint}{value}{what}")
