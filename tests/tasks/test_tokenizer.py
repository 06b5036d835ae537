"""One character, one id, there and back; a model's own tokenizer as transformers has it; padding on either side."""

import json

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from m2po_jax.config import ConfigError, UserError
from m2po_jax.tasks import CharTokenizer, ModelTokenizer, left_padded, right_padded
from tests.tasks import texts

ALPHABET = "0123456789+=,"
TOKENIZER = CharTokenizer(ALPHABET)


@given(st.text(ALPHABET))
def test_decoding_undoes_encoding(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_id]) == text


def test_every_id_has_one_text():
    each = [TOKENIZER.token_text(id_) for id_ in range(TOKENIZER.vocab_size)]
    assert len(set(each)) == len(each) == TOKENIZER.vocab_size == 15
    assert (each[TOKENIZER.pad_id], each[TOKENIZER.eos_id]) == ("<pad>", "<eos>")
    for id_ in range(2, TOKENIZER.vocab_size):
        assert TOKENIZER.encode(each[id_]) == [id_]


def test_a_sampled_padding_id_is_seen_in_the_text():
    one, two = TOKENIZER.encode("12")
    assert TOKENIZER.decode([one, TOKENIZER.pad_id, two, TOKENIZER.eos_id]) == "1<pad>2"


def test_an_id_that_only_the_model_has_is_seen_in_the_text():
    assert TOKENIZER.decode([*TOKENIZER.encode("12"), TOKENIZER.vocab_size]) == "12<id 15>"


def test_a_character_outside_the_alphabet_is_named():
    with pytest.raises(ValueError, match="character 'x' of '1x2' is not in the alphabet"):
        TOKENIZER.encode("1x2")


def test_the_fingerprint_follows_the_vocabulary():
    assert TOKENIZER.fingerprint == CharTokenizer(ALPHABET).fingerprint
    assert TOKENIZER.fingerprint != CharTokenizer(ALPHABET[::-1]).fingerprint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return texts.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def theirs(saved):
    return transformers.AutoTokenizer.from_pretrained(saved)


def test_a_question_is_asked_as_the_users_message(saved, theirs):
    tokenizer = ModelTokenizer(str(saved), "{question}\nAnswer with {the number}.")
    expected = "<|im_start|>user\n7+5=\nAnswer with {the number}.<|im_end|>\n<|im_start|>assistant\n"
    assert theirs.decode(tokenizer.prompt("7+5=")) == expected
    chat = [{"role": "user", "content": "7+5=\nAnswer with {the number}."}]
    rendered = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    assert tokenizer.prompt("7+5=") == rendered["input_ids"]
    assert tokenizer.prompt("7+5=").count(texts.START) == 2


def test_a_template_that_mentions_the_day_makes_the_same_prompt_on_every_day(tmp_path):
    dated = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "Today: {{ date_string }}\n"
    )
    tokenizer = ModelTokenizer(str(texts.save_tokenizer(tmp_path / "dated", template=dated + texts.TEMPLATE)))
    assert tokenizer.decode(tokenizer.prompt("x")).startswith("Today: 26 Jul 2024\n")


def test_without_chat_a_prompt_is_what_the_tokenizer_makes_of_the_text(saved, theirs):
    assert ModelTokenizer(str(saved), chat=False).prompt("7+5=") == theirs("7+5=")["input_ids"]
    assert ModelTokenizer(str(saved), "Q: {question}", chat=False).prompt("7+5=") == theirs("Q: 7+5=")["input_ids"]


@pytest.fixture(scope="module")
def plain(saved):
    return ModelTokenizer(str(saved), chat=False)


@given(text=st.text(max_size=30))
def test_what_the_tokenizer_wrote_is_read_again(plain, text):
    ids = plain.prompt(text)
    assert plain.decode([*ids, texts.END_OF_TURN]) == text
    assert "".join(map(plain.token_text, ids)) == text or not text.isascii()


def test_ids_that_only_the_model_has_are_survived(saved, theirs):
    tokenizer = ModelTokenizer(str(saved))
    assert tokenizer.vocab_size == len(theirs)
    word = theirs("apples")["input_ids"]
    assert tokenizer.decode([*word, tokenizer.vocab_size, 50_000]) == "apples"
    assert tokenizer.token_text(50_000) == "<id 50000>"


def test_every_end_token_ends_a_response_and_none_is_in_its_text(saved, tmp_path):
    assert ModelTokenizer(str(saved)).stop_ids == (texts.END_OF_TURN,)
    directory = texts.save_tokenizer(tmp_path / "more")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    tokenizer = ModelTokenizer(str(directory))
    assert tokenizer.stop_ids == (texts.END_OF_TEXT, texts.END_OF_TURN)
    assert tokenizer.decode([*tokenizer.prompt("x")[:1], texts.END_OF_TEXT]) == "<|im_start|>"
    assert tokenizer.fingerprint != ModelTokenizer(str(saved)).fingerprint
    assert ModelTokenizer(str(saved), "{question}?", chat=False).fingerprint == ModelTokenizer(str(saved)).fingerprint


def test_padding_is_the_tokenizers_or_an_end_token(tmp_path):
    assert ModelTokenizer(str(texts.save_tokenizer(tmp_path / "a"))).pad_id == texts.END_OF_TEXT
    assert ModelTokenizer(str(texts.save_tokenizer(tmp_path / "b", pad_token=None))).pad_id == texts.END_OF_TURN


def test_what_is_no_tokenizer_is_refused_in_a_line(saved, tmp_path):
    def refusal(kind, directory, **options):
        with pytest.raises(kind) as raised:
            ModelTokenizer(str(directory), **options)
        assert str(directory) in str(raised.value)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "is no directory" in refusal(UserError, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no tokenizer that can be read" in refusal(UserError, tmp_path / "empty")
    plain = texts.save_tokenizer(tmp_path / "plain", template=None)
    assert "no chat template: use --task.no-chat" in refusal(ConfigError, plain)
    assert ModelTokenizer(str(plain), chat=False).prompt("x")
    picky = texts.save_tokenizer(tmp_path / "picky", template="{{ raise_exception('no system message') }}")
    assert "no system message" in refusal(ConfigError, picky)
    deaf = texts.save_tokenizer(
        tmp_path / "deaf", template="{% for p in messages[0]['content'] %}{{ p.text }}{% endfor %}"
    )
    assert "leaves the user's message out" in refusal(ConfigError, deaf)
    endless = texts.save_tokenizer(tmp_path / "endless", eos_token=None)
    assert "names no end token" in refusal(UserError, endless)
    (endless / "generation_config.json").write_text("{")
    assert "generation_config.json cannot be read" in refusal(UserError, endless)
    (plain / "tokenizer.json").write_text((plain / "tokenizer.json").read_text()[:1000])
    assert "no tokenizer that can be read" in refusal(UserError, plain, chat=False)


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
