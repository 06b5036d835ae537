"""One character, one id, there and back; padding on either side."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2po_jax.tasks import CharTokenizer, left_padded, right_padded

ALPHABET = "0123456789+=,"
TOKENIZER = CharTokenizer(ALPHABET)


@given(st.text(ALPHABET))
def test_decoding_undoes_encoding(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_id]) == text


def test_every_id_has_one_text():
    texts = TOKENIZER.token_texts()
    assert len(set(texts)) == len(texts) == TOKENIZER.vocab_size == 15
    assert (texts[TOKENIZER.pad_id], texts[TOKENIZER.eos_id]) == ("<pad>", "<eos>")
    for id_ in range(2, TOKENIZER.vocab_size):
        assert TOKENIZER.encode(texts[id_]) == [id_]


def test_a_sampled_padding_id_is_seen_in_the_text():
    one, two = TOKENIZER.encode("12")
    assert TOKENIZER.decode([one, TOKENIZER.pad_id, two, TOKENIZER.eos_id]) == "1<pad>2"


def test_a_character_outside_the_alphabet_is_named():
    with pytest.raises(ValueError, match="character 'x' of '1x2' is not in the alphabet"):
        TOKENIZER.encode("1x2")


def test_the_fingerprint_follows_the_vocabulary():
    assert TOKENIZER.fingerprint == CharTokenizer(ALPHABET).fingerprint
    assert TOKENIZER.fingerprint != CharTokenizer(ALPHABET[::-1]).fingerprint


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=4), st.integers(5, 8))
def test_padding_keeps_the_rows_and_marks_them(rows, width):
    for padded, side in ((left_padded, -1), (right_padded, 1)):
        tokens, valid = padded(rows, width, pad_id=7)
        assert (tokens.dtype, valid.dtype, tokens.shape, valid.shape) == (np.int32, bool, *[(len(rows), width)] * 2)
        assert [row[mask].tolist() for row, mask in zip(tokens, valid, strict=True)] == rows
        assert (tokens[~valid] == 7).all()
        assert all((np.diff(mask[::side].astype(int)) <= 0).all() for mask in valid)


@pytest.mark.parametrize("padded", [left_padded, right_padded])
def test_a_row_longer_than_the_width_is_refused(padded):
    with pytest.raises(ValueError, match="shape"):
        padded([[1, 2, 3]], 2, pad_id=0)
