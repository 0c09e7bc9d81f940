"""The names of the files of pictures."""

from __future__ import annotations

import pytest

from launcher.trainer.after_evaluation import MAX_STEM_BYTES, file_stems


@pytest.mark.parametrize(
    "names",
    [
        ("вход", "выход"),
        ("入力", "出力", "入"),
        ("a/figure", "a figure", "a_figure", "A_figure"),
        ("!", "?", ""),
        ("x" * 400, "x" * 401),
        ("caf\udce9", "caf\udcea"),
        ("../up", "..", "."),
        ("e\u0301t", "\u00e9t"),
    ],
)
def test_different_names_are_different_files(names, tmp_path) -> None:
    stems = file_stems(names)
    assert list(stems) == list(names)
    files = {tmp_path / f"{stem}-00000001.png" for stem in stems.values()}
    for file in files:
        file.touch()
        assert file.parent == tmp_path
    assert len({file.name.casefold() for file in files}) == len(names)
    assert all(len(stem.encode()) < MAX_STEM_BYTES + 10 for stem in stems.values())


def test_plain_names_stay_as_they_are() -> None:
    assert file_stems(["confusion", "a/figure", "вход"]) == {
        "confusion": "confusion",
        "a/figure": "a_figure",
        "вход": "вход",
    }
