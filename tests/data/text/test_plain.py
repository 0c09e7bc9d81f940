"""Plain text as blocks of tokens, the same in every process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.data import load_text
from launcher.data.text.plain import TOKENIZERS, held_out, text_files
from launcher.errors import ConfigError, DataError
from tests.configs import composed

SHAKESPEARE = Path(__file__).resolve().parents[4] / "shared" / "data" / "shakespeare.txt"
TEXT = "".join(f"line {number} of a text, naïve and “quoted”\n" for number in range(200))
KINDS = ["characters", "bpe"]


def config_of(path, **options):
    data = composed("recipe=gpt", f"data.path={path}").data
    small = {"block_size": 16, "vocab_size": 300, "cache": "none"}
    return replace(data, options={**data.options, **small, **options})


def written(folder: Path, name: str, text: str | bytes = TEXT) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_the_blocks_are_the_text(tmp_path, kind):
    if kind == "bpe":
        pytest.importorskip("tokenizers")
    text = load_text(config_of(written(tmp_path, "a.txt"), tokenizer=kind))
    decoded = ""
    for part in (text.train, text.validation):
        tokens = part.columns["tokens"]
        assert tokens.dtype == torch.int32
        assert tokens.shape == (len(part), 17)
        assert torch.equal(tokens[1:, 0], tokens[:-1, -1]), "the last target begins the next block"
        assert int(tokens.max()) < text.vocabulary.size
        decoded += text.vocabulary.decode([*tokens[:, :-1].flatten().tolist(), int(tokens[-1, -1])])
    expected = [part[:500] for part in held_out(TEXT, 0.1)]
    assert decoded.startswith(expected[0])
    assert expected[1] in decoded
    assert text.train.name == "text"


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_is_made_again_from_its_texts(kind):
    if kind == "bpe":
        pytest.importorskip("tokenizers")
    vocabulary = TOKENIZERS[kind].fitted(TEXT, TEXT, 300)
    again = type(vocabulary)(vocabulary.definition)
    tokens = vocabulary.encode(TEXT)
    assert again.size == vocabulary.size
    assert again.encode(TEXT).tolist() == tokens.tolist()
    assert again.decode(tokens.tolist()) == TEXT


def test_pairs_are_fitted_alike_each_time():
    pytest.importorskip("tokenizers")  # whose tables begin with another random key each
    made = {TOKENIZERS["bpe"].fitted(TEXT, TEXT, 400).definition for _ in range(4)}
    assert len(made) == 1


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    written(tmp_path, "b/one.txt", "one")
    written(tmp_path, "a.txt", "two\n" * 20)
    written(tmp_path, "c.bin", b"\xff")
    files, root = text_files(str(tmp_path))
    assert [file.relative_to(root).as_posix() for file in files] == ["a.txt", "b/one.txt"]
    text = load_text(config_of(tmp_path, block_size=4))
    tokens = text.validation.columns["tokens"][-1].tolist()
    assert text.vocabulary.decode(tokens) in "two\n" * 20 + "one\n"


def test_the_standard_library_is_a_text_that_is_everywhere():
    files, root = text_files(None)
    names = [file.relative_to(root).as_posix() for file in files]
    assert len(names) > 500
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names, key=lambda name: tuple(name.split("/")))
    assert not [name for name in names if "site-packages" in name or "/test/" in name or "/tests/" in name]


def test_the_held_out_part_begins_with_a_line():
    train, validation = held_out("ab\n" * 100, 0.105)
    assert train + validation == "ab\n" * 100
    assert (len(train), train[-1]) == (267, "\n")
    assert held_out("a" * 100, 0.1) == ("a" * 90, "a" * 10), "a text without lines"


def test_tokens_are_kept_and_a_changed_file_is_read_again(tmp_path):
    file = written(tmp_path, "a.txt")
    config = config_of(file, cache=str(tmp_path / "kept"))
    first, again = load_text(config), load_text(config)
    (kept,) = (tmp_path / "kept").glob("*.safetensors")
    assert str(kept) in Path("/proc/self/maps").read_text()
    assert torch.equal(first.train.columns["tokens"], again.train.columns["tokens"])
    file.write_text(TEXT.upper())
    assert "LINE" in load_text(config).vocabulary.decode(
        load_text(config).train.columns["tokens"][0].tolist()
    )
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == 2
    load_text(config_of(file, cache=str(tmp_path / "kept"), block_size=8))
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == 2, (
        "the size of the blocks is no matter of the tokens"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("short\n", r"a\.txt has only \d+ tokens in one of its parts, but data\.block_size=16 needs 17"),
        ("", "has only 0 tokens"),
        (b"fine\nn\xe4h\n", r"a\.txt cannot be read as UTF-8: .*0xe4 in position 6"),
    ],
)
def test_a_text_that_cannot_be_used(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        load_text(config_of(written(tmp_path, "a.txt", text)))


def test_a_folder_without_texts(tmp_path):
    with pytest.raises(DataError, match=r"contains no texts, that is no file that ends in \.txt"):
        load_text(config_of(tmp_path))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"block_size": 0}, r"data\.block_size=0: must be a whole number of at least 1"),
        ({"vocab_size": True}, r"data\.vocab_size=True: must be a whole number"),
        ({"tokenizer": "words"}, r"data\.tokenizer='words': must be one of characters, bpe"),
        ({"blocksize": 3}, r"data\.blocksize is not an option of data=text"),
    ],
)
def test_options_that_a_text_cannot_have(tmp_path, option, message):
    with pytest.raises(ConfigError, match=message):
        load_text(config_of(written(tmp_path, "a.txt"), **option))


@pytest.mark.skipif(not SHAKESPEARE.is_file(), reason=f"no text in {SHAKESPEARE}")
def test_the_real_text():
    text = load_text(config_of(SHAKESPEARE, block_size=64))
    assert text.vocabulary.size == 65
    assert (len(text.train), len(text.validation)) == (15684, 1743)
    assert text.vocabulary.decode(text.train.columns["tokens"][0].tolist()).startswith(
        "First Citizen:\nBefore we"
    )
