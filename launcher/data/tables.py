"""Rows of TSV, CSV, JSON Lines and parquet files, by the names of their columns, read by pyarrow.

Owns which files of a folder are read, and the errors for those that cannot be read. Cells of TSV and CSV are
text as the file has it; those of JSON and parquet are any values, None where there is none.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from launcher.data.libraries import optional
from launcher.data.part_files import TRAIN, VALIDATION, part_named, words_of
from launcher.errors import DataError, first_line, listed

NAMES_SHOWN = 20
OPTIONAL = ("language",)  # columns that are read where they are there
SUFFIXES = (".tsv", ".txt", ".csv", ".jsonl", ".parquet")
SEPARATORS = ",;\t|"  # of a .csv: the one that its first line has most of
BLOCK_BYTES = 1 << 26  # that are read at once; a row has to fit

# The first of the files of a table, as the Hugging Face hub names them.
SHARD = re.compile(r"-00000-of-(\d{5})$")

# By the name that a column gets: the names that it may have in a file. None: all columns, by their own names.
Wanted = Mapping[str, Sequence[str]] | None


@dataclass(frozen=True)
class DataTable:
    """The columns of a file, all of one length. `numbers` are those of the rows in the file, from 1."""

    file: Path
    columns: dict[str, list[Any]]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def place(self, row: int) -> str:
        """`FILE, row 17`, for messages on a row (counted from 0)."""
        return f"{self.file}, row {self.numbers[row]}"

    def texts(self, name: str) -> list[str]:
        """The values of a column as text, whole numbers written out. Raises DataError for all others."""
        cells = self.columns[name]
        for row, cell in enumerate(cells):
            if not isinstance(cell, str | int):
                found = "has no value" if cell is None else f"is a {type(cell).__name__}: {cell!r:.60}"
                raise DataError(f"{self.place(row)}: {name} {found}. It must be text or a whole number.")
        return [str(cell) for cell in cells]

    def select(self, rows: Sequence[int]) -> DataTable:
        """The rows at these indices."""
        columns = {name: [cells[row] for row in rows] for name, cells in self.columns.items()}
        return DataTable(self.file, columns, [self.numbers[row] for row in rows])


def read_table(file: Path, wanted: Wanted = None) -> DataTable:
    """Read a file by its suffix: .tsv, .txt, .csv, .jsonl, .parquet. `wanted`: these columns alone.

    TSV and CSV begin with the names of the columns. TSV has no quoting, and a .txt is read as TSV. Of a
    parquet file in parts the first is given, and all are read; whole numbers that its schema names as classes
    are these names. Raises DataError for a file that cannot be read, has no rows, or lacks a column that is
    wanted.
    """
    if not is_table(file):
        raise DataError(f"{file} cannot be read as a table: its name must end in {', '.join(SUFFIXES)}.")
    library = optional("pyarrow", "tables need")
    suffix = file.suffix.lower()
    try:
        if suffix == ".parquet":
            found = _read_parquet(file, wanted)
        elif suffix == ".jsonl":
            found = _read_json_lines(file, wanted)
        else:
            found = _read_separated(file, wanted, quoted=suffix == ".csv")
    except (OSError, ValueError, library.ArrowException) as error:  # DataError is none of these
        raise DataError(f"{file} cannot be read: {first_line(error)}") from error
    columns = {name.strip(): cells for name, cells in found.items()}
    num_rows = max(map(len, columns.values()), default=0)
    if not num_rows:
        raise DataError(f"{file} has no rows.")
    return DataTable(file, columns, range(1, 1 + num_rows))


def _read_separated(file: Path, wanted: Wanted, quoted: bool) -> dict[str, list[Any]]:
    """Cells as text. CSV quotes as RFC 4180 says, TSV not at all: a quote is a character like others."""
    arrow, csv = import_module("pyarrow"), import_module("pyarrow.csv")
    content = file.read_bytes()
    first_row = content.lstrip().partition(b"\n")[0].decode(errors="replace")
    separator = max(SEPARATORS, key=first_row.count) if quoted else "\t"
    how = {
        # In one thread, because loader processes are forked later.
        "read_options": csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
        "parse_options": csv.ParseOptions(
            delimiter=separator, quote_char='"' if quoted else False, newlines_in_values=quoted
        ),
    }
    with csv.open_csv(arrow.BufferReader(content), **how) as reader:
        names = reader.schema.names
    kept = _picked(file, names, wanted)
    if repeated := next((name for name in kept.values() if names.count(name) > 1), None):
        raise DataError(f"{file} has more than one column named {repeated!r}. Rename them.")
    texts = dict.fromkeys(kept.values(), arrow.string())
    as_text = csv.ConvertOptions(include_columns=list(texts), column_types=texts, strings_can_be_null=False)
    table = csv.read_csv(arrow.BufferReader(content), convert_options=as_text, **how)
    return {name: table.column(there).to_pylist() for name, there in kept.items()}


def _read_json_lines(file: Path, wanted: Wanted) -> dict[str, list[Any]]:
    reading = import_module("pyarrow.json")
    options = reading.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    table = reading.read_json(str(file), read_options=options)
    kept = _picked(file, table.column_names, wanted)
    return {name: table.column(there).to_pylist() for name, there in kept.items()}


def _read_parquet(file: Path, wanted: Wanted) -> dict[str, list[Any]]:
    parquet = import_module("pyarrow.parquet")
    columns: dict[str, list[Any]] = {}
    for part in _shards(file):
        with parquet.ParquetFile(part) as opened:
            kept = _picked(part, opened.schema_arrow.names, wanted)
            classes = _class_names(opened.schema_arrow.metadata or {})
            table = opened.read(columns=list(kept.values()), use_threads=False)
        for name, there in kept.items():
            names = dict(enumerate(classes.get(there, ())))
            cells = table.column(there).to_pylist()
            columns.setdefault(name, []).extend(names.get(cell, cell) if names else cell for cell in cells)
    return columns


def _shards(file: Path) -> list[Path]:
    """All files of a table of which `file` is the first. Raises DataError where one is missing."""
    found = SHARD.search(file.stem)
    if found is None:
        return [file]
    parts = sorted(file.parent.glob(f"{glob.escape(file.stem[: found.start()])}-*-of-{found[1]}.parquet"))
    if len(parts) != int(found[1]):
        raise DataError(f"{file} is the first of {int(found[1])} files, of which {len(parts)} are there.")
    return parts


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """The classes by column that `datasets` has written into a schema; none where it has not."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name: each["names"] for name, each in features.items() if each.get("_type") == "ClassLabel"}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def is_table(file: Path) -> bool:
    """Whether the file is one that `read_table` reads, by its name."""
    return file.suffix.lower() in SUFFIXES


def split_files(path: Path, of: str = "") -> tuple[Path, Path | None]:
    """The files to train and to validate on: of a folder train.* and validation.*, dev.* or test.*.

    Or such with the words in their names, as multinli.train.en.tsv; of several the one with the words `of`.

    A file is trained on, and nothing is set aside to validate on: None. Raises DataError for a folder without
    such files.
    """
    if path.is_file():
        return path, None
    tables = sorted(file for file in path.iterdir() if is_table(file))
    train = part_named(tables, TRAIN, of)
    if train is None:
        found = listed(sorted(entry.name for entry in path.iterdir()), NAMES_SHOWN) or "nothing"
        raise DataError(
            f"data.path={path} has no table with train in its name ({', '.join(SUFFIXES)}). It has: {found}."
        )
    return train, part_named(tables, VALIDATION, of)


def validation_file(folder: Path, name: str) -> Path:
    """The file of this name, or that of the folder whose name has the words of it: validation for dev too."""
    if (folder / name).is_file() or Path(name).suffix:
        return folder / name
    tables = sorted(file for file in folder.iterdir() if is_table(file))
    rest = " ".join(word for word in words_of(name) if word not in VALIDATION)
    return part_named(tables, VALIDATION, rest) or folder / name


def _picked(file: Path, there: Sequence[str], wanted: Wanted) -> dict[str, str]:
    """The columns to read of a file that has these, by the name that they get.

    Raises DataError for those that it lacks, but for OPTIONAL.
    """
    if wanted is None:
        return {name: name for name in there}
    found = {name: next((each for each in choice if each in there), None) for name, choice in wanted.items()}
    missing = [" or ".join(wanted[name]) for name, each in found.items() if not each and name not in OPTIONAL]
    if missing:
        raise DataError(
            f"{file} has not the column {' and '.join(missing)}. It has: {listed(there, NAMES_SHOWN)}. "
            "data.sentence1, data.sentence2 and data.label name the columns that are read."
        )
    return {name: each for name, each in found.items() if each}
