"""Tables in files: what is read, and what is said of those that cannot be read."""

from pathlib import Path

import pytest

from launcher.data.tables import read_table, split_files
from launcher.errors import DataError

BOM = b"\xef\xbb\xbf"
PAIRS = {"first": ["a", 'say "x'], "second": ["1", "2"]}


def written(tmp_path: Path, name: str, data: bytes | str) -> Path:
    file = tmp_path / name
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return file


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.tsv", b'first\tsecond\na\t1\nsay "x\t2\n'),
        ("x.tsv", BOM + b'first\tsecond\r\na\t1\r\n\r\nsay "x\t2'),
        ("x.csv", BOM + b'first,second\r\na,1\r\n"say ""x",2\r\n'),
        ("x.txt", b'first\tsecond\na\t1\nsay "x\t2\n'),
        ("x.CSV", b'first,second\n\na,1\n"say ""x",2'),
        ("x.jsonl", b'{"first": "a", "second": "1"}\n\n{"second": "2", "first": "say \\"x"}'),
    ],
    ids=["tsv", "tsv of Windows", "csv of Windows", "txt", "csv", "jsonl"],
)
def test_the_same_rows_of_every_kind_of_file(tmp_path, name, data):
    table = read_table(written(tmp_path, name, data))
    assert table.columns == PAIRS
    assert len(table) == 2
    assert {name: table.texts(name) for name in PAIRS} == PAIRS


def test_parquet_keeps_numbers_and_absent_values(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"a": [1, 2], "b": ["x", None], "c": [0.5, 1.5]}), file)
    table = read_table(file, {"b": ["b"], "a": ["x", "a"]})
    assert table.columns == {"a": [1, 2], "b": ["x", None]}, "without c"
    assert table.texts("a") == ["1", "2"]
    with pytest.raises(DataError, match=r"x\.parquet, row 2: b has no value"):
        table.texts("b")
    with pytest.raises(DataError, match=r"has not the column d\. It has: a, b, c\."):
        read_table(file, {"d": ["d"]})
    file.write_bytes(b"PAR1 broken")
    with pytest.raises(DataError, match="cannot be read"):
        read_table(file)


@pytest.mark.parametrize("name", ["x.tsv", "x.csv", "x.jsonl"])
def test_columns_that_are_not_wanted_are_not_kept(tmp_path, name):
    separator = "\t" if name == "x.tsv" else ","
    rows = [separator.join(row) for row in ("abc", "123", "456")]
    text = '{"a": 1, "b": 2, "c": 3}\n{"a": 4, "b": 5, "c": 6}' if name == "x.jsonl" else "\n".join(rows)
    table = read_table(written(tmp_path, name, text), {"c": ["c"], "a": ["a"]})
    assert table.texts("a") == ["1", "4"]
    assert table.texts("c") == ["3", "6"]
    assert set(table.columns) == {"a", "c"}


def test_a_row_knows_its_number_also_after_selecting(tmp_path):
    table = read_table(written(tmp_path, "x.csv", 'a,b\n\n1,"two\nlines"\n2,x\n3,y\n'))
    assert [table.place(row).rpartition(" ")[2] for row in range(3)] == ["1", "2", "3"]
    some = table.select([2, 0])
    assert some.columns == {"a": ["3", "1"], "b": ["y", "two\nlines"]}
    assert some.place(0).endswith("x.csv, row 3")


def test_zeros_before_a_number_and_empty_cells_are_kept(tmp_path):
    table = read_table(written(tmp_path, "x.csv", "a,b\n007,\n1.50,NA\n"))
    assert table.columns == {"a": ["007", "1.50"], "b": ["", "NA"]}


def test_tsv_breaks_lines_at_line_feeds_alone(tmp_path):
    text = "a\tb\none\N{LINE SEPARATOR}line\tnext\x85line\n"
    assert read_table(written(tmp_path, "x.tsv", text)).texts("b") == ["next\x85line"]


def test_json_rows_may_lack_a_value(tmp_path):
    table = read_table(written(tmp_path, "x.jsonl", '{"a": 1}\n{"b": true}\n{"a": 2}\n'))
    assert table.columns == {"a": [1, None, 2], "b": [None, True, None]}
    with pytest.raises(DataError, match=r"x\.jsonl, row 2: a has no value"):
        table.texts("a")
    table = read_table(written(tmp_path, "y.jsonl", '{"a": 1}\n{"a": 2.5}\n'))
    with pytest.raises(DataError, match=r"row 1: a is a float: 1\.0\. It must be text or a whole"):
        table.texts("a")


def test_a_long_cell_is_read(tmp_path):
    text = f'a,b\n"{"x" * 200_000}",y\n'
    assert len(read_table(written(tmp_path, "x.csv", text)).texts("a")[0]) == 200_000


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.tsv", "", r"x\.tsv cannot be read: Empty CSV file"),
        ("x.csv", "\n\n", r"x\.csv cannot be read: .*Empty"),
        ("x.jsonl", "", r"x\.jsonl cannot be read: Empty JSON file"),
        ("x.tsv", "a\tb\n", r"x\.tsv has no rows"),
        ("x.tsv", "a\tb\n1\t2\n3\n", r"x\.tsv cannot be read: .*Row #3: Expected 2 columns, got 1: 3"),
        ("x.csv", "a,b\n1,2,3\n", r"x\.csv cannot be read: .*Row #2: Expected 2 columns, got 3"),
        ("x.tsv", b"a\tb\n1\t2\nn\xe4\t4\n", r"x\.tsv cannot be read: .*Row #3.*UTF8"),
        ("x.tsv", "a\ta\n1\t2\n", r"more than one column named 'a'"),
        ("x.jsonl", '{"a": 1}\n{"a": 1\n', r"x\.jsonl cannot be read: JSON parse error: .* in row 1"),
        ("x.jsonl", "[1]\n", r"x\.jsonl cannot be read: JSON parse error"),
        ("x.xls", "a", r"must end in \.tsv, \.txt, \.csv, \.jsonl, \.parquet"),
    ],
)
def test_a_file_that_is_no_table(tmp_path, name, data, message):
    with pytest.raises(DataError, match=message):
        read_table(written(tmp_path, name, data))


@pytest.mark.parametrize(
    ("name", "data"), [("x.tsv", "a\tb\n1\t2"), ("x.csv", "a,b\n1,2"), ("x.jsonl", '{"a": 1, "b": 2}')]
)
def test_a_missing_column_lists_those_that_are_there(tmp_path, name, data):
    file = written(tmp_path, name, data)
    with pytest.raises(DataError, match=r"has not the column c and d\. It has: a, b\."):
        read_table(file, {name: [name] for name in "acd"})


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_the_separator_of_a_csv_is_found_in_its_first_row(tmp_path, separator):
    text = f'\n\na{separator}b\n"1,2"{separator}3\n'
    assert read_table(written(tmp_path, "x.csv", text)).columns == {"a": ["1,2"], "b": ["3"]}


def test_a_folder_has_a_file_to_train_and_one_to_validate_on(tmp_path):
    with pytest.raises(DataError, match=r"no table with train in its name.*It has: nothing"):
        split_files(tmp_path)
    for name in ("test.tsv", "notes.txt"):
        written(tmp_path, name, "a\n1\n")
    with pytest.raises(DataError, match=r"It has: notes\.txt, test\.tsv\."):
        split_files(tmp_path)
    train, dev = written(tmp_path, "train.tsv", "a\n1\n"), written(tmp_path, "dev_matched.tsv", "a\n1\n")
    assert split_files(tmp_path) == (train, dev)
    assert split_files(train) == (train, None)


def test_the_names_of_the_parts_may_have_any_case(tmp_path):
    train, test = (written(tmp_path, name, "x\n1\n") for name in ("Train.csv", "TEST.csv"))
    assert split_files(tmp_path) == (train, test)


@pytest.mark.parametrize(
    ("train", "validation", "other"),
    [
        ("train.csv", "validation.csv", "values.csv"),
        ("train.csv", None, "values.csv"),
        ("train.tsv", None, "devices.tsv"),
        ("train.tsv", None, "DEVICES.tsv"),
        ("train.tsv", None, "testimonials.tsv"),
        ("train.tsv", None, "validators.tsv"),
        ("train_a.tsv", None, "trainers.tsv"),
        ("x.train.tsv", "x.dev.tsv", "devices.tsv"),
        ("train2017.csv", "val2017.csv", "valleys.csv"),
        ("train-00000-of-00002.parquet", "validation_matched.csv", "values.csv"),
        ("training.csv", "testing.csv", "testimonials.csv"),
    ],
)
def test_the_parts_are_named_by_whole_words(train, validation, other, tmp_path):
    for name in (train, validation, other):
        if name:
            written(tmp_path, name, "a\n1\n")
    assert split_files(tmp_path) == (tmp_path / train, validation and tmp_path / validation)


def test_a_file_that_may_not_be_read(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read: .*No such file"):
        read_table(tmp_path / "x.tsv")
