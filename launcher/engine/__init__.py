"""Data-parallel training steps in fp16 with fp32 masters. Usable with any training loop; needs only torch."""

from launcher.engine.policy import Policy
from launcher.engine.result import StepReport, StepResult
from launcher.engine.scale import Scaling
from launcher.engine.stepper import Stepper, Wire
from launcher.engine.update import SGD, AdamW

__all__ = ["SGD", "AdamW", "Policy", "Scaling", "StepReport", "StepResult", "Stepper", "Wire"]
