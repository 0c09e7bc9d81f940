"""Data sets and the order in which ranks read them. Exports what recipes import."""

from launcher.data.image_set import ImageSet, Normalise, crop_and_flip
from launcher.data.images import load_images
from launcher.data.pretrained import pretrained_encoder
from launcher.data.reader import columns
from launcher.data.sentences import SentenceSet, load_sentences
from launcher.data.tabular import TabularSet, load_table
from launcher.data.tensors import Batch, TensorData
from launcher.data.text import TextSet, load_text

__all__ = [
    "Batch",
    "ImageSet",
    "Normalise",
    "SentenceSet",
    "TabularSet",
    "TensorData",
    "TextSet",
    "columns",
    "crop_and_flip",
    "load_images",
    "load_sentences",
    "load_table",
    "load_text",
    "pretrained_encoder",
]
