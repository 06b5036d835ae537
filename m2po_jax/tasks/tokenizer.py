"""One token a character, for procedural tasks."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np


class CharTokenizer:
    """Padding, end of sequence, then one id for each character of the alphabet.

    Token ids in are token ids out: nothing in the project decodes and re-encodes a sampled response.
    """

    pad_id = 0
    eos_id = 1

    def __init__(self, alphabet: str):
        """`alphabet` lists the characters in id order, starting at id 2."""
        self.alphabet = alphabet
        self._ids = {character: index for index, character in enumerate(alphabet, start=2)}

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self.alphabet) + 2

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary: two tokenizers with one fingerprint give a token one meaning."""
        return hashlib.sha256(f"char:pad,eos:{self.alphabet}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without an end token; ValueError names a character outside the alphabet."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise ValueError(f"character {error} of {text!r} is not in the alphabet {self.alphabet!r}") from None

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens` without end tokens; a padding id, which a policy may sample, shows as `<pad>`."""
        texts = self.token_texts()
        return "".join(texts[token] for token in tokens if token != self.eos_id)

    def token_texts(self) -> Sequence[str]:
        """A printable text for each id, in id order."""
        return ["<pad>", "<eos>", *self.alphabet]


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
