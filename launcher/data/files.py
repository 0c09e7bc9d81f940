"""Rows of TSV, CSV, JSON Lines and parquet files, by the names of their columns.

Owns the reading of these files and the errors for those that cannot be read: each names the file, and the
line or row. Values are as the file has them: what text means (a number, a label) is for who reads a column.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from launcher.data.libraries import optional
from launcher.errors import ConfigError, DataError, first_line, listed

TRAINING_NAMES = ("train",)
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")  # the first of these that a folder has
MADE_OF_WORDS = "set|data|val|dev|test"
NAMES_SHOWN = 20
SUFFIXES = (".tsv", ".txt", ".csv", ".jsonl", ".ndjson", ".parquet")
BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"

# The first of the files of a table, as the Hugging Face hub names them.
SHARD = re.compile(r"-00000-of-(\d{5})$")

Cell = Any  # text in TSV and CSV; any value of JSON or parquet, None where there is none

# Names of columns; a tuple: the first of these that the file has, or none of them where "" is among them.
Wanted = Sequence[str | tuple[str, ...]] | None


@dataclass(frozen=True)
class DataTable:
    """The columns of a file, all of one length. `places` are the lines of a text file, or the rows."""

    file: Path
    columns: dict[str, list[Cell]]
    places: Sequence[int]
    counted: str = "line"  # what `places` counts

    def __len__(self) -> int:
        return len(self.places)

    def place(self, row: int) -> str:
        """`FILE, line 17`, for messages on a row (counted from 0)."""
        return f"{self.file}, {self.counted} {self.places[row]}"

    def column(self, name: str) -> list[Cell]:
        """The values of a column. Raises DataError with the names of those that are there."""
        if name not in self.columns:
            raise missing_columns(self.file, [name], list(self.columns))
        return self.columns[name]

    def texts(self, name: str) -> list[str]:
        """The values of a column as text, whole numbers written out. Raises DataError for all others."""
        cells = self.column(name)
        for row, cell in enumerate(cells):
            if not isinstance(cell, str | int):
                found = "has no value" if cell is None else f"is a {type(cell).__name__}: {cell!r:.60}"
                raise DataError(f"{self.place(row)}: {name} {found}. It must be text or a whole number.")
        return [str(cell) for cell in cells]

    def select(self, rows: Sequence[int]) -> DataTable:
        """The rows at these indices."""
        columns = {name: [cells[row] for row in rows] for name, cells in self.columns.items()}
        return DataTable(self.file, columns, array("q", (self.places[row] for row in rows)), self.counted)


def read_table(file: Path, wanted: Wanted = None) -> DataTable:
    """Read a file by its suffix: .tsv, .txt, .csv, .jsonl, .ndjson, .parquet. `wanted`: these columns alone.

    All but parquet may end in .gz too.

    TSV and CSV begin with the names of the columns. TSV has no quoting: a quote is a character like others.
    So has .txt, which is read as TSV. Of a parquet file in parts the first is given, and all are read; whole
    numbers that its schema names as classes are these names.
    CSV quotes as RFC 4180 says. Text is UTF-8. A row of JSON or parquet may lack a value, which is None.
    Raises DataError for a file that cannot be read, has no rows, or lacks a column that is wanted.
    """
    if not is_table(file):
        raise DataError(f"{file} cannot be read as a table: its name must end in {', '.join(SUFFIXES)}.")
    suffix = _suffix(file)
    if suffix == ".parquet":
        table = _read_parquet(file, wanted)
    elif suffix in (".jsonl", ".ndjson"):
        table = _read_json_lines(file, wanted)
    elif suffix == ".csv":
        table = read_csv(file, wanted)
    else:
        table = _read_tsv(file, wanted)
    if not len(table):
        raise DataError(f"{file} has no rows below the names of its columns: {shown(list(table.columns))}.")
    return table


def is_table(file: Path) -> bool:
    """Whether the file is one that `read_table` reads, by its name."""
    return _suffix(file) in SUFFIXES and not (_suffix(file) == ".parquet" != file.suffix.lower())


def _suffix(file: Path) -> str:
    name = file.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def split_files(path: Path, of: str = "") -> tuple[Path, Path | None]:
    """The files to train and to validate on: of a folder train.* and validation.*, dev.* or test.*.

    Or such with the words in their names, as multinli.train.en.tsv; of several the one with the words `of`.

    A file is trained on, and nothing is set aside to validate on: None. Raises ConfigError for a path that
    is neither, DataError for a folder without such files.
    """
    if path.is_file():
        return path, None
    if not path.is_dir():
        raise ConfigError(f"data.path={path} is neither a file nor a folder.")
    tables = sorted(file for file in path.iterdir() if is_table(file))
    train = part_named(tables, TRAINING_NAMES, of)
    if train is None:
        found = listed(sorted(entry.name for entry in path.iterdir()), NAMES_SHOWN) or "nothing"
        raise DataError(
            f"data.path={path} has no table with train in its name ({', '.join(SUFFIXES)}). It has: {found}."
        )
    return train, part_named(tables, VALIDATION_NAMES, of)


def _picked(file: Path, there: Sequence[str], wanted: Wanted) -> list[str]:
    """The columns to read of a file that has these. Raises DataError for those that it lacks."""
    if wanted is None:
        return list(there)
    choices = [(each,) if isinstance(each, str) else each for each in wanted]
    found = {choice: next((name for name in choice if name in there), "") for choice in choices}
    if missing := [choice for choice, name in found.items() if not name and "" not in choice]:
        raise missing_columns(file, [" or ".join(choice) for choice in missing], there)
    return [name for name in there if name and name in found.values()]  # "" is none of a choice


class MissingColumnsError(DataError):
    """A file lacks columns, though it has the names of its columns as it should."""


def missing_columns(file: Path, missing: Sequence[str], there: Sequence[str]) -> DataError:
    """The error for columns that a file does not have."""
    which = f"the column {missing[0]}" if len(missing) == 1 else f"the columns {', '.join(missing)}"
    advice = _other_separator(there)
    kind = DataError if advice else MissingColumnsError
    return kind(f"{file} has not {which}. It has: {shown(there)}.{advice}")


def _other_separator(there: Sequence[str]) -> str:
    """What to do about a first line that has been taken for one name; empty where it looks like one."""
    found = re.search(r"[;,\t|]", there[0]) if len(there) == 1 else None
    if found is None:
        return ""
    return f" Its names seem to be separated by {found[0]!r}: write a .csv with commas and a .tsv with tabs."


def shown(names: Sequence[str]) -> str:
    """Names of columns for a message."""
    return listed(names, NAMES_SHOWN) or "none"


def read_text(file: Path) -> str:
    """The text of a UTF-8 file, without a mark of its byte order. Raises DataError."""
    try:
        data = file.read_bytes()
        data = gzip.decompress(data) if file.suffix.lower() == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        return data.decode("utf-8").removeprefix(BOM)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        likely = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
        raise DataError(
            f"{file}, line {line}: byte {data[error.start]:#04x} is no UTF-8. Convert the file, for instance "
            f"with iconv -f {likely} -t UTF-8."
        ) from None


def _read_tsv(file: Path, wanted: Wanted) -> DataTable:
    lines = read_text(file).split("\n")  # splitlines would break at characters within a cell
    numbered = ((number, line.removesuffix("\r")) for number, line in enumerate(lines, 1))
    rows = ((number, line.split("\t")) for number, line in numbered if line)
    return _from_rows(file, rows, wanted, "tabs")


def read_csv(file: Path, wanted: Wanted = None) -> DataTable:
    """Read a file of any name as CSV. Raises DataError."""
    return _from_rows(file, _csv_rows(file), wanted, "commas")


def _csv_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(sys.maxsize)  # of the whole process: a cell may be of any length
    reader = csv.reader(io.StringIO(read_text(file), newline=""), strict=True)
    line = 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{file}, line {line}: {error}. A cell that has a comma, a quote or a line break stands in "
            "quotes, and a quote within it is written twice. A file without quoting is a .tsv."
        ) from error


def _from_rows(
    file: Path, rows: Iterator[tuple[int, list[str]]], wanted: Wanted, separator: str
) -> DataTable:
    """A table of a file whose first row has the names of the columns. No two may have a name that is read."""
    _, names = next(rows, (0, []))
    names = [name.strip() for name in names]
    if not any(names):
        raise DataError(f"{file} is empty. Its first line must have the names of the columns.")
    picked = dict.fromkeys(_picked(file, names, wanted))
    if repeated := [name for name in picked if names.count(name) > 1]:
        raise DataError(f"{file} has more than one column named {', '.join(repeated)!r}. Rename them.")
    kept = [names.index(name) for name in picked]
    columns: list[list[Cell]] = [[] for _ in kept]
    places = array("q")
    for line, cells in rows:
        if len(cells) != len(names):
            raise DataError(
                f"{file}, line {line}: it has {len(cells)} cells separated by {separator}, the first line "
                f"{len(names)}: {shown(names)}.{_other_separator(names)}"
            )
        places.append(line)
        for column, index in zip(columns, kept, strict=True):
            column.append(cells[index])
    return DataTable(file, dict(zip((names[index] for index in kept), columns, strict=True)), places)


def _read_json_lines(file: Path, wanted: Wanted) -> DataTable:
    lines = enumerate(read_text(file).split("\n"), 1)
    rows = {number: _json_object(file, number, line) for number, line in lines if line.strip()}
    if not rows:
        raise DataError(f"{file} is empty. Each line must have a JSON object: a row, values by column.")
    names = list(dict.fromkeys(chain.from_iterable(rows.values())))
    columns = {name: [row.get(name) for row in rows.values()] for name in _picked(file, names, wanted)}
    return DataTable(file, columns, list(rows))


def _json_object(file: Path, number: int, line: str) -> dict[str, Cell]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DataError(f"{file}, line {number}: it is no JSON: {error}.") from error
    except RecursionError:
        raise DataError(f"{file}, line {number}: its JSON is nested too deeply.") from None
    if not isinstance(found, dict):
        raise DataError(f"{file}, line {number}: it is a JSON {type(found).__name__}, not an object.")
    return found


def _read_parquet(file: Path, wanted: Wanted) -> DataTable:
    pyarrow = optional("pyarrow", "parquet files need")
    parquet = import_module("pyarrow.parquet")
    columns: dict[str, list[Cell]] = {}
    num_rows = 0
    for part in _shards(file):
        try:
            with parquet.ParquetFile(part) as opened:
                kept = _picked(part, list(opened.schema_arrow.names), wanted)
                classes = _class_names(opened.schema_arrow.metadata or {})
                read = opened.read(columns=kept)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise DataError(f"{part} cannot be read as parquet: {first_line(error)}") from error
        for name in kept:
            names = dict(enumerate(classes.get(name, ())))
            cells = read.column(name).to_pylist()
            column = columns.setdefault(name, [])
            column += [names.get(cell, cell) for cell in cells] if names else cells
        num_rows += read.num_rows
    return DataTable(file, columns, range(num_rows), "row")


def _shards(file: Path) -> list[Path]:
    """All files of a table of which `file` is the first. Raises DataError where one is missing."""
    found = SHARD.search(file.stem)
    if found is None:
        return [file]
    beginning = file.stem[: found.start()]
    names = (f"{beginning}-{part:05}-of-{found[1]}{file.suffix}" for part in range(int(found[1])))
    parts = [file.with_name(name) for name in names]
    if absent := [part.name for part in parts if not part.is_file()]:
        raise DataError(
            f"{file} is the first of {len(parts)} files, of which these are missing: {listed(absent, 5)}."
        )
    return parts


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """The classes by column that `datasets` has written into a schema; none where it has not."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name: each["names"] for name, each in features.items() if each.get("_type") == "ClassLabel"}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def validation_file(folder: Path, name: str) -> Path:
    """The file of this name, or that of the folder whose name has the words of it: validation for dev too."""
    if (folder / name).is_file() or Path(name).suffix:
        return folder / name
    tables = sorted(file for file in folder.iterdir() if is_table(file))
    rest = " ".join(word for word in _words(name) if word not in VALIDATION_NAMES)
    return part_named(tables, VALIDATION_NAMES, rest) or folder / name


def part_named(files: Sequence[Path], words: Sequence[str], of: str = "") -> Path | None:
    """The first file whose name begins with one of the words, or else has one among its words, in any case.

    Of several the one that has the words `of` too, such as a language or `matched`.
    """
    also = set(_words(of))
    for word in words:
        begin = [file for file in files if begins_with_word(file.name, word)]
        within = [file for file in files if word in _words(file.stem)]
        for found in (begin, within):
            if narrowed := [file for file in found if also <= set(_words(file.stem))] or found:
                return narrowed[0]
    return None


def begins_with_word(name: str, word: str) -> bool:
    """Whether a file's name begins with this word: "val" with val.csv, val2017 and valSet, not values.csv.

    Or with one that is made of it and is usual for parts of data, as training, testset or trainval.
    """
    # The last part sees where the next word begins: at no letter, or at a capital after a small one.
    return bool(re.match(rf"(?i:{word}(ing)?({MADE_OF_WORDS})?)(?![a-z]|(?<=[A-Z])[A-Z])", name))


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+", name.lower())
