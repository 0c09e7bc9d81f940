"""Metrics of an evaluation: what one is, and the built-in ones. Values in, numbers out; no communication."""

from launcher.metrics.classification import Classification
from launcher.metrics.metric import LossMetric, Metric
from launcher.metrics.perplexity import Perplexity

__all__ = ["Classification", "LossMetric", "Metric", "Perplexity"]
