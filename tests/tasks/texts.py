"""A tiny tokenizer with a chat template, trained here and saved as Hugging Face's tools do, and questions for it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import transformers

CORPUS = (
    "Ann has 3 apples and buys 5 more. How many apples has she now?",
    "A train goes 60 miles in 2 hours. What is its speed? Answer with the number alone.",
    "7+5+9+3= 12,21,24",
    "Think step by step, and end with the number that answers the question.",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, START, END_OF_TURN = range(3)


def save_tokenizer(directory: Path, template: str | None = TEMPLATE, **settings: Any) -> Path:
    """Byte-level BPE: three special tokens, 256 bytes, then a few merges."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    bytes_ = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        CORPUS,
        tokenizers.trainers.BpeTrainer(
            vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=bytes_, show_progress=False
        ),
    )
    settings = {"eos_token": SPECIAL[END_OF_TURN], "pad_token": SPECIAL[END_OF_TEXT]} | settings
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, **settings)
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


def write_questions(path: Path, rows: Iterable[Any]) -> Path:
    """A JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def word_problems(count: int) -> list[dict[str, str]]:
    """Like GSM8K's: a question in words, and a worked answer that ends in `#### N`."""
    return [
        {
            "question": f"Ann has {n} apples and buys {n + 2} more. How many apples has she now?",
            "answer": f"She has {n}+{n + 2}=<<{n}+{n + 2}={2 * n + 2}>>{2 * n + 2} apples.\n#### {2 * n + 2:,}",
        }
        for n in range(1, count + 1)
    ]
