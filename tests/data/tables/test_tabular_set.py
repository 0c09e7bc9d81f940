"""Tables with a target: kinds of columns, standardisation, categories, absent values, bad input."""

from __future__ import annotations

import gzip
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
import torch

from launcher.config.schema import DataConfig
from launcher.data.tables.columns import Column, amount
from launcher.data.tables.tabular_set import load_table
from launcher.errors import ConfigError, DataError
from launcher.telemetry.event_log import read_events
from tests.configs import composed
from tests.forked import launch_forked

ROWS = [f"{i % 7},{['red', 'blue', 'green'][i % 3]},{i % 2},{i * 1.5}" for i in range(40)]


def data_of(path: Path, **options) -> DataConfig:
    config = composed("recipe=tabular").data
    values = {"target": "price", "task": "auto" if "target" in options else "regression"} | options
    return replace(config, name="table", path=str(path), options=values)


def written(folder: Path, rows=ROWS, name="set.csv", header="size,colour,sold,price") -> Path:
    file = folder / name
    file.write_text("\n".join([header, *rows]) + "\n")
    return file


def test_numbers_are_standardised_with_the_training_rows_alone(tmp_path) -> None:
    written(tmp_path, ["0,a,1,1", "2,b,1,2", "4,a,1,4"], "train.csv")
    written(tmp_path, ["2,c,1,9", "6,a,1,3", "4,b,0,3"], "validation.csv")
    table = load_table(data_of(tmp_path))
    std = (8 / 3) ** 0.5
    numeric = table.validation.columns["numeric"]
    assert [column.name for column in table.features.numeric] == ["size", "sold"]
    assert numeric[:, 0].tolist() == pytest.approx([0, 4 / std, 2 / std])
    assert numeric[:, 1].tolist() == [0.0, 0.0, -1.0], "a constant column has the deviation 1"
    assert table.train.columns["numeric"].mean(dim=0).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert (table.target_mean, table.target_std) == pytest.approx((7 / 3, (14 / 9) ** 0.5))
    assert table.validation.columns["target"].tolist() == [9, 3, 3]


def test_a_small_spread_far_from_zero_is_learned_as_near_zero(tmp_path) -> None:
    from recipes.tabular import SquaredError

    found = []
    for shift in (0, 10**9):
        rows = [f"{i % 7},a,1,{shift + i * 0.25 % 3}" for i in range(40)]
        table = load_table(data_of(written(tmp_path, rows, f"{shift}.csv")))
        batch = table.validation.columns
        loss = SquaredError(table)(lambda numbers, _: numbers[:, :1] * 0 + 0.5, batch)
        found.append((loss.sum.item(), (loss.outputs - shift).tolist(), loss.sum.dtype))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5)
    assert found[1][2] == torch.float32


def test_categories_that_training_lacks_have_a_code_of_their_own(tmp_path) -> None:
    written(tmp_path, ["0,b,1,1", "2,a,1,2", "4,b,1,4"], "train.csv")
    written(tmp_path, ["2,c,1,9", "6,a,1,3", "4,b,0,3"], "validation.csv")
    table = load_table(data_of(tmp_path, categorical=["size"]))
    assert [(c.name, c.categories) for c in table.features.categorical] == [
        ("size", ("0", "2", "4")),
        ("colour", ("a", "b")),
    ]
    assert table.validation.columns["categorical"].tolist() == [[2, 0], [0, 1], [3, 2]]


def test_what_stands_for_a_number_is_read_as_one_and_said(tmp_path) -> None:
    """Amounts of money, percentages, thousands and dates are no categories; pandas' index is left out."""
    rows = [
        f'{i},"$1,{i:03}.50",{i % 9}.5%,2024-01-{i % 28 + 1:02},{i % 12 + 1}/{i % 28 + 1}/2023,'
        f"{'ab'[i % 2]},{i * 2}"
        for i in range(40)
    ]
    written(tmp_path, rows[:30], "train.csv", ",cost,rate,day,seen,kind,price")
    written(
        tmp_path,
        [*rows[30:], "40,$2.00,1%,2024-02-01,1/1/2023,c,5"],
        "validation.csv",
        ",cost,rate,day,seen,kind,price",
    )
    table = load_table(data_of(tmp_path))
    assert [column.name for column in table.features.numeric] == ["cost", "rate", "day", "seen"]
    assert table.features.numeric[0].mean == pytest.approx(1000.5 + 14.5)
    assert table.features.numeric[2].std == pytest.approx(8.05, abs=0.5), "in days"
    assert table.train.about == (
        "money: cost; percent: rate; dates, as days: day; dates, as days, %m/%d/%Y: seen; categories: "
        "kind (2); left out: the one without a name; target: price, a number; categories in the validation "
        "rows that the training rows lack: kind (1 rows)"
    )


def test_a_file_of_europe_in_a_compressed_form(tmp_path) -> None:
    rows = [f"{i},5;{'ab'[i % 2]};1.{i:03},25" for i in range(40)]
    (tmp_path / "set.csv.gz").write_bytes(gzip.compress("\n".join(["size;kind;price", *rows]).encode()))
    options = {"separator": ";", "decimal": ","}
    table = load_table(data_of(tmp_path / "set.csv.gz", **options))
    assert table.features.numeric[0].mean == pytest.approx(20, abs=3)
    assert table.target_mean == pytest.approx(1019.75, abs=3)
    with pytest.raises(ConfigError, match=r"has numbers such as '0,5', with ',' before .*data\.decimal=','"):
        load_table(data_of(tmp_path / "set.csv.gz", separator=";"))
    with pytest.raises(DataError, match=r"or set data\.separator"):
        load_table(data_of(tmp_path / "set.csv.gz"))
    (tmp_path / "torn.csv.gz").write_bytes((tmp_path / "set.csv.gz").read_bytes()[:60])
    with pytest.raises(DataError, match=r"torn\.csv\.gz cannot be read"):
        load_table(data_of(tmp_path / "torn.csv.gz"))


@pytest.mark.parametrize(
    ("cell", "decimal", "value"),
    [
        ("1,234.5", ".", 1234.5),
        ("1.234,5", ",", 1234.5),
        ("-$3", ".", -3),
        ("$-3.25", ".", -3.25),
        ("(12 EUR)", ".", -12),
        ("99 %", ".", 99),
        (".5", ".", 0.5),
        ("1e3", ".", 1000),
        ("1,5", ".", None),
        ("1.5", ",", None),
        ("12 Main St", ".", None),
        ("$", ".", None),
        ("", ".", None),
    ],
)
def test_amounts(cell, decimal, value) -> None:
    assert amount(cell, decimal) == value


def test_what_only_looks_like_dates_stays_categories(tmp_path) -> None:
    rows = [f"{i},{'2024-01-01' if i else 'never'},{i % 3}-{i % 2}-x,{i}" for i in range(1, 41)]
    table = load_table(data_of(written(tmp_path, [*rows, "41,never,0-0-x,41"], header="id,day,code,price")))
    assert [column.name for column in table.features.categorical] == ["day", "code"]
    assert table.train.about.endswith("left out: id; target: price, a number") is False


def test_parquet_and_csv_give_the_same(tmp_path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    file = written(tmp_path)
    pandas.read_csv(file).to_parquet(tmp_path / "set.parquet")
    one, other = (load_table(data_of(tmp_path / f"set.{kind}")) for kind in ("csv", "parquet"))
    assert one.features == other.features
    for name, column in one.train.columns.items():
        assert torch.equal(column, other.train.columns[name])


@pytest.mark.parametrize(
    ("options", "classes"),
    [
        ({"task": "auto"}, None),
        ({"target": "colour"}, ("blue", "green", "red")),
        ({"target": "sold"}, ("0", "1")),
        ({"target": "size", "task": "regression"}, None),
        ({"target": "size", "task": "classification"}, tuple("0123456")),
    ],
)
def test_text_and_few_whole_numbers_are_classes(options, classes, tmp_path) -> None:
    table = load_table(data_of(written(tmp_path), **options))
    assert table.classes == classes
    assert ("label" if classes else "target") in table.train.columns
    assert len(table.train) + len(table.validation) == 40
    if classes and len(classes) < 7:
        assert set(table.validation.columns["label"].tolist()) == set(range(len(classes))), "stratified"


ABSENT = ["0,a,1,1", ",b,1,2", "4,,0,4", "nan,a,1,4", "5,a,0,3"]


def test_absent_values_are_refused_with_column_and_count_or_replaced(tmp_path) -> None:
    written(tmp_path, ABSENT, "train.csv")
    written(tmp_path, ["1,a,1,1"], "validation.csv")
    with pytest.raises(
        DataError, match=r"3 values are absent or NaN in .*: size \(2\), colour \(1\)"
    ) as caught:
        load_table(data_of(tmp_path))
    assert "train.csv, line 3" in str(caught.value)
    assert "data.missing=impute" in str(caught.value)
    columns = load_table(data_of(tmp_path, missing="impute")).train.columns
    assert columns["numeric"][[1, 3], 0].tolist() == [0, 0]
    assert columns["numeric"].isfinite().all()
    assert columns["categorical"][:, 0].tolist() == [1, 2, 0, 1, 1]


BAD = {
    "no_such_target": (
        ROWS,
        {"target": "cost"},
        ConfigError,
        "^data.target=cost: .* has not the column cost. It has: size, colour",
    ),
    "no_target": (
        ROWS,
        {"target": None},
        ConfigError,
        r"names the column to predict\. .*set.csv has: size, colour",
    ),
    "a_number_as_target": (
        ROWS,
        {"target": 5},
        ConfigError,
        "data.target=5: must be null or the name of a column: a number in quotes",
    ),
    "constant": ([f"{i},a,1,7" for i in range(9)], {}, DataError, "price is 7 in all 7 training rows"),
    "one_class": (
        [f"{i},a,1,7" for i in range(9)],
        {"target": "colour"},
        DataError,
        r"target colour of .*set\.csv has one class, a\.",
    ),
    "text": ([*ROWS, "abc,red,1,3"], {}, DataError, r"line 42: size is 'abc', and the column has numbers"),
    "infinite": ([*ROWS, "inf,red,1,3"], {}, DataError, r"line 42: size is 'inf'"),
    "no_price": (
        [*ROWS, "1,red,1,"],
        {},
        DataError,
        r"1 values are absent or NaN in .*: price \(1\)\. The first is in .* 42\. It is the target",
    ),
    "nothing_varies": (["1,a,1,1", "1,a,1,2", "1,a,1,3"], {}, DataError, "one value in all training rows"),
    "empty_column": (
        [f"{i},,1,{i}" for i in range(9)],
        {"missing": "impute"},
        DataError,
        "colour has no value",
    ),
    "empty_split": (["1,a,1,1", "2,b,1,2"], {}, DataError, "of the 2 rows .* leaves 2 for training and 0"),
    "odd_option": (
        ROWS,
        {"targt": "price"},
        ConfigError,
        "data.targt is not an option.* Nearest: target",
    ),
    "odd_task": (ROWS, {"task": "guess"}, ConfigError, "data.task='guess': must be one of auto, regression"),
    "odd_missing": (
        ROWS,
        {"missing": "drop"},
        ConfigError,
        "data.missing='drop': must be one of refuse, impute",
    ),
    "odd_list": (
        ROWS,
        {"categorical": "size"},
        ConfigError,
        "data.categorical='size': must be a list of columns",
    ),
    "target_left_out": (
        ROWS,
        {"leave_out": ["price"]},
        ConfigError,
        "data.leave_out has price, which is data.target",
    ),
    "all_left_out": (
        ROWS,
        {"leave_out": ["size", "colour", "sold"]},
        ConfigError,
        "no column is left to learn from",
    ),
    "odd_column": (ROWS, {"leave_out": ["id"]}, ConfigError, "^data.leave_out=id: .* has not the column id"),
    "misspelt_column": (ROWS, {"categorical": ["color"]}, ConfigError, "Nearest: colour"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tables_are_refused(case, tmp_path) -> None:
    rows, options, kind, text = BAD[case]
    fraction = {"val_fraction": 0.2}
    with pytest.raises(kind, match=text):
        load_table(replace(data_of(written(tmp_path, rows), **options), **fraction))


def test_another_separator_is_the_files_mistake_and_not_the_configs(tmp_path) -> None:
    (tmp_path / "set.csv").write_text("size;price\n1;2\n3;4\n")
    with pytest.raises(DataError, match=r"has not the column price.* seem to be separated by ';'"):
        load_table(data_of(tmp_path / "set.csv"))


def test_labels_that_are_in_no_training_row_are_refused(tmp_path) -> None:
    written(tmp_path, ["0,b,1,1", "2,a,1,2"], "train.csv")
    written(tmp_path, ["2,a,1,9", "6,c,1,3"], "validation.csv")
    with pytest.raises(
        DataError,
        match=r"validation.csv, line 3, colour: 1 label\(s\) are not in the training set: c\. .* a, b",
    ):
        load_table(data_of(tmp_path, target="colour"))


@pytest.mark.slow
@pytest.mark.parametrize(("data", "metric", "least"), [("diabetes", "r2", 0.35), ("wine", "accuracy", 0.9)])
def test_the_recipe_learns_what_every_machine_has(data, metric, least, tmp_path) -> None:
    words = ["recipe=tabular", f"data={data}", "train.epochs=12", "tracker=none", "run.dir=run"]
    done = launch_forked(tmp_path, [*words, "launch.nproc=2", "train.log_every_steps=1000"])
    assert done.returncode == 0, done.stderr
    (*_, last) = (e for e in read_events(tmp_path / "run" / "metrics.jsonl") if e["event"] == "eval")
    assert last[metric] > least
    assert last.keys() >= ({"mae", "rmse", "r2"} if data == "diabetes" else {"accuracy", "macro_f1"})


def test_a_table_of_ones_own_trains_from_the_command_line(tmp_path) -> None:
    written(tmp_path)
    words = ["recipe=tabular", "data=table", "data.path=set.csv", "data.target=sold", "tracker=none"]
    done = launch_forked(tmp_path, [*words, "data.leave_out=[size]", "train.max_steps=2", "run.dir=run"])
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


@pytest.mark.parametrize(
    ("cells", "categories"),
    [
        (("1_0", "10"), ("10", "1_0")),
        (("2019_01", "2019_02"), ("2019_01", "2019_02")),
        (("10", "10.0", "1e1"), ("10",)),
        (("90071992547409921", "90071992547409922"), ("90071992547409921", "90071992547409922")),
        (("1e17", "100000000000000000"), ("100000000000000000",)),
    ],
)
def test_texts_are_one_category_where_they_are_the_same_number(cells, categories, tmp_path) -> None:
    rows = [f"{cells[i % len(cells)]},{i % 2},{i}.5" for i in range(40)]
    columns = {"header": "code,sold,price"}
    features = load_table(data_of(written(tmp_path, rows, **columns), categorical=["code", "sold"])).features
    assert features.categorical[0].categories == categories


def test_cells_of_several_types_are_numbers_where_each_is() -> None:
    cells = Column([1, 0.5, "2", "1_0", True, None, Decimal(4), "x"])
    assert cells.numbers.nan_to_num(nan=-1).tolist() == [1, 0.5, 2, -1, -1, -1, 4, -1]
    assert Column([1, None, 10**400]).numbers.nan_to_num(nan=-1).tolist() == [1, -1, -1]
    assert Column([1, 0.5, Decimal(4)]).numbers.tolist() == [1, 0.5, 4]
    assert Column(["1", " 2 "]).numbers.tolist() == [1, 2]


def test_codes_with_an_underscore_are_categories(tmp_path) -> None:
    rows = [f"2019_{i % 12 + 1:02},{i},{i % 3 or 'x'}_1" for i in range(40)]
    table = load_table(data_of(written(tmp_path, rows, header="month,price,kind")))
    assert [column.name for column in table.features.categorical] == ["month", "kind"]
    rows = [*(f"{i},{i}" for i in range(40)), "1_0,3"]
    with pytest.raises(DataError, match=r"line 42: size is '1_0', and the column has numbers"):
        load_table(data_of(written(tmp_path, rows, header="size,price")))


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (("9", "1_0", "10"), ("10", "1_0", "9")),
        (("9", "90071992547409922", "90071992547409921"), ("9", "90071992547409921", "90071992547409922")),
        (("10", "9", "-nan"), ("-nan", "10", "9")),
    ],
)
def test_classes_are_in_the_same_order_in_every_process(labels, classes, tmp_path) -> None:
    rows = [f"{i},{labels[i % 3]}" for i in range(40)]
    options = {"target": "label", "task": "classification"}
    assert load_table(data_of(written(tmp_path, rows, header="size,label"), **options)).classes == classes


def test_numbers_of_many_digits_are_categories_of_their_own(tmp_path) -> None:
    rows = [f"{1_234_560 + i % 4},{i}.5,{i % 4}" for i in range(40)]
    written(tmp_path, rows, header="id,price,sold")
    (column,) = load_table(data_of(tmp_path / "set.csv", categorical=["id"])).features.categorical
    assert column.categories == ("1234560", "1234561", "1234562", "1234563")
