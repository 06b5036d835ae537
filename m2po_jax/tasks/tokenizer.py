"""Tokenizers: one token a character for procedural tasks, and the one that comes with a model."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from m2po_jax.config import ConfigError, UserError


class Tokenizer(Protocol):
    """What tasks, sampler and diagnostics ask of a tokenizer.

    Token ids in are token ids out: nothing in the project decodes and re-encodes a sampled response.
    """

    @property
    def vocab_size(self) -> int:
        """Number of ids; a model may have more."""

    @property
    def pad_id(self) -> int:
        """Stands where there is no token; may be one of the others."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary: two tokenizers with one fingerprint give a token one meaning."""

    def prompt(self, text: str) -> list[int]:
        """Token ids of a prompt, up to where the response begins."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of response tokens, without those that end it."""

    def token_text(self, token: int) -> str:
        """A printable text for any id of the model."""


class CharTokenizer:
    """Padding, end of sequence, then one id for each character of the alphabet."""

    pad_id = 0
    eos_id = 1
    stop_ids = (eos_id,)

    def __init__(self, alphabet: str):
        """`alphabet` lists the characters in id order, starting at id 2."""
        self.alphabet = alphabet
        self._texts = ["<pad>", "<eos>", *alphabet]
        self._ids = {character: index for index, character in enumerate(alphabet, start=2)}

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._texts)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the alphabet."""
        return hashlib.sha256(f"char:pad,eos:{self.alphabet}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without an end token; ValueError names a character outside the alphabet."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise ValueError(f"character {error} of {text!r} is not in the alphabet {self.alphabet!r}") from None

    prompt = encode

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens` without end tokens; a padding id, which a policy may sample, shows as `<pad>`."""
        return "".join(self.token_text(token) for token in tokens if token != self.eos_id)

    def token_text(self, token: int) -> str:
        """The character, `<pad>`, `<eos>`, or `<id 20>` for one that is the model's alone."""
        return self._texts[token] if token < self.vocab_size else f"<id {token}>"


_DATE = "26 Jul 2024"
"""What chat templates that mention the day (Llama 3.2's) are told: a prompt is the same on every day."""


_PROBE = "7+5 = what?"
"""A question that every chat template must let through."""


class ModelTokenizer:
    """Tokenizer and chat template of a Hugging Face directory, through `transformers`, read from the disk alone."""

    def __init__(self, directory: str, template: str = "{question}", chat: bool = True):
        """`template` makes the question of a prompt; `chat` puts it into the chat template, as the user's message.

        Raises:
            UserError: the directory has no tokenizer that can be read, or nothing ends a response.
            ConfigError: it has no chat template, or one that does not take a user's message alone.
        """
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        if not Path(directory).is_dir():
            raise UserError(f"{directory} is no directory: give a Hugging Face model directory")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # transformers raises many types for missing and damaged files
            said = (str(error).strip().splitlines() or [repr(error)])[0]
            raise UserError(f"{directory} has no tokenizer that can be read: {said}") from error
        self._template, self._chat = template, chat
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.vocab_size = max(self._vocabulary.values()) + 1
        self.stop_ids = _stop_ids(Path(directory), self._tokenizer.eos_token_id)
        pad = self._tokenizer.pad_token_id
        self.pad_id: int = self.stop_ids[0] if pad is None else pad
        if chat:
            self._refuse_without_template(directory)

    @property
    def prompt_sha256(self) -> str:
        """Digest of the tokenizer and of what it makes of a question, hence of its chat template too."""
        return hashlib.sha256(f"{self.fingerprint}{self.prompt(_PROBE)}".encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of every token with its id, and of the ids that end a response."""
        listed = json.dumps([sorted(self._vocabulary.items()), self.stop_ids])
        return hashlib.sha256(listed.encode()).hexdigest()

    def prompt(self, text: str) -> list[int]:
        """Token ids of the question about `text`, in the chat template or, without it, as a text begins."""
        question = self._template.replace("{question}", text)
        if not self._chat:
            return self._tokenizer(question)["input_ids"]
        return self._tokenizer(self._rendered(question), add_special_tokens=False)["input_ids"]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens` without those that end it; ids that are the model's alone have no text."""
        known = [token for token in tokens if token not in self.stop_ids and token < self.vocab_size]
        return self._tokenizer.decode(known, clean_up_tokenization_spaces=False)

    def token_text(self, token: int) -> str:
        """The text of the token alone, or `<id 50000>` for one that is the model's alone."""
        return self._tokenizer.decode([token]) if token < self.vocab_size else f"<id {token}>"

    def _rendered(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, date_string=_DATE
        )

    def _refuse_without_template(self, directory: str) -> None:
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"{directory} has no chat template: use --task.no-chat for plain text")
        try:
            rendered = self._rendered(_PROBE)
        except Exception as error:  # a template is a program, and may raise anything
            raise ConfigError(f"the chat template of {directory} fails on a user's message: {error}") from error
        if _PROBE not in rendered:
            raise ConfigError(f"the chat template of {directory} leaves the user's message out: {rendered[:60]!r}")


def _stop_ids(directory: Path, eos_id: int | None) -> tuple[int, ...]:
    """The tokenizer's end token, and those that `generation_config.json` adds, such as Llama 3's end of turn."""
    path, more = directory / "generation_config.json", None
    if path.exists():
        try:
            more = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{path} cannot be read: {error!r}") from error
    listed = more if isinstance(more, list) else [more]
    found = {token for token in (eos_id, *listed) if type(token) is int and token >= 0}
    if not found:
        raise UserError(f"{directory} names no end token: set eos_token_id in generation_config.json")
    return tuple(sorted(found))


def left_padded(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of token ids as int32 (R, width), padded on the left, and bool (R, width), True on real tokens."""
    tokens, valid = np.full((len(rows), width), pad_id, np.int32), np.zeros((len(rows), width), bool)
    for row, ids in enumerate(rows):
        tokens[row, width - len(ids) :] = ids
        valid[row, width - len(ids) :] = True
    return tokens, valid


def right_padded(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of token ids as int32 (R, width), padded on the right, and bool (R, width), True on real tokens."""
    tokens, valid = np.full((len(rows), width), pad_id, np.int32), np.zeros((len(rows), width), bool)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
        valid[row, : len(ids)] = True
    return tokens, valid
