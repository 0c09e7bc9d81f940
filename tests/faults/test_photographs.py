"""Whole runs on photographs in class folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.images.photographs import write_classes
from tests.faults.launching import run

SMALL = (
    *(
        "recipe.uses=resnet",
        "recipes.path=null",
        "data=imagefolder",
        "data.image_size=8",
        "data.batch_size=6",
    ),
    *("data.val_fraction=0.25", "train.epochs=2", "checkpoint.every_steps=null", "data.crop_scale=0.3"),
)


@pytest.mark.slow
def test_two_ranks_train_on_photographs_from_a_cache_that_is_built_once(tmp_path: Path) -> None:
    """The first run builds it; the second maps what that one left, with other loader processes."""
    words = (f"data.path={write_classes(tmp_path / 'set')}", f"data.cache={tmp_path / 'cache'}", *SMALL)
    cold = run(tmp_path / "cold", *words, "data.num_workers=1", ranks=2)
    assert cold.codes == [0, 0], cold
    assert cold.result["data"] == "imagefolder"
    assert len(list((tmp_path / "cache").glob("*.images"))) == 1
    warm = run(tmp_path / "warm", *words, "data.num_workers=0", ranks=2)
    assert warm.digest == cold.digest


@pytest.mark.slow
def test_a_broken_photograph_ends_the_run_with_its_name(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "set")
    for file in (folder / "cat").iterdir():
        file.write_bytes(b"\xff\xd8\xff\xe0 no image")
    ended = run(tmp_path / "run", f"data.path={folder}", "data.cache=none", "data.num_workers=1", *SMALL)
    assert ended.codes == [7], ended
    assert f"{folder / 'cat'}" in ended.outputs[0]
    assert "cannot be read as an image" in ended.outputs[0]
    assert "data.max_bad_samples" in ended.outputs[0]
