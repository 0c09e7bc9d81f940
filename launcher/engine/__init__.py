"""Data-parallel training steps in fp16 with fp32 masters. Usable with any training loop; needs only torch."""

from launcher.engine.ema import AverageState, ExponentialMovingAverage
from launcher.engine.errors import EngineWarning, UnusableError
from launcher.engine.grads.collectives import DDPOptions
from launcher.engine.optim.muon import MuonWithAdamW
from launcher.engine.optim.optimizers import SGD, AdamW
from launcher.engine.optim.torch_optimizer import TorchOptimizer
from launcher.engine.params.param_groups import ParameterGroup
from launcher.engine.precision.loss_scale import ScaleStart, Scaling
from launcher.engine.precision.outliers import SkipOutliers
from launcher.engine.precision.policy import Policy
from launcher.engine.result import StepReport, StepResult
from launcher.engine.state import EngineState
from launcher.engine.stepper import Stepper

__all__ = [
    "SGD",
    "AdamW",
    "AverageState",
    "DDPOptions",
    "EngineState",
    "EngineWarning",
    "ExponentialMovingAverage",
    "MuonWithAdamW",
    "ParameterGroup",
    "Policy",
    "ScaleStart",
    "Scaling",
    "SkipOutliers",
    "StepReport",
    "StepResult",
    "Stepper",
    "TorchOptimizer",
    "UnusableError",
]
