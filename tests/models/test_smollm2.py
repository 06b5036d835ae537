"""A real model: SmolLM2-135M-Instruct says what transformers says, with the same log-probs."""

import jax
import numpy as np
import pytest

from m2po_jax.generation.engine import generate
from m2po_jax.models import Transformer, huggingface, response_logprobs
from m2po_jax.tasks import left_padded, right_padded
from tests.models import published, smollm2

pytestmark = pytest.mark.slow
QUESTIONS = (
    "What is the capital of France?",
    "Tom has 3 apples and buys 5 more. He eats 2. How many are left?",
    "Write a haiku about the sea.",
    "Name three prime numbers.",
    "Explain gravity to a child in one sentence.",
    "What is 17 times 6?",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "List the colours of the rainbow.",
    "A train goes 60 miles in 1.5 hours. What is its speed?",
)
NEW_TOKENS = 64
GREEDY = np.float32(1e-6)
"""A temperature at which the sampler's noise decides only between logits that are equal in float32."""


@pytest.fixture(scope="module")
def torch_model():
    reason = "compares with transformers on torch: pip install 'm2po-jax[dev]'"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2.directory(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(smollm2.directory())


@pytest.fixture(scope="module")
def policy():
    config = huggingface.read_config(smollm2.directory())
    return Transformer(config), huggingface.load(smollm2.directory(), config)


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def answers(torch_model, prompts) -> list[list[int]]:
    """The greedy answers of transformers, each prompt alone, the end token included."""
    import torch

    rows = [torch.tensor([prompt]) for prompt in prompts]
    made = [torch_model.generate(row, do_sample=False, max_new_tokens=NEW_TOKENS) for row in rows]
    return [output[0, row.shape[1] :].tolist() for row, output in zip(rows, made, strict=True)]


def test_greedy_answers_are_those_of_transformers(policy, prompts, answers):
    model, params = policy
    tokens, valid = left_padded(prompts, max(map(len, prompts)), pad_id=2)
    keys = jax.random.split(jax.random.key(0), len(prompts))
    options = {"samples_per_prompt": 1, "max_new_tokens": NEW_TOKENS, "stop_ids": (2,), "pad_id": 2}
    generated = generate(params, tokens, valid, keys, GREEDY, model=model, **options)
    found = [row[mask].tolist() for row, mask in zip(*map(np.asarray, (generated.tokens, generated.mask)), strict=True)]
    assert sum(map(len, answers)) > 5 * NEW_TOKENS
    assert found == answers


def test_logprobs_are_those_of_transformers(policy, torch_model, prompts, answers):
    batch = *left_padded(prompts, max(map(len, prompts)), 2), *right_padded(answers, NEW_TOKENS, 2)
    logprobs, _ = jax.jit(response_logprobs, static_argnums=0)(*policy, *batch)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        expected = published.logprobs(torch_model, prompt + answer)[len(prompt) - 1 :]
        np.testing.assert_allclose(logprobs[row, : len(answer)], expected, atol=1e-3, rtol=0)


def test_it_is_written_back_byte_for_byte(policy, tmp_path):
    model, params = policy
    huggingface.export(params, model.config, smollm2.directory(), tmp_path / "out")
    for file in smollm2.directory().iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
