"""Tokenizers of sentences: BERT's own kind, the same each time that they are fitted."""

import pytest

from launcher.data.text.tokenizer import SPECIAL, SentenceTokenizer, fitted

pytest.importorskip("tokenizers")

TEXTS = [
    f"The {size} dog {verb}s {count} cats."
    for size in ("big", "small")
    for verb in ("chase", "see")
    for count in range(30)
]
VOCABULARY = 90


def tokens_of(tokenizer: SentenceTokenizer, *sentences, max_length=32):
    names = {number: token for token, number in tokenizer.library_object().get_vocab().items()}
    return [[names[number] for number in ids] for ids, _, _ in tokenizer.encode(sentences, max_length)]


@pytest.fixture(scope="module")
def tokenizer() -> SentenceTokenizer:
    return fitted(TEXTS, VOCABULARY, lower_case=True)


def test_it_is_fitted_alike_each_time(tokenizer):
    # The library's own trainer gives another vocabulary each time: its tables begin with another random key.
    assert {fitted(TEXTS, VOCABULARY, lower_case=True).definition for _ in range(5)} == {tokenizer.definition}


def test_sentences_stand_between_special_tokens(tokenizer):
    assert tokenizer.vocab_size == VOCABULARY
    assert tokens_of(tokenizer, "The DOG", ("dog", "dog")) == [
        ["[CLS]", "the", "dog", "[SEP]"],
        ["[CLS]", "dog", "[SEP]", "dog", "[SEP]"],
    ]
    ((_, types, _),) = tokenizer.encode([("dog", "dog")], 32)
    assert types == [0, 0, 0, 1, 1]
    assert tokens_of(tokenizer, "dog \N{SNOWMAN}")[0][2] == "[UNK]"


def test_a_word_that_is_not_in_the_vocabulary_is_cut_into_pieces(tokenizer):
    pieces = tokens_of(tokenizer, "dogsee")[0][1:-1]
    assert "".join(piece.removeprefix("##") for piece in pieces) == "dogsee"
    assert pieces[0] == "dog"
    assert all(piece.startswith("##") for piece in pieces[1:])


def test_text_that_looks_like_a_piece_is_text(tokenizer):
    assert tokens_of(tokenizer, "##s")[0][1:-1] == ["[UNK]", "[UNK]", "s"]
    assert set(SPECIAL) <= tokenizer.library_object().get_vocab().keys()


def test_the_longer_sentence_of_a_pair_is_cut(tokenizer):
    pairs = [("dog " * 30, "dog"), ("dog", "dog")]
    found = list(tokenizer.encode(pairs, 12))
    assert [(len(ids), cut) for ids, _, cut in found] == [(12, True), (5, False)]
    assert found[0][1] == [0] * 10 + [1, 1]


def test_case_is_kept_on_request():
    cased = fitted(TEXTS, VOCABULARY, lower_case=False)
    assert tokens_of(cased, "The")[0][1:-1] == ["The"]
    assert tokens_of(cased, "THE")[0][1:-1] != ["The"]


def test_every_sentence_is_encoded_in_order(tokenizer):
    texts = [f"see {number}" for number in range(2500)]
    whole = [ids for ids, _, _ in tokenizer.encode(texts, 32)]
    assert len(whole) == 2500
    assert whole[2345] == next(tokenizer.encode([texts[2345]], 32))[0]


def test_a_vocabulary_without_place_for_all_characters_has_them_all():
    tokenizer = fitted(TEXTS, 20, lower_case=True)
    assert set("thebigdo.0123456789") <= set(tokenizer.get_vocab())
