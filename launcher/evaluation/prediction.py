"""Predictions of a trained model for files: what a run records for them, and what reads it.

Owns the file `prediction.json`, the reading of photographs, texts and rows as an evaluation reads them, and
the forward pass. Never trains, and needs no training data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from launcher.data.augment import Normalise
from launcher.data.images.image_dataset import BASE_OVER_CROP, ImageDataset
from launcher.data.images.image_file import as_rgb, center_crop, decode, read_crop
from launcher.data.libraries import optional
from launcher.data.tensors import TensorData
from launcher.data.text.plain import read_text
from launcher.errors import ConfigError, DataError, first_line
from launcher.recipe.contract import ModelBuilder, Recipe, normalisation_of
from launcher.recipe.registry import look_up, registry_of

FACTS = "prediction.json"
BATCH_SIZE = 64  # samples of a forward pass


def facts_of(recipe: Recipe, recipes_path: str | None = None) -> dict[str, Any]:
    """What predicting needs besides the weights, as JSON.

    `classes` in the order of the logits; `normalisation` of images, mean and deviation per channel for pixels
    in 0..1; `input`, the kind and size of the samples; `model`, what builds it, with its arguments.
    """
    facts: dict[str, Any] = {
        "classes": None if recipe.classes is None else list(recipe.classes),
        "normalisation": normalisation_of(recipe),
    }
    builder, train = inspect.unwrap(recipe.build_model), recipe.train
    arguments: dict[str, Any] = getattr(getattr(builder, "build", None), "keywords", {})
    if isinstance(builder, ModelBuilder):
        facts["model"] = {"name": builder.name, "arguments": arguments, "file": recipes_path}
    if isinstance(train, ImageDataset):
        facts["input"] = {"kind": "photograph", "size": train.options.image_size}
    elif hasattr(train, "tokenizer"):
        facts["input"] = {"kind": "text", "max_seq_len": arguments.get("max_seq_len")}
    elif isinstance(train, TensorData):
        images = train.columns.get("image")
        if images is not None and images.ndim == 4:
            facts["input"] = {"kind": "image", "size": images.shape[1:]}
        else:  # also for a column of this name that holds rows of numbers
            facts["input"] = {"kind": "row"}
    return {name: value for name, value in facts.items() if value is not None}


class Predictor:
    """A model with trained weights, and the preprocessing of its evaluations.

    `build` makes the model where the facts do not say how: of a run whose recipe builds it itself.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        build: Callable[[], nn.Module] | None = None,
    ) -> None:
        self._folder, self._facts = folder, facts
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._input: Mapping[str, Any] = facts.get("input", {"kind": "row"})
        self._network = self._built(build)
        self._network.load_state_dict(weights)
        self._network.eval().to(self._device)

    def predictions(self, file: Path) -> Iterator[tuple[str, str]]:
        """Name and result of each sample of a file: a photograph, a line of text, a row of numbers."""
        if not file.is_file():
            raise DataError(f"{file}: there is no such file.")
        samples = self._samples(file)
        for begin in range(0, len(samples), BATCH_SIZE):
            try:
                found = self._logits(samples[begin : begin + BATCH_SIZE])
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # torch's, of shapes
                raise DataError(f"{file} does not fit the model: {first_line(error)}") from error
            for row, logits in enumerate(found, begin + 1):
                yield f"{file}:{row}" if len(samples) > 1 else str(file), self._said(logits)

    def _built(self, build: Callable[[], nn.Module] | None) -> nn.Module:
        if self._input["kind"] == "text":
            transformers = optional("transformers")
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
            config = transformers.AutoConfig.from_pretrained(self._folder, local_files_only=True)
            network: nn.Module = transformers.AutoModelForSequenceClassification.from_config(config)
            return network
        if (model := self._facts.get("model")) is not None:
            models = registry_of(model["file"]).models
            return look_up("model.name", model["name"], models)(**model["arguments"])
        if build is None:
            raise ConfigError(
                "predict: this folder does not say how its model is built. Give the run in its place, or "
                "offer the model with @model, as recipes/cnn.py does, and train again."
            )
        return build()

    def _samples(self, file: Path) -> Any:
        match self._input["kind"]:
            case "photograph":
                return read_crop(file, str(file), center_crop(1 / BASE_OVER_CROP), self._input["size"])[None]
            case "image":
                return decode(file, str(file), self._one_size).reshape(1, *self._input["size"][1:], -1)
            case "text":  # two sentences are separated by a tab
                samples = [line.split("\t", 1) for line in read_text(file).splitlines() if line.strip()]
                if len(set(map(len, samples))) > 1:
                    raise DataError(
                        f"{file} has lines with a tab, between two sentences, and others without."
                    )
                return samples
        try:
            rows = np.load(file) if file.suffix == ".npy" else np.loadtxt(file, delimiter=",", ndmin=2)
        except ValueError as error:
            raise DataError(f"{file} is no table of numbers: {first_line(error)}") from error
        return np.asarray(rows, dtype=np.float32)

    def _one_size(self, image: Image.Image) -> Image.Image:
        channels, height, width = self._input["size"]
        resized = as_rgb(image).resize((width, height), Image.Resampling.BILINEAR)
        return resized if channels == 3 else resized.convert("L")

    @torch.inference_mode()
    def _logits(self, samples: Any) -> Tensor:
        """fp32 [samples, classes]."""
        if self._input["kind"] == "text":
            columns = [list(column) for column in zip(*samples, strict=True)]
            limits = {"max_length": self._input["max_seq_len"], "truncation": True, "padding": True}
            batch = self._tokenizer(*columns, return_tensors="pt", **limits).to(self._device)
            logits: Tensor = self._network(**batch).logits
            return logits.float().cpu()
        inputs = torch.from_numpy(np.array(samples)).to(self._device)
        if self._input["kind"] == "image":
            inputs = inputs.permute(0, 3, 1, 2)
        if constants := self._facts.get("normalisation"):
            inputs = Normalise(tuple(constants["mean"]), tuple(constants["std"]))(inputs)
        logits = self._network(inputs)
        return logits.float().cpu()

    def _said(self, logits: Tensor) -> str:
        classes = self._facts.get("classes")
        if classes is None:
            return ", ".join(f"{value:.6g}" for value in logits.flatten().tolist())
        likely = logits.softmax(dim=0).topk(min(3, len(classes)))
        pairs = zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
        return ", ".join(f"{classes[index]} {share:.2%}" for index, share in pairs)
