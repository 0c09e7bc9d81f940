"""The GPUs of this node, measured through NVML beside the training. Torch-free."""

from launcher.telemetry.gpu.sampler import GpuSampler, measure_gpus

__all__ = ["GpuSampler", "measure_gpus"]
