"""Sets of rows with one target column, for regression and classification, in memory.

Owns the sources by name (`diabetes`, `wine`, `table`), the split of tables that come without one, and the
target. Features are `launcher.data.tables.features`'. Never communicates: every rank loads the same set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.config.messages import nearest, suggestion
from launcher.config.rules import either, list_of, null, one_of, string
from launcher.config.schema import DataConfig
from launcher.data.options import Known, options_of
from launcher.data.split import numbered, parts
from launcher.data.tables.columns import Column, are_amounts, is_absent, kind_of
from launcher.data.tables.features import (
    IMPUTE,
    REFUSE,
    Features,
    absent_in,
    is_numeric,
    numbers,
    refuse_absent,
)
from launcher.data.tables.files import Table, missing_columns, no_such_column, read_table, shown, split_files
from launcher.data.tensors import TensorData
from launcher.errors import ConfigError, DataError, listed

NAMELESS = ("", "Unnamed: 0", "__index_level_0__")  # of the index that pandas writes

SHOWN = 12  # columns of a kind
MOST_CLASSES = 20  # of whole numbers that are taken for classes

log = logging.getLogger("launcher")


columns = list_of(string("a name", lambda value: True), "a list of columns, such as [colour,size]")
OPTIONS: Known = {
    "target": (
        None,
        either(
            null,
            string(
                "the name of a column: a number in quotes, such as 'data.target=\"5\"'", lambda value: True
            ),
        ),
    ),
    "task": ("auto", one_of("auto", "regression", "classification")),
    "categorical": ([], columns),
    "leave_out": ([], columns),
    "missing": (REFUSE, one_of(REFUSE, IMPUTE)),
    "separator": (
        None,
        either(null, string("one character, such as ';' or \"\\t\"", lambda value: len(value) == 1)),
    ),
    "decimal": (".", one_of(".", ",")),
}


@dataclass(frozen=True)
class Options:
    """The keys of `data` that tables have beside those of all sets."""

    target: str  # empty where none is named
    task: str  # auto: classification of text, and of at most 20 different whole numbers
    categorical: Sequence[str]  # columns that are read as categories though they have numbers
    leave_out: Sequence[str]  # columns that are not read, such as numbers of rows
    missing: str
    separator: str | None  # between the cells of a text file; None: by the suffix
    decimal: str


@dataclass(frozen=True)
class TabularSet:
    """Columns "numeric" fp32 [n, columns], "categorical" int64 [n, columns], where there are such.

    And "target" fp32 [n] in its own unit, or "label" int64 [n] where `classes` are given.
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
        raise ConfigError(
            f"data.name={config.name} is no table.{suggestion(nearest(config.name, SOURCES))} Known: "
            f"{', '.join(SOURCES)}."
        )
    values = options_of(config, OPTIONS)
    options = Options(**values | {"target": values["target"] or ""})
    train, validation, names, classifies, kinds = _split_tables(config, options)
    _handle_absent((train, validation), names, options.missing)
    features = Features.fit(train, names, options.categorical)
    build = classification if classifies else regression
    found = build(train, validation, features, options.target, config.name)
    left_out = [name for name in train.columns if name not in (*names, options.target)]
    about = _about(features, kinds, left_out, options.target, classifies, validation)
    return replace(found, train=replace(found.train, about=about))


def _about(
    features: Features,
    kinds: Mapping[str, str],
    left_out: Sequence[str],
    target: str,
    classifies: bool,
    validation: Table,
) -> str:
    """How each column was read, in words."""
    read: dict[str, list[str]] = {}
    for column in features.numeric:
        read.setdefault(kinds.get(column.name) or "numbers", []).append(column.name)
    read["categories"] = [f"{each.name} ({len(each.categories):,})" for each in features.categorical]
    read["left out"] = [name or "the one without a name" for name in left_out]
    parts = [f"{kind}: {listed(names, SHOWN)}" for kind, names in read.items() if names]
    kind = "a class" if classifies else kinds.get(target) or "a number"
    parts.append(f"target: {target}, {kind}")
    if unseen := {each.name: each.num_unseen(validation) for each in features.categorical}:
        counts = [f"{name} ({count:,} rows)" for name, count in unseen.items() if count]
        if counts:
            parts.append(
                f"categories in the validation rows that the training rows lack: {listed(counts, SHOWN)}"
            )
    return "; ".join(parts)


def _split_tables(
    config: DataConfig, options: Options
) -> tuple[Table, Table, list[str], bool, dict[str, str]]:
    """Training and validation rows, the columns to learn from, whether the target is a class, and the kinds
    of columns whose cells stand for numbers.
    """
    train, validation = SOURCES[config.name](config)
    names = feature_names(train, options)
    if validation is not None and (
        lacking := [n for n in (*names, options.target) if n not in validation.columns]
    ):
        raise missing_columns(validation.file, lacking, list(validation.columns))
    for table in (train, validation):
        if table is not None and (counts := absent_in(table, [options.target])):
            refuse_absent_target(table, options.target, counts[options.target])
    tables = [table for table in (train, validation) if table is not None]
    read = [name for name in (*names, options.target) if name not in options.categorical]
    kinds = {name: kind for name in read if (kind := understood(tables, name, options.decimal))}
    classifies = is_classification(train, options)
    if validation is None:
        train, validation = split_rows(train, options.target if classifies else None, config.val_fraction)
    return train, validation, names, classifies, kinds


def row_numbers(table: Table) -> list[str]:
    """Columns that count the rows from 0 or 1: pandas' index, whose name is none."""
    found = []
    for name in NAMELESS:
        if name in table.columns and len(numbers := table.columns[name].numbers):
            counts = torch.arange(len(numbers)) + numbers[0]
            found += [name] if numbers[0] in (0, 1) and torch.equal(numbers, counts) else []
    return found


def understood(tables: Sequence[Table], name: str, decimal: str) -> str:
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


def _handle_absent(tables: Sequence[Table], names: Sequence[str], missing: str) -> None:
    """Raise DataError for absent values, or log their numbers where data.missing replaces them."""
    for table in tables:
        if not (counts := absent_in(table, names)):
            continue
        if missing == REFUSE:
            refuse_absent(table, counts)
        listing = ", ".join(f"{name} ({count})" for name, count in counts.items())
        log.warning(
            "%s: absent values are replaced as data.missing=%s says: %s", table.file, missing, listing
        )


def feature_names(table: Table, options: Options) -> list[str]:
    """The columns to learn from. Raises ConfigError for columns in the config that the table lacks."""
    if not options.target:
        raise ConfigError(
            f"data.target names the column to predict. {table.file} has: {shown(list(table.columns))}."
        )
    if options.target in options.leave_out:
        raise ConfigError(
            f"data.leave_out has {options.target}, which is data.target. Leave other columns out, or predict "
            "another one."
        )
    named = {"target": [options.target], "categorical": options.categorical, "leave_out": options.leave_out}
    for key, name in ((key, name) for key, columns in named.items() for name in columns):
        if name not in table.columns:
            raise no_such_column(f"data.{key}", name, table.file, list(table.columns))
    out = {options.target, *options.leave_out, *row_numbers(table)}
    names = [name for name in table.columns if name not in out]
    if not names:
        raise ConfigError(
            f"no column is left to learn from: {table.file} has {shown(list(table.columns))}, of which "
            f"data.target={options.target} and data.leave_out take all."
        )
    return names


def refuse_absent_target(table: Table, target: str, count: int) -> None:
    """Raise DataError: no option replaces a target."""
    row = int(table.column(target).absent.int().argmax())
    raise DataError(
        f"the target {target} is absent or NaN in {count} of {len(table)} rows, first in {table.place(row)}: "
        "complete these rows or remove them."
    )


def is_classification(table: Table, options: Options) -> bool:
    """Whether the target is a class, by data.task or by its values."""
    if options.task != "auto":
        return options.task == "classification"
    if options.target in options.categorical or not is_numeric(table, options.target):
        return True
    values = numbers(table, options.target)
    return len(set(values.tolist())) <= MOST_CLASSES and torch.equal(values, values.round())


def split_rows(table: Table, stratified_by: str | None, val_fraction: float) -> tuple[Table, Table]:
    """Hold out `val_fraction` of the rows, of each class where there are classes."""
    labels = numbered(table.column(stratified_by).categories) if stratified_by else torch.zeros(len(table))
    train, validation = parts(labels, val_fraction, f"rows of {table.file}", DataError)
    return table.select(train), table.select(validation)


def regression(train: Table, validation: Table, features: Features, target: str, name: str) -> TabularSet:
    """The target as it is, and its mean and standard deviation over the training rows."""
    targets = [numbers(table, target) for table in (train, validation)]
    if (targets[0] == targets[0][0]).all():
        raise DataError(
            f"the target {target} is {targets[0][0]:g} in all {len(train)} training rows: there is nothing "
            "to learn."
        )
    sets = _sets(features, (train, validation), {"target": [each.float() for each in targets]}, name)
    mean, std = float(targets[0].mean()), float(targets[0].std(correction=0))
    return TabularSet(*sets, features, None, mean, std)


def classification(train: Table, validation: Table, features: Features, target: str, name: str) -> TabularSet:
    """The classes are those of the training rows; other labels are refused."""
    texts = [table.column(target).categories for table in (train, validation)]
    classes = _sorted_classes(set(texts[0]))
    if len(classes) < 2:
        raise DataError(
            f"the target {target} has one class, {classes[0]!r}, in all {len(train)} training rows."
        )
    if unknown := sorted(set(texts[1]) - set(classes)):
        row = texts[1].index(unknown[0])
        raise DataError(
            f"{validation.place(row)}: the label {unknown[0]!r} of {target} is in no training row. They "
            f"have: {listed(list(classes), 8)}."
        )
    codes = {each: code for code, each in enumerate(classes)}
    labels = [torch.tensor([codes[text] for text in of_set]) for of_set in texts]
    return TabularSet(*_sets(features, (train, validation), {"label": labels}, name), features, classes)


def _sorted_classes(classes: set[str]) -> tuple[str, ...]:
    try:
        return tuple(sorted(classes, key=float))
    except ValueError:
        return tuple(sorted(classes))


def _sets(
    features: Features, tables: Sequence[Table], targets: Mapping[str, Sequence[Tensor]], name: str
) -> tuple[TensorData, TensorData]:
    made = [
        TensorData(features.columns(table) | {key: values[index] for key, values in targets.items()}, name)
        for index, table in enumerate(tables)
    ]
    return made[0], made[1]


def of_file(config: DataConfig) -> tuple[Table, Table | None]:
    """data.path: a CSV, TSV, JSON Lines or parquet file, or a folder with train.* and validation.*"""
    if config.path is None:
        raise ConfigError("data=table needs data.path=FILE or a folder with train.* and validation.* files.")
    train, validation = split_files(Path(config.path))
    separator = config.options.get("separator")
    tables = [read_table(file, separator=separator) for file in (train, validation) if file is not None]
    return tables[0], tables[1] if validation else None


def of_sklearn(load: str, target: str) -> Callable[[DataConfig], tuple[Table, None]]:
    """A set that scikit-learn carries, read by its function `load`."""

    def read(config: DataConfig) -> tuple[Table, None]:
        if config.path is not None:
            raise ConfigError(
                f"data={config.name} comes with scikit-learn and reads no files. Remove data.path."
            )
        import sklearn.datasets

        options: dict[str, Any] = {"scaled": False} if load == "load_diabetes" else {}
        found = getattr(sklearn.datasets, load)(**options)
        columns = dict(zip(found["feature_names"], map(Column, found["data"].T.tolist()), strict=True))
        columns |= {target: Column(found["target"].tolist())}
        return Table(Path(f"sklearn.datasets.{load}"), columns, range(len(found["target"])), "row"), None

    return read


SOURCES: Mapping[str, Callable[[DataConfig], tuple[Table, Table | None]]] = {
    "diabetes": of_sklearn("load_diabetes", "progression"),
    "wine": of_sklearn("load_wine", "cultivar"),
    "table": of_file,
}
