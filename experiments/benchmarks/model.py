"""What the model costs: a training step against transformers on torch, logits in chunks, and loading; one table.

Command:   python experiments/benchmarks/model.py --model DIR     (SmolLM2-135M; without --model, the vocabulary alone)
Hardware:  2 CPU cores, about 5 minutes and 8 GB; needs torch and transformers; see README.md for the table.
Expect:    the speed of torch in three quarters of its memory; with 151,936 tokens to choose from, chunks take under
           1/8 of the memory that all logits at once would; the model loads in under 2 s from the page cache.

Each program runs in a process of its own, in turn with the one it is compared with, and times are the fastest of
several calls. Machines differ and are shared: read the ratios. Memory is the peak of the whole process, or, for the
vocabulary, the temporary memory of the compiled program, which does not have to run for that.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

WIDE = {"vocab_size": 151_936, "width": 256, "mlp_width": 768, "layers": 2}
WIDE_HEADS = {"query_heads": 4, "kv_heads": 2, "head_dim": 64}
ROWS, COLUMNS = 8, 1024
"""Model and batch of the rows of the table about a large vocabulary."""
LEARNING_RATE = 1e-5


class Row(NamedTuple):
    """A line of the table; None leaves a cell empty."""

    program: str
    seconds: float | None = None
    tokens: int | None = None
    megabytes: float | None = None
    baseline: "Row | None" = None

    def cells(self) -> Iterator[str]:
        """Its cells as text."""
        yield self.program
        yield "" if self.seconds is None else f"{self.seconds:.2f}"
        yield "" if self.seconds is None or self.tokens is None else f"{self.tokens / self.seconds:.0f}"
        yield "" if self.megabytes is None else f"{self.megabytes:,.0f}"
        against = self.baseline
        yield "" if against is None else against.program
        timed = against is not None and against.seconds is not None and self.seconds is not None
        yield f"{against.seconds / self.seconds:.2f}x faster" if timed else ""
        yield f"1/{against.megabytes / self.megabytes:.2f}" if against is not None else ""


def main() -> None:
    """Print one Markdown table, or be one of the processes that it compares."""
    arguments = _arguments()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if arguments.process:
        return serve(_PROGRAMS[arguments.process](arguments))
    print(f"{arguments.rows} x {arguments.columns} tokens, float32, {os.cpu_count()} cores")
    sizes = ", ".join(f"{name} {size:,}" for name, size in (WIDE | WIDE_HEADS).items())
    print(f"Large vocabulary: {ROWS} x {COLUMNS:,} tokens, {sizes}\n")
    print("| program | s | tokens/s | MB | against | speed | memory |")
    print("|:---|---:|---:|---:|:---|---:|---:|")
    for row in _rows(arguments):
        print(f"| {' | '.join(row.cells())} |", flush=True)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    if arguments.model is not None:
        yield from _compared("loss and gradient", ("torch", "jax"), arguments)
        yield from _compared("loss, gradient and AdamW", ("torch_adamw", "jax_adamw"), arguments)
        with _process("load", arguments) as process:
            yield Row("loading", min(process.call() for _ in range(arguments.repeats)))
    whole = Row(f"vocabulary {WIDE['vocab_size']:,}, all logits at once", megabytes=_temporary(ROWS * COLUMNS))
    yield whole
    yield Row("the same in chunks", megabytes=_temporary(None), baseline=whole)


def _compared(what: str, names: tuple[str, str], arguments: argparse.Namespace) -> Iterator[Row]:
    """The baseline's row and ours, from processes that take turns."""
    with _process(names[0], arguments) as theirs, _process(names[1], arguments) as ours:
        seconds = [[process.call() for process in (theirs, ours)] for _ in range(arguments.repeats)]
        tokens = arguments.rows * arguments.columns
        fastest = [min(times) for times in zip(*seconds, strict=True)]
        baseline = Row(f"{what}, transformers on torch", fastest[0], tokens, theirs.peak_megabytes)
        if abs(theirs.value - ours.value) > 1e-3:
            raise SystemExit(f"error: losses are {theirs.value} and {ours.value}: not the same computation")
    yield baseline
    yield Row(what, fastest[1], tokens, ours.peak_megabytes, baseline)


class Process:
    """A program in a process of its own, which waits between calls."""

    def __init__(self, command: list[str]):
        """Starts a Python script that will `serve`."""
        command = [sys.executable, *command]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.value, self.peak_megabytes = 0.0, 0.0
        self.call()  # compiles, and fills the page cache

    def call(self) -> float:
        """Seconds of one call."""
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(self.child.wait() or 1)
        seconds, self.value, self.peak_megabytes = json.loads(line)
        return seconds

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.child.communicate()


def _process(name: str, arguments: argparse.Namespace) -> Process:
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("rows", "columns", "model")]
    return Process([__file__, f"--process={name}", *sizes])


def serve(call: Callable[[], float]) -> None:
    """A call for each line of the input; answers with its seconds, its value and the peak memory so far."""
    for _ in sys.stdin:
        start = time.perf_counter()
        value = call()
        print(json.dumps([time.perf_counter() - start, value, _peak_megabytes()]), flush=True)


def _peak_megabytes() -> float:
    """Most memory that this process has held."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 / 1e6


def _tokens(rows: int, columns: int, vocab_size: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, vocab_size, (rows, columns)).astype(np.int32)


def _loss(model: Any, params: Any, tokens: Any, chunk_tokens: int | None = None) -> Any:
    """Cross entropy of all tokens but the first of each row."""
    import jax.numpy as jnp

    from m2po_jax.models import response_logprobs

    real = jnp.ones(tokens.shape, bool)
    batch = tokens[:, :1], real[:, :1], tokens[:, 1:], real[:, 1:]
    logprobs, _ = response_logprobs(model, params, *batch, chunk_tokens=chunk_tokens)
    return -jnp.mean(logprobs)


def _policy(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    from m2po_jax.models import Transformer, huggingface

    config = huggingface.read_config(arguments.model)
    tokens = _tokens(arguments.rows, arguments.columns, config.vocab_size)
    return Transformer(config), huggingface.load(arguments.model, config), tokens


def _jax_gradient(arguments: argparse.Namespace) -> Callable[[], float]:
    import jax

    model, params, tokens = _policy(arguments)
    program = jax.jit(lambda params, tokens: jax.value_and_grad(lambda p: _loss(model, p, tokens))(params))
    return lambda: float(jax.block_until_ready(program(params, tokens))[0])


def _jax_step(arguments: argparse.Namespace) -> Callable[[], float]:
    from functools import partial

    import jax
    import optax

    model, params, tokens = _policy(arguments)
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.01)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: Any) -> tuple[Any, Any]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: _loss(model, p, tokens))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state = params, optimizer.init(params)

    def call() -> float:
        nonlocal state
        state, loss = jax.block_until_ready(step(state, tokens))
        return float(loss)

    return call


def _torch_call(arguments: argparse.Namespace, with_step: bool) -> Callable[[], float]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).train()
    tokens = torch.tensor(_tokens(arguments.rows, arguments.columns, model.config.vocab_size)).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def call() -> float:
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if with_step:
            optimizer.step()
        return loss.item()

    return call


def _load(arguments: argparse.Namespace) -> Callable[[], float]:
    import jax

    from m2po_jax.models import huggingface

    config = huggingface.read_config(arguments.model)

    def call() -> float:
        jax.block_until_ready(huggingface.load(arguments.model, config))
        return 0.0

    return call


_PROGRAMS: dict[str, Callable[[argparse.Namespace], Callable[[], float]]] = {
    "jax": _jax_gradient,
    "jax_adamw": _jax_step,
    "torch": lambda arguments: _torch_call(arguments, with_step=False),
    "torch_adamw": lambda arguments: _torch_call(arguments, with_step=True),
    "load": _load,
}


def _temporary(chunk_tokens: int | None) -> float:
    """Peak temporary memory in MB of loss and gradient with a large vocabulary."""
    import jax
    import jax.numpy as jnp

    from m2po_jax.config import ModelConfig
    from m2po_jax.models import Transformer

    model = Transformer(ModelConfig(**WIDE, **WIDE_HEADS))
    params = jax.eval_shape(model.init_params, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.int32)
    program = jax.jit(lambda params, tokens: jax.grad(lambda p: _loss(model, p, tokens, chunk_tokens))(params))
    return program.lower(params, tokens).compile().memory_analysis().temp_size_in_bytes / 1e6


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python experiments/benchmarks/model.py --model ~/models/SmolLM2-135M-Instruct",
    )
    about_model = "Hugging Face directory of SmolLM2-135M, or of another model (default: no row that needs one)"
    parser.add_argument("--model", type=Path, help=about_model)
    parser.add_argument("--rows", type=int, default=4, help="sequences (default: 4)")
    parser.add_argument("--columns", type=int, default=256, help="tokens a sequence (default: 256)")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each program (default: 5)")
    parser.add_argument("--process", choices=_PROGRAMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name, least in (("rows", 1), ("columns", 2), ("repeats", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} is {getattr(arguments, name)}: use {least} or more")
    if arguments.model is not None:
        refuse_missing(parser, arguments.model)
    return arguments


def refuse_missing(parser: argparse.ArgumentParser, model: Path) -> None:
    """An error of the parser's if the directory holds no model, or what it is compared with is not installed."""
    if not (model / "config.json").is_file():
        parser.error(
            f"--model {model} holds no config.json: give a directory as save_pretrained writes it, for instance what"
            " `hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir DIR` makes"
        )
    lacking = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if lacking:
        parser.error(f"--model compares with {' and '.join(lacking)}, not installed: pip install 'm2po-jax[dev]'")


if __name__ == "__main__":
    main()
