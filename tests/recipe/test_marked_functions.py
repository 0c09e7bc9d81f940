"""What a recipe file of one's own must have: a marked function with a name, and the right arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.recipe.registry import load_recipe
from tests.configs import composed

MADE = """
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe
import torch
from torch import nn

def made():
    data = TensorData({"image": torch.zeros(4, 2), "label": torch.zeros(4, dtype=torch.long)})
    return Recipe(lambda: nn.Linear(2, 2), data, data, cross_entropy, classes=("a", "b"))
"""


def loaded(file: Path, text: str) -> None:
    file.write_text(MADE + text)
    load_recipe(composed(f"recipes.path={file}", "recipe.uses=mine", "recipe.name=mine"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "def mine(config):\n    return made()\n",
            "recipe.uses=mine is not known. Known: bert, cnn, gpt, resnet",
        ),
    ],
)
def test_a_file_without_a_usable_recipe_is_one_sentence_with_its_line(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "mine.py"
    with pytest.raises(ConfigError) as caught:
        loaded(file, text)
    assert str(caught.value).startswith(sentence.format(file=file))
    assert "launcher/recipe/" not in caught.value.traceback
    assert not (caught.value.traceback and "SyntaxError" in sentence)


@pytest.mark.parametrize("decorator", ["@recipe", "@recipe()", "@recipe('mine')"])
def test_a_recipe_without_a_name_has_that_of_its_function(tmp_path: Path, decorator: str) -> None:
    loaded(tmp_path / "mine.py", f"{decorator}\ndef mine(config):\n    return made()\n")


def test_a_recipe_imports_the_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From whatever folder the launcher is started, and also later, in a function."""
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    (tmp_path / "beside_mine.py").write_text("VALUE = 3\n")
    loaded(
        tmp_path / "mine.py",
        "from beside_mine import VALUE\n@recipe('mine')\ndef mine(config):\n"
        "    import beside_mine\n    assert beside_mine.VALUE == VALUE == 3\n    return made()\n",
    )
