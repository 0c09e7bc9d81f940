"""Labelled sentences from tables: what is kept, how they are padded, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.data import load_sentences
from launcher.data.text.sentences import sentence_files
from launcher.errors import ConfigError, DataError, DataWarning
from tests.configs import composed

pytest.importorskip("tokenizers")

NLI = Path(__file__).resolve().parents[4] / "shared" / "data" / "nli"
PAIRS = [
    (f"a dog number {number}", "it is a dog" if number % 2 else "it is a cat", ("yes", "no")[number % 2])
    for number in range(40)
]


def config_of(path, data="nli", **options):
    config = composed("recipe=bert", f"data={data}").data
    small = {"vocab_size": 120, "cache": "none"}
    return replace(config, path=str(path), options={**config.options, **small, **options})


def written(folder: Path, name: str, rows=PAIRS, header=("sentence1", "sentence2", "gold_label")) -> Path:
    file = folder / name
    if file.suffix == ".jsonl":
        lines = [json.dumps(dict(zip(header, row, strict=True))) for row in rows]
    else:
        lines = ["\t".join(row) for row in (header, *rows)]
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_folder_with_both_parts(tmp_path):
    written(tmp_path, "train.tsv")
    written(tmp_path, "dev.jsonl", PAIRS[:6])
    found = load_sentences(config_of(tmp_path))
    assert found.classes == ("no", "yes")
    assert (len(found.train), {name: len(rows) for name, rows in found.validation.items()}) == (
        40,
        {"validation": 6},
    )
    assert found.train.labels.tolist() == [1, 0] * 20
    first = found.validation["validation"]
    assert [list(map(list, first[row][:2])) for row in range(6)] == [
        list(map(list, found.train[row][:2])) for row in range(6)
    ]
    assert found.train.name == "nli"
    assert found.train.lengths.tolist() == [len(found.train[row][0]) for row in range(40)]


def test_what_is_written_into_a_sample_is_in_no_later_one(tmp_path):
    rows = load_sentences(config_of(written(tmp_path, "train.tsv"), cache=str(tmp_path / "cache"))).train
    for part in range(2):
        before = rows[0][part].tolist()
        rows[0][part][:] = 9
        assert rows[0][part].tolist() == before


def test_a_batch_is_padded_to_its_longest_row(tmp_path):
    rows = [("a dog", "a cat", "no"), ("a dog a dog a dog a dog", "a cat", "yes")]
    found = load_sentences(config_of(written(tmp_path, "train.tsv", rows * 5)))
    samples = [found.train[row] for row in range(4)]
    short = next(sample for sample in samples if len(sample[0]) == 7)
    long = next(sample for sample in samples if len(sample[0]) == 13)
    assert found.train.collate([short])["input_ids"].shape == (1, 8)
    batch = found.train.collate([short, long])
    assert {name: (column.dtype, *column.shape) for name, column in batch.items()} == {
        **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (torch.int64, 2, 16)),
        "label": (torch.int64, 2),
    }
    assert batch["input_ids"][0].tolist() == [*short[0].tolist(), *[found.pad] * 9]
    assert batch["attention_mask"].sum(dim=1).tolist() == [7, 13]
    assert batch["token_type_ids"][0].tolist() == [0] * 4 + [1] * 3 + [0] * 9
    assert batch["label"].tolist() == [found.classes.index("no"), found.classes.index("yes")]


def test_a_part_of_each_class_is_held_out_of_a_single_file(tmp_path):
    found = load_sentences(config_of(written(tmp_path, "all.tsv")))
    rows = found.validation["validation"]
    assert (len(found.train), len(rows)) == (32, 8)
    assert rows.labels.bincount().tolist() == [4, 4]


def test_nothing_is_held_out_where_that_is_asked_for(tmp_path):
    found = load_sentences(replace(config_of(written(tmp_path, "all.tsv")), val_fraction=0))
    assert (len(found.train), found.validation, found.validation_sets) == (40, {}, {})


def test_one_sentence_a_row(tmp_path):
    file = written(tmp_path, "x.tsv", [(a, c) for a, _, c in PAIRS], ("sentence", "label"))
    found = load_sentences(config_of(file, data="sentences"))
    assert not found.train.collate([found.train[0]])["token_type_ids"].any()


def test_rows_without_a_label_are_left_out_and_counted(tmp_path):
    odd = [("x", "y", "-")] * 3
    file = written(tmp_path, "train.tsv", [*odd, *PAIRS])
    with pytest.warns(DataWarning, match=r"3 rows have the label '-' and are left out"):
        found = load_sentences(config_of(file))
    assert len(found.train) + len(found.validation["validation"]) == 40
    only = written(tmp_path, "only.tsv", odd)
    with pytest.raises(DataError, match=r"only\.tsv: no row of .* has another label than data\.unlabelled="):
        load_sentences(config_of(only))


@pytest.mark.parametrize("name", ["train.tsv", "train.jsonl"])
def test_an_empty_label_is_no_class(tmp_path, name):
    file = written(tmp_path, name, [*PAIRS, ("x", "y", ""), ("x", "y", "")])
    message = rf"{name}, row 41: the label is empty, in 2 of 42 rows\. .* 'data\.unlabelled=\"\"'"
    with pytest.raises(DataError, match=message):
        load_sentences(config_of(file))
    with pytest.warns(DataWarning, match=r"2 rows have the label '' and are left out"):
        assert load_sentences(config_of(file, unlabelled="")).classes == ("no", "yes")
    blank = written(tmp_path, name, [*PAIRS, ("x", "y", " ")])
    with pytest.raises(DataError, match="the label is empty, in 1 of 41 rows"):
        load_sentences(config_of(blank))


def test_rows_that_are_too_long_are_cut_and_counted(tmp_path):
    file = written(tmp_path, "train.tsv")
    with pytest.warns(
        DataWarning, match=r"40 of 40 rows are longer than data\.max_seq_len=8 tokens and were cut"
    ):
        found = load_sentences(config_of(file, max_seq_len=8))
    assert set(found.train.lengths.tolist()) == {8}


def test_several_validation_sets_by_name(tmp_path):
    for name in ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"):
        written(tmp_path, name)
    assert list(load_sentences(config_of(tmp_path, data="mnli")).validation) == [
        "dev_matched",
        "dev_mismatched",
    ]
    assert sentence_files(str(tmp_path), "dev_mismatched.tsv") == {
        "train": tmp_path / "train.tsv",
        "dev_mismatched": tmp_path / "dev_mismatched.tsv",
    }
    with pytest.raises(ConfigError, match="must differ, also from train"):
        sentence_files(str(tmp_path), ["train.tsv"])
    with pytest.raises(ConfigError, match=r"data\.validation=nosuch\.tsv: there is no file .*/nosuch\.tsv"):
        sentence_files(str(tmp_path), "nosuch.tsv")


def test_no_file_is_evaluated_twice_or_trained_on_too(tmp_path):
    for name in ("train.tsv", "dev_matched.tsv"):
        written(tmp_path, name)
    message = r"data\.validation=.*: dev_matched and dev_mismatched are the same file, .*dev_matched\.tsv"
    with pytest.raises(ConfigError, match=message):
        load_sentences(config_of(tmp_path, data="mnli"))
    (tmp_path / "other.tsv").symlink_to("train.tsv")
    with pytest.raises(ConfigError, match=r"train and other are the same file, .*train\.tsv"):
        sentence_files(str(tmp_path), "other.tsv")


THREE = ("entailment", "neutral", "contradiction")
TRIPLES = [(f"a dog {number}", "it is a cat", THREE[number % 3]) for number in range(30)]
OF_XNLI = ("language", "gold_label", "sentence1_parse", "sentence1", "sentence2", "pairID", "label1")
OF_MNLI = ("gold_label", "sentence1_parse", "sentence1", "sentence2", "promptID", "genre", "label1")


def as_xnli(rows, language):
    return [(language, label, "(x)", first, second, "1", label) for first, second, label in rows]


def test_xnli_as_published(tmp_path):
    """XNLI-MT has a training file for each language, XNLI one development set of all 15."""
    folder = tmp_path / "XNLI-MT-1.0" / "multinli"
    folder.mkdir(parents=True)
    (tmp_path / "XNLI-1.0").mkdir()
    translated = [(a, b, "contradictory" if c == "contradiction" else c) for a, b, c in TRIPLES]
    for language in ("ar", "de", "en"):
        rows = translated if language == "de" else translated[:6]
        written(folder, f"multinli.train.{language}.tsv", rows, ("premise", "hypo", "label"))
    dev = [*as_xnli(TRIPLES[:9], "ar"), *as_xnli(TRIPLES[:6], "de"), *as_xnli(TRIPLES[:3], "en")]
    for name in ("xnli.dev.tsv", "xnli.test.tsv"):
        written(tmp_path / "XNLI-1.0", name, dev, OF_XNLI)
    asked = {"validation": "../../XNLI-1.0/xnli.dev.tsv", "language": "de"}
    with pytest.warns(DataWarning, match=r"12 rows are not of data\.language=de and are left out"):
        found = load_sentences(config_of(folder, data="xnli", **asked))
    assert found.classes == ("contradiction", "entailment", "neutral")
    assert (len(found.train), len(found.validation["xnli.dev"])) == (30, 6)
    written(folder, "xnli.dev.tsv", dev, OF_XNLI)  # both in one folder
    with pytest.warns(DataWarning, match="15 rows are not of data.language=en"):
        found = load_sentences(config_of(folder, data="xnli"))
    assert (len(found.train), len(found.validation["validation"])) == (6, 3)
    with pytest.raises(DataError, match=r"no row has data\.language=sw\. It has: ar, de, en\."):
        load_sentences(config_of(folder / "multinli.train.en.tsv", data="xnli", **asked | {"language": "sw"}))


def hub_parquet(file, rows):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    classes = list(THREE)
    columns = {
        "premise": [row[0] for row in rows],
        "hypothesis": [row[1] for row in rows],
        "label": [classes.index(row[2]) if row[2] in classes else -1 for row in rows],
    }
    features = {name: {"dtype": "string", "_type": "Value"} for name in ("premise", "hypothesis")}
    features["label"] = {"names": classes, "_type": "ClassLabel"}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(pyarrow.table(columns).replace_schema_metadata(metadata), file)


@pytest.mark.parametrize("data", ["nli", "xnli"])
def test_the_parquet_of_the_hub_names_its_classes(tmp_path, data):
    hub_parquet(tmp_path / "train-00000-of-00002.parquet", [*TRIPLES, ("no", "consensus", "-1")])
    hub_parquet(tmp_path / "train-00001-of-00002.parquet", TRIPLES[:3])
    hub_parquet(tmp_path / "validation-00000-of-00001.parquet", TRIPLES[:6])
    hub_parquet(tmp_path / "test-00000-of-00001.parquet", TRIPLES[:3])
    with pytest.warns(DataWarning, match="1 rows have the label '-1' and are left out"):
        found = load_sentences(config_of(tmp_path, data=data))
    assert found.classes == ("contradiction", "entailment", "neutral")
    assert (len(found.train), len(found.validation["validation"])) == (33, 6)
    (tmp_path / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(DataError, match=r"the first of 2 files, of which 1 are there"):
        load_sentences(config_of(tmp_path, data=data))


MNLI = {
    "its own text files": ("multinli_1.0_{}.txt", "train", "dev_matched", "dev_mismatched"),
    "its own JSON": ("multinli_1.0_{}.jsonl", "train", "dev_matched", "dev_mismatched"),
    "GLUE": ("{}.tsv", "train", "dev_matched", "dev_mismatched"),
    "the hub": (
        "{}-00000-of-00001.parquet",
        "train",
        "validation_matched",
        "validation_mismatched",
    ),
}


@pytest.mark.parametrize("name", MNLI)
def test_mnli_as_published(tmp_path, name):
    pattern, *parts = MNLI[name]
    for number, part in enumerate(parts, 1):
        rows = TRIPLES[: 30 // number]
        if name == "the hub":
            hub_parquet(tmp_path / pattern.format(part), rows)
        else:
            cells = [(label, "(x)", first, second, "1", "fiction", label) for first, second, label in rows]
            written(tmp_path, pattern.format(part), cells, OF_MNLI)
    (tmp_path / "README.txt").write_text("MultiNLI")
    found = load_sentences(config_of(tmp_path, data="mnli"))
    sizes = {name: len(rows) for name, rows in found.validation.items()}
    assert (len(found.train), sizes) == (30, {"dev_matched": 15, "dev_mismatched": 10})


def test_what_is_kept_is_all_that_a_second_run_reads(tmp_path):
    file = written(tmp_path, "train.tsv", [*PAIRS, ("x", "y", "-")])
    config = config_of(file, cache=str(tmp_path / "kept"))
    with pytest.warns(DataWarning, match="1 rows"):
        first = load_sentences(config)
    status = file.stat()
    file.write_bytes(
        b"\xff" * status.st_size
    )  # as large, and of the same time: nothing shows that it changed
    __import__("os").utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.warns(DataWarning, match="1 rows"):
        again = load_sentences(config)
    assert again.classes == first.classes
    assert (again.vocab_size, again.pad) == (first.vocab_size, first.pad)
    assert again.train.collate([again.train[3]])["input_ids"].equal(
        first.train.collate([first.train[3]])["input_ids"]
    )
    with pytest.raises(DataError, match=r"train\.tsv cannot be read"):
        load_sentences(config_of(file, cache=str(tmp_path / "kept"), max_seq_len=64))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [("a", "b", "yes")] * 4,
            r"the label of .*train\.tsv has one class, yes\. At least two",
        ),
        ([], r"train\.tsv has no rows"),
    ],
)
def test_a_training_set_that_teaches_nothing(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        load_sentences(config_of(written(tmp_path, "train.tsv", rows)))


def test_a_label_that_the_training_set_does_not_have(tmp_path):
    written(tmp_path, "train.tsv")
    written(tmp_path, "dev.tsv", [PAIRS[0], ("a", "b", "maybe")])
    message = r"dev\.tsv, row 2: 1 label\(s\) are not in the training set: maybe\. It knows no, yes"
    with pytest.raises(DataError, match=message):
        load_sentences(config_of(tmp_path))


def test_a_missing_column_lists_those_that_are_there(tmp_path):
    file = written(tmp_path, "train.tsv", header=("one", "two", "label"))
    with pytest.raises(
        DataError, match=r"has not the column sentence1 or premise and .*It has: one, two, label\. data\.s"
    ):
        load_sentences(config_of(file))
    named = {"sentence1": "one", "sentence2": "two", "label": "label"}
    assert load_sentences(config_of(file, **named)).classes
    written(tmp_path, "dev.tsv", header=("one", "text", "label"))
    with pytest.raises(DataError, match=r"dev\.tsv has not the column two"):
        load_sentences(config_of(tmp_path, **named))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"sentence1": None}, r"data\.sentence1=None: must be a text or a list"),
        ({"max_seq_len": 2}, r"data\.max_seq_len=2: must be a whole number of at least 4"),
        ({"lower_case": "yes"}, r"data\.lower_case='yes': must be true or false"),
        ({"validation": 3}, r"data\.validation=3: must be null or a text or a list"),
        ({"sentence3": "x"}, r"data\.sentence3 is not an option of data=nli"),
    ],
)
def test_options_that_sentences_cannot_have(tmp_path, option, message):
    with pytest.raises(ConfigError, match=message):
        load_sentences(config_of(tmp_path, **option))


def test_without_a_path_it_says_what_is_needed():
    with pytest.raises(ConfigError, match=r"data\.path is not set\. Give a \.tsv"):
        sentence_files(None, None)


@pytest.mark.skipif(not NLI.is_dir(), reason=f"no sentences in {NLI}")
def test_the_real_pairs():
    found = load_sentences(config_of(NLI, vocab_size=2000, max_seq_len=512))
    assert found.classes == ("entailment", "neutral")
    assert (len(found.train), len(found.validation["validation"])) == (4306, 1076)
    assert found.vocab_size == 2000
