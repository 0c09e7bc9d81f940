"""The GPUs of this node, measured through NVML beside the training. Torch-free."""

from launcher.telemetry.gpu.devices import Rank
from launcher.telemetry.gpu.sampler import GpuSampler, measure_gpus

__all__ = ["GpuSampler", "Rank", "measure_gpus"]
