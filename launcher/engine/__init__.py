"""Data-parallel training steps in fp16 with fp32 masters. Usable with any training loop; needs only torch."""

from launcher.engine.adapter import TorchOptimizer
from launcher.engine.policy import Policy
from launcher.engine.refusal import EngineWarning, UnusableError
from launcher.engine.result import StepReport, StepResult
from launcher.engine.scale import Scaling
from launcher.engine.state import EngineState
from launcher.engine.stepper import Stepper
from launcher.engine.update import SGD, AdamW
from launcher.engine.wires import Wire

__all__ = [
    "SGD",
    "AdamW",
    "EngineState",
    "EngineWarning",
    "Policy",
    "Scaling",
    "StepReport",
    "StepResult",
    "Stepper",
    "TorchOptimizer",
    "UnusableError",
    "Wire",
]
