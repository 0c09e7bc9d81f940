"""Data sets and the order in which ranks read them. Exports what recipes import."""

from launcher.data.augment import Normalise, crop_and_flip
from launcher.data.images.registry import ImageSet, load_images
from launcher.data.reader import columns
from launcher.data.tensors import Batch, TensorData
from launcher.data.text.plain import TextSet, load_text
from launcher.data.text.pretrained import pretrained_encoder
from launcher.data.text.sentences import SentenceSet, load_sentences

__all__ = [
    "Batch",
    "ImageSet",
    "Normalise",
    "SentenceSet",
    "TensorData",
    "TextSet",
    "columns",
    "crop_and_flip",
    "load_images",
    "load_sentences",
    "load_text",
    "pretrained_encoder",
]
