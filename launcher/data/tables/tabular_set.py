"""Sets of rows with one target column, for regression and classification, in memory.

Owns the sources by name (`diabetes`, `wine`, `table`), the split of tables that come without one, and the
target. Features are `launcher.data.tables.features`'. Never communicates: every rank loads the same set.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor

from launcher.config.messages import unknown_name
from launcher.config.rules import list_of, string
from launcher.config.schema import DataConfig
from launcher.data.options import options_of, refuse_path
from launcher.data.split import class_numbers, numbered, parts, refuse_one_class
from launcher.data.tables.columns import Column, are_amounts, is_absent, kind_of, number_of
from launcher.data.tables.features import Features, absent_in, is_numeric, numbers, refuse_absent
from launcher.data.tables.files import (
    DataTable,
    missing_columns,
    no_such_column,
    read_table,
    shown,
    split_files,
)
from launcher.data.tensors import TensorData
from launcher.errors import ConfigError, DataError, listed

NAMELESS = ("", "Unnamed: 0", "__index_level_0__")  # of the index that pandas writes

SHOWN = 12  # columns of a kind
MOST_CLASSES = 20  # of whole numbers that are taken for classes

log = logging.getLogger("launcher")


Target = Annotated[
    str,
    string("the name of a column: a number in quotes, such as 'data.target=\"5\"'", lambda value: True),
]
Columns = Annotated[
    Sequence[str],
    list_of(string("a name", lambda value: True), "a list of columns, such as [colour,size]"),
]
Separator = Annotated[str, string("one character, such as ';' or \"\\t\"", lambda value: len(value) == 1)]


@dataclass(frozen=True)
class TableOptions:
    """The keys of data=table and of other tables."""

    target: Target | None = None
    # auto: classification of text, and of at most 20 different whole numbers
    task: Literal["auto", "regression", "classification"] = "auto"
    categorical: Columns = ()  # that are read as categories though they have numbers
    leave_out: Columns = ()  # that are not read, such as numbers of rows
    missing: Literal["refuse", "impute"] = "refuse"
    separator: Separator | None = None  # between the cells of a text file; None: by the suffix
    decimal: Literal[".", ","] = "."


Source = Callable[[DataConfig, TableOptions], tuple[DataTable, DataTable | None]]


@dataclass(frozen=True)
class TabularSet:
    """Columns "numeric" fp32 [n, columns], "categorical" int64 [n, columns], where there are such.

    And "target" fp32 [n] in its own unit, fp64 where its spread is below a thousandth of its size, such as
    times in seconds; or "label" int64 [n] where `classes` are given.
    """

    train: TensorData
    validation: TensorData
    features: Features
    classes: tuple[str, ...] | None
    target_mean: float = 0.0  # of the training rows
    target_std: float = 1.0


def load_table(config: DataConfig) -> TabularSet:
    """Load the set `config.name`. Raises ConfigError for a wrong config, DataError for unusable data."""
    if config.name not in SOURCES:
        raise ConfigError(unknown_name(f"data.name={config.name} as a table", config.name, list(SOURCES)))
    options = options_of(config, TableOptions)
    train, validation = SOURCES[config.name](config, options)
    target, names = target_and_features(train, options)
    if validation is not None and (lacking := [n for n in (*names, target) if n not in validation.columns]):
        raise missing_columns(validation.file, lacking, list(validation.columns))
    tables = [table for table in (train, validation) if table is not None]
    for table in tables:
        if counts := absent_in(table, [target]):
            refuse_absent(table, counts, "It is the target: complete these rows or remove them.")
    read = [name for name in (*names, target) if name not in options.categorical]
    kinds = {name: kind for name in read if (kind := understood(tables, name, options.decimal))}
    classifies = is_classification(train, target, options)
    if validation is None:
        labels = numbered(train.column(target).categories) if classifies else torch.zeros(len(train))
        split = parts(labels, config.val_fraction, f"rows of {train.file}", DataError)
        train, validation = (train.select(rows) for rows in split)
    _handle_absent((train, validation), names, options.missing)
    features = Features.fit(train, names, options.categorical)
    classes = _classes(train, target) if classifies else None
    kind = "a class" if classifies else kinds.get(target) or "a number"
    left_out = [name for name in train.columns if name not in (*names, target)]
    about = "; ".join(
        [*_about(features, kinds, left_out), f"target: {target}, {kind}", *_unseen(features, validation)]
    )
    column = "target" if classes is None else "label"
    mean, std = _moments(train, target) if classes is None else (0.0, 1.0)
    dtype = torch.float64 if abs(mean) > 1000 * std else torch.float32  # which would round away the spread
    train_set, validation_set = (
        TensorData(features.columns(table) | {column: _targets(table, target, classes, dtype)}, config.name)
        for table in (train, validation)
    )
    return TabularSet(replace(train_set, about=about), validation_set, features, classes, mean, std)


def _about(features: Features, kinds: Mapping[str, str], left_out: Sequence[str]) -> list[str]:
    """How each column was read, in words."""
    read: dict[str, list[str]] = {}
    for column in features.numeric:
        read.setdefault(kinds.get(column.name) or "numbers", []).append(column.name)
    read["categories"] = [f"{each.name} ({len(each.categories):,})" for each in features.categorical]
    read["left out"] = [name or "the one without a name" for name in left_out]
    return [f"{kind}: {listed(names, SHOWN)}" for kind, names in read.items() if names]


def _unseen(features: Features, validation: DataTable) -> list[str]:
    """Which columns of the validation rows have categories that the training rows lack, in words."""
    counts = {each.name: each.num_unseen(validation) for each in features.categorical}
    found = [f"{name} ({count:,} rows)" for name, count in counts.items() if count]
    about = f"categories in the validation rows that the training rows lack: {listed(found, SHOWN)}"
    return [about] if found else []


def row_numbers(table: DataTable) -> list[str]:
    """Columns that count the rows from 0 or 1: pandas' index, whose name is none."""
    found = []
    for name in NAMELESS:
        if name in table.columns and len(numbers := table.columns[name].numbers):
            counts = torch.arange(len(numbers)) + numbers[0]
            found += [name] if numbers[0] in (0, 1) and torch.equal(numbers, counts) else []
    return found


def understood(tables: Sequence[DataTable], name: str, decimal: str) -> str:
    """Replace the cells of a column by numbers where its rows in the first table are such of a kind.

    Returns the kind; "" for a column that stays as it is. Raises ConfigError where data.decimal seems wrong.
    """
    column = tables[0].columns[name]
    if decimal == "." and column.is_numeric:
        return ""
    cells = column.present
    if not cells:
        return ""
    if found := kind_of(cells, decimal):
        kind, read = found
        for table in tables:
            values = table.columns[name].each(lambda cell: None if is_absent(cell) else read(cell))
            pairs = zip(table.columns[name], values, strict=True)
            table.columns[name] = Column(cell if value is None else value for cell, value in pairs)
        return kind
    other = "." if decimal == "," else ","
    if are_amounts(cells, other):
        raise ConfigError(
            f"{tables[0].file}: {name} has numbers such as {cells[0]!r:.40}, with {other!r} before the "
            f"decimals. Set data.decimal='{other}', or read it as categories: data.categorical=[{name}]."
        )
    return ""


def _handle_absent(tables: Sequence[DataTable], names: Sequence[str], missing: str) -> None:
    """Raise DataError for absent values, or log their numbers where data.missing replaces them."""
    for table in tables:
        if not (counts := absent_in(table, names)):
            continue
        if missing == "refuse":
            refuse_absent(
                table,
                counts,
                "Complete them, or set data.missing=impute: the mean of the training rows for numbers, a "
                "category of their own for the others.",
            )
        listing = ", ".join(f"{name} ({count})" for name, count in counts.items())
        log.warning("%s: absent values are replaced, data.missing=%s: %s", table.file, missing, listing)


def target_and_features(table: DataTable, options: TableOptions) -> tuple[str, list[str]]:
    """The column to predict and those to learn from. ConfigError for columns that are not there."""
    target, there = options.target, shown(list(table.columns))
    if not target:
        raise ConfigError(f"data.target names the column to predict. {table.file} has: {there}.")
    if target in options.leave_out:
        raise ConfigError(
            f"data.leave_out has {target}, which is data.target. Leave other columns out, or predict another "
            "one."
        )
    named = {"target": [target], "categorical": options.categorical, "leave_out": options.leave_out}
    for key, name in ((key, name) for key, columns in named.items() for name in columns):
        if name not in table.columns:
            raise no_such_column(f"data.{key}", name, table.file, list(table.columns))
    out = {target, *options.leave_out, *row_numbers(table)}
    names = [name for name in table.columns if name not in out]
    if not names:
        raise ConfigError(
            f"no column is left to learn from: {table.file} has {there}, of which data.target={target} and "
            "data.leave_out take all."
        )
    return target, names


def is_classification(table: DataTable, target: str, options: TableOptions) -> bool:
    """Whether the target is a class, by data.task or by its values."""
    if options.task != "auto":
        return options.task == "classification"
    if target in options.categorical or not is_numeric(table, target):
        return True
    values = numbers(table, target)
    return len(set(values.tolist())) <= MOST_CLASSES and torch.equal(values, values.round())


def _moments(train: DataTable, target: str) -> tuple[float, float]:
    """Mean and standard deviation of the target. Raises DataError where all training rows have the same."""
    values = numbers(train, target)
    if (values == values[0]).all():
        raise DataError(
            f"the target {target} is {values[0]:g} in all {len(train)} training rows: there is nothing to "
            "learn."
        )
    return float(values.mean()), float(values.std(correction=0))


def _classes(train: DataTable, target: str) -> tuple[str, ...]:
    """The labels of the training rows, as numbers if all are such. Raises DataError for a single one."""
    classes = sorted(set(train.column(target).categories))
    if not any(math.isnan(number_of(each)) for each in classes):
        classes.sort(key=number_of)  # those of equal floats stay as they are, the same on all ranks
    refuse_one_class(classes, f"the target {target} of {train.file}")
    return tuple(classes)


def _targets(table: DataTable, target: str, classes: Sequence[str] | None, dtype: torch.dtype) -> Tensor:
    """Numbers of this dtype [rows], or int64 of the classes. DataError for a label that is none of them."""
    if classes is None:
        return numbers(table, target).to(dtype)
    texts = table.column(target).categories
    return torch.tensor(class_numbers(texts, classes, lambda row: f"{table.place(row)}, {target}"))


def of_file(config: DataConfig, options: TableOptions) -> tuple[DataTable, DataTable | None]:
    """data.path: a CSV, TSV, JSON Lines or parquet file, or a folder with train.* and validation.*"""
    if config.path is None:
        raise ConfigError("data=table needs data.path=FILE or a folder with train.* and validation.* files.")
    train, validation = split_files(Path(config.path))
    held_out = None if validation is None else read_table(validation, separator=options.separator)
    return read_table(train, separator=options.separator), held_out


def of_sklearn(load: str, target: str, **arguments: bool) -> Source:
    """A set that scikit-learn carries, read by its function `load`."""

    def read(config: DataConfig, options: TableOptions) -> tuple[DataTable, None]:
        refuse_path(config, "comes with scikit-learn")
        import sklearn.datasets

        found = getattr(sklearn.datasets, load)(**arguments)
        columns = dict(zip(found["feature_names"], map(Column, found["data"].T.tolist()), strict=True))
        columns |= {target: Column(found["target"].tolist())}
        return DataTable(Path(f"sklearn.datasets.{load}"), columns, range(len(found["target"])), "row"), None

    return read


SOURCES: Mapping[str, Source] = {
    "diabetes": of_sklearn("load_diabetes", "progression", scaled=False),
    "wine": of_sklearn("load_wine", "cultivar"),
    "table": of_file,
}
