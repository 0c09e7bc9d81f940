"""CPU tests see no GPU, on a machine with one too; tests on a GPU see it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import os
import pytest

@pytest.mark.gpu
def test_on_a_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"

@pytest.mark.gpus2
def test_on_two_gpus():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"

def test_on_a_cpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selected", "outcome"),
    [
        ("gpu or gpus2", "2 passed, 1 deselected"),
        pytest.param("not gpu and not gpus2", "1 passed, 2 deselected", marks=pytest.mark.slow),
        ("gpu or gpus2 or not gpu", "1 passed, 2 skipped"),
    ],
)
def test_a_session_shows_the_gpus_to_all_of_its_tests_or_to_none(tmp_path, selected, outcome) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_collection_finish\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    gpus2\n")
    (tmp_path / "test_kinds.py").write_text(TESTS)
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", selected, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "3"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stdout
    assert outcome in finished.stdout


def test_this_session_hides_them() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
