"""Sets of samples, and the order in which ranks read them. What recipes import is exported here."""

from launcher.data.images import ImageSet, Normalise, crop_and_flip, load_images
from launcher.data.loader import Batch, TensorData

__all__ = ["Batch", "ImageSet", "Normalise", "TensorData", "crop_and_flip", "load_images"]
