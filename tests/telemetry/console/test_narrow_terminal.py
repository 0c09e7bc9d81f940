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

from launcher.process.terminal import columns_of, wrapped
from launcher.telemetry.console.progress_bar import Moment, bar_line
from launcher.telemetry.formatting import evaluation_cells, table_lines, table_widths
from tests.process.test_shortage import RECIPE, YAML
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

    def run(self, directory: Path, words: list[str], resize_to: int | None = None) -> int:
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
            if resize_to is not None:
                while b"scale" not in self.shown and process.poll() is None:
                    self._reader.join(0.01)
                self.resize(resize_to)
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


@pytest.mark.parametrize("columns", [40, *SLOW])
def test_a_run_fits_its_terminal(place: Path, columns: int) -> None:
    terminal = Terminal(columns)
    assert terminal.run(place, [*TRAIN, *QUICK]) == 0, terminal.shown.decode()
    lines = terminal.lines
    assert too_wide(lines, columns) == []
    bars = [line for line in lines if re.search(r"\bloss [\d.]+", line) and "done" not in line]
    words = {
        80: ["step", "loss", "samples/s", "scale", "skipped", "eta"],
        60: ["step", "loss", "scale", "/s"],
    }
    for word in words.get(columns, ["step", "loss", "scale"] if columns == 40 else ["loss"]):
        assert any(word in bar for bar in bars), (word, bars)
    assert any(re.fullmatch(r"[a-zA-Z1 ]*loss +accuracy[a-zA-Z1 ]*", line) for line in lines), "the titles"
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_a_terminal_that_becomes_narrower_is_fitted_from_then_on(place: Path) -> None:
    terminal = Terminal(120)
    words = [*TRAIN, *QUICK, "train.max_steps=60", "train.epochs=50"]
    assert terminal.run(place, words, resize_to=40) == 0
    lines = terminal.lines
    assert any(len(line) > 60 for line in lines), "wide at first"
    last_wide = max(number for number, line in enumerate(lines) if too_wide([line], 40))
    assert last_wide < len(lines) / 2, lines[last_wide]
    later = re.split(r"[\r\n]+", terminal.shown.decode())[last_wide + 1 :]
    assert too_wide([f"{part}." for part in later if part.strip()], 41) == [], "nor is anything padded wider"


def test_an_error_wraps_at_words(place: Path) -> None:
    terminal = Terminal(40)
    assert terminal.run(place, ["recipe=resnet81", "train.epochs=0"]) == 2
    assert too_wide(terminal.lines, 40) == []
    text = " ".join(" ".join(terminal.lines).split())
    assert "train.epochs=0: must be null or a whole number of at least 1." in text


USUAL = {"loss": 0.1271, "samples_per_s": 12597.0, "scale": 65536.0, "skipped": 3}
WIDE = {"loss": 0.0001234567, "samples_per_s": 1234567.0, "scale": 2.0**24, "skipped": 1234}
HUGE = {"loss": 1.23456e28, "samples_per_s": 1e12, "scale": 2.0**100, "skipped": 10**9}
EVERYTHING = "epoch 3/10  step 1234/5000, loss 0.1271, 12,597 samples/s, scale 65536, skipped 3, eta 1:02:03"


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (150, " 50% [####################                    ] " + EVERYTHING),
        (112, " 50% [#####     ] " + EVERYTHING),
        (111, EVERYTHING),
        (84, "step 1234/5000, loss 0.1271, 12,597 samples/s, scale 65536, skipped 3, eta 1:02:03"),
        (79, "step 1234, loss 0.1271, 12,597 samples/s, scale 65536, skipped 3, eta 1:02:03"),
        (70, "step 1234 loss 0.1271 12597/s scale 2^16 skipped 3 eta 1:02:03"),
        (60, "step 1234 loss 0.1271 12597/s scale 2^16 skipped 3"),
        (49, "step 1234 loss 0.1271 12597/s scale 2^16"),
        (39, "step 1234 loss 0.1271 scale 2^16"),
        (31, "1234 loss 0.1271 2^16"),
        (20, "1234 loss 0.1271"),
        (12, "loss 0.1271"),
        (8, "0.1271"),
        (3, ""),
    ],
)
def test_the_bar_shortens_in_the_stated_order(columns: int, text: str) -> None:
    assert bar_line(Moment("3/10", 1234, 5000, 0.5, 3723.0, made("step", 1234, **USUAL)), columns) == text


def tokens(line: str) -> set[str]:
    return set(re.findall(r"[\w.+^/-]+", line.replace(",", "").rpartition("]")[2]))


@pytest.mark.parametrize("record", [{}, USUAL, WIDE, HUGE, {**USUAL, "loss": float("nan"), "scale": 0.5}])
@pytest.mark.parametrize("step", [0, 10**12])
def test_no_number_and_no_word_is_cut_however_wide(step: int, record: dict) -> None:
    moment = Moment("3/10", step, 10**13, 0.5, 10**7, made("step", step, **record) if record else None)
    speed = f"{record.get('samples_per_s', 0):.0f}/s"
    whole = tokens(bar_line(moment, 10_000)) | {str(step), speed, "2^16", "2^24", "2^100"}
    for columns in range(1, 200):
        line = bar_line(moment, columns)
        assert len(line) <= columns
        assert tokens(line) <= whole, columns


@pytest.mark.parametrize("record", [USUAL, WIDE])
def test_80_columns_hold_everything_and_40_what_matters(record: dict) -> None:
    moment = Moment("30/100", 123_456, 500_000, 0.5, 37_230.0, made("step", 123_456, **record))
    line = bar_line(moment, 79)
    assert all(word in line for word in ("step 123456", "loss ", "/s", "scale ", "skipped ", "eta 10:20:30"))
    line = bar_line(moment, 39)
    assert all(word in line for word in ("step 123456", "loss ", "scale "))


EVALUATION = {"epoch": 29, "loss": 0.1271, "accuracy": 1.0} | {
    "macro_precision": 0.9743,
    "macro_recall": 0.9743,
    "macro_f1": 0.9743,
    "samples": 50_000,
    "seconds": 12.0021,
}


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (None, "epoch step loss accuracy precision recall F1 samples seconds"),
        (80, "epoch step loss accuracy precision recall F1 samples seconds"),
        (70, "epoch step loss accuracy precision recall F1 samples"),
        (60, "epoch step loss accuracy precision recall F1"),
        (40, "epoch step loss accuracy"),
        (24, "loss accuracy"),
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


def test_a_pipe_has_no_width() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as stream:
        assert columns_of(stream) is None
    assert columns_of(stream) is None, "nor has a closed stream"
