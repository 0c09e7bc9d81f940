"""The machine of a benchmark, recorded with its results."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Processor, cores, load, GPU, versions and date."""
    return {
        "cpu": cpu_model(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "huge_pages_for_tensors": os.environ.get("THP_MEM_ALLOC_ENABLE") == "1",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


def cpu_model() -> str:
    """The processor's name as Linux reports it, otherwise as Python does."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
