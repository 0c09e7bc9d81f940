"""What predicting with a run's weights needs besides them: `model/` of a run, which `export RUN DIR/` copies.

Owns its files: classes and normalisation, and for a model of `transformers` its config and tokenizer.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from launcher.errors import StorageError, described
from launcher.recipe.contract import Recipe
from launcher.run_dir.atomic import write_text
from launcher.run_dir.records import MODEL


def facts_for_prediction(recipe: Recipe) -> dict[str, Any]:
    """The classes in the order of the logits, and the `normalisation` of images, where there are any.

    Mean and deviation are per channel, for pixels in 0..1.
    """
    transform = recipe.eval_transform and inspect.unwrap(recipe.eval_transform)
    facts = {
        "classes": None if recipe.classes is None else list(recipe.classes),
        "normalisation": getattr(transform, "normalisation", None),
    }
    return {name: value for name, value in facts.items() if value is not None}


def write_model_folder(
    run_dir: Path, recipe: Recipe, network: nn.Module, warn: Callable[[str], None]
) -> None:
    """Write what is known before the first step. Raises StorageError; other failures are warnings."""
    folder = run_dir / MODEL
    try:
        folder.mkdir(exist_ok=True)
        write_text(folder / "prediction.json", json.dumps(facts_for_prediction(recipe), indent=1) + "\n")
        config: Any = copy.deepcopy(getattr(network, "config", None))
        if callable(getattr(config, "save_pretrained", None)):  # of transformers
            config.architectures = [type(network).__name__]
            if recipe.classes is not None:
                config.id2label = dict(enumerate(recipe.classes))
                config.label2id = {name: number for number, name in enumerate(recipe.classes)}
            config.save_pretrained(folder)
        if callable(save := getattr(getattr(recipe.train, "tokenizer", None), "save_pretrained", None)):
            save(folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error
    except Exception as error:  # of a config or tokenizer, which training does not need
        warn(f"{folder} is incomplete, and so is what export makes of it: {described(error)}")
