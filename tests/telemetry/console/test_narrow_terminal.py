"""What people see in 80 columns and fewer, through the real command on a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from launcher.os.terminal import wrapped
from launcher.telemetry.formatting import evaluation_cells, table_lines, table_widths
from tests.os.test_oom import RECIPE, YAML
from tests.telemetry.made import made

ROOT = Path(__file__).parents[3]
TRAIN = ["recipe=tiny", "recipes.path=mine.py", "--config-dir", "own", "run.dir=run", "launch.nproc=1"]
NO_PICTURES = "from tests.ranks.harness import leave_out_pictures; leave_out_pictures()"
QUICK = ["train.epochs=3", "data.batch_size=8", "train.log_every_steps=2", "tracker=none"]


class Terminal:
    """A pseudo-terminal of some columns, and all that has been written to it."""

    def __init__(self, columns: int) -> None:
        self._leader, self.follower = pty.openpty()
        self.resize(columns)
        self.shown = bytearray()
        self._reader = threading.Thread(target=self._read)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def run(self, directory: Path, words: list[str]) -> int:
        command = [sys.executable, "-m", "launcher", *words]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        with subprocess.Popen(
            command,
            cwd=directory,
            env=environ | {"PYTHONPATH": str(ROOT), "HOME": str(directory)},
            stdin=subprocess.DEVNULL,
            stdout=self.follower,
            stderr=self.follower,
        ) as process:
            self._reader.start()
            code = process.wait(60)
        os.close(self.follower)
        self._reader.join()
        os.close(self._leader)
        return code

    def _read(self) -> None:
        try:
            while chunk := os.read(self._leader, 65536):
                self.shown.extend(chunk)
        except OSError:  # Linux: the other side is closed
            pass

    @property
    def lines(self) -> list[str]:
        """Each text between two returns, without what follows it to erase the line before."""
        return [line.rstrip() for line in re.split(r"[\r\n]+", self.shown.decode())]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "own" / "recipe").mkdir(parents=True)
    (tmp_path / "own" / "recipe" / "tiny.yaml").write_text(YAML)
    (tmp_path / "mine.py").write_text(RECIPE.replace("{build}", NO_PICTURES))
    return tmp_path


def too_wide(lines: list[str], columns: int) -> list[str]:
    """The lines that do not fit, but for single words, such as a path, that are kept whole to be copied."""
    return [line for line in lines if len(line) > columns and " " in line.strip()]


SLOW = [pytest.param(columns, marks=pytest.mark.slow) for columns in (80, 60, 20)]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("columns", [40, *SLOW])
def test_a_run_fits_its_terminal(place: Path, columns: int) -> None:
    terminal = Terminal(columns)
    assert terminal.run(place, [*TRAIN, *QUICK]) == 0, terminal.shown.decode()
    lines = terminal.lines
    assert too_wide(lines, columns) == []
    bars = [line for line in lines if line.startswith("epoch 1/3 |")]
    words = {80: ["8/8", "loss 0.", "eta ", "samples/s", "scale 65536"], 60: ["8/8", "loss 0.", "eta "]}
    for word in words.get(columns, ["8/8", "loss 0."] if columns == 40 else []):
        assert any(word in bar for bar in bars), (word, bars)
    assert any(re.fullmatch(r"[a-zA-Z1_ ]*val_loss +accuracy[a-zA-Z1_ ]*", line) for line in lines), (
        "the titles"
    )
    assert not any("Traceback" in line for line in lines)


EVALUATION = {"epoch": 29, "val_loss": 0.1271, "accuracy": 1.0} | {
    "macro_precision": 0.9743,
    "macro_recall": 0.9743,
    "macro_f1": 0.9743,
    "samples": 50_000,
    "seconds": 12.0021,
}


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (None, "epoch step val_loss accuracy precision recall F1 samples seconds"),
        (80, "epoch step val_loss accuracy precision recall F1 samples seconds"),
        (72, "epoch step val_loss accuracy precision recall F1 samples"),
        (62, "epoch step val_loss accuracy precision recall F1"),
        (40, "epoch step val_loss accuracy"),
        (24, "val_loss accuracy"),
    ],
)
def test_an_evaluation_leaves_out_columns_from_the_right(columns: int | None, titles: str) -> None:
    cells = evaluation_cells(made("eval", 250_000, **EVALUATION))
    lines = table_lines(cells, table_widths(cells, columns), with_titles=True)
    assert lines[0].split() == titles.split()
    assert len(lines[0]) == len(lines[1])
    assert columns is None or len(lines[0]) <= columns


def test_wrapping_keeps_words_and_indents() -> None:
    text = "2 problems:\n  first: a-hyphenated word and more\n  /a/path/that/is/too/long"
    assert wrapped(text, 16).split("\n") == [
        "2 problems:",
        "  first:",
        "    a-hyphenated",
        "    word and",
        "    more",
        "  /a/path/that/is/too/long",
    ]
    assert wrapped(text, None) == text
