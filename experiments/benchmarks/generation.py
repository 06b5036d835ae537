"""What sampling costs: the decode engine with several numbers of slots, transformers on torch, vLLM; two tables.

Command:   python experiments/benchmarks/generation.py --model DIR     (SmolLM2-135M-Instruct)
Hardware:  2 CPU cores, about 15 minutes and 6 GB; needs torch and transformers; see README.md for the tables.
Expect:    at least twice the tokens a second of torch, and slots that are busy for more than 85 % of their time.

8 questions, 8 samples each, temperature 1, float32, up to 128 new tokens. Responses are of mixed lengths, each to the
end that the model gives it; with --full all have 128 tokens. Torch has all of them in one batch, as `generate` does it:
a row that has ended waits for the longest. Tokens are those of responses, end tokens included. Log-probs are part of
our time, and torch makes none. With --server URL a vLLM that serves the same model in float32, on these cores too, is
asked as `m2po generate --server.url` asks it; of its cores' time and memory nothing is known here.

Each program runs in a process of its own, in turn with the others, and times are the fastest of several calls: machines
differ and are shared, read the ratios. Where others compute too, torch, whose cores wait for each other at every
product, suffers most; then `taskset -c 0` and the time of the core say more.

Every number of slots is a program of its own, whose logits differ from another's in the last bits, so that now and
then a draw falls on the other side of a boundary; from there on a response is another one. The second table counts that
against the first program; the random numbers are the same.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from model import Process, refuse_missing, serve

QUESTIONS = (
    "What is the capital of France?",
    "Tom has 3 apples and buys 5 more. He eats 2. How many are left?",
    "Write a haiku about the sea.",
    "Name three prime numbers.",
    "Explain gravity to a child in one sentence.",
    "What is 17 times 6?",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
)
SAMPLES = 8
RESPONSES = len(QUESTIONS) * SAMPLES


class Timed(NamedTuple):
    """What is known of a program."""

    seconds: float
    """Its fastest call."""
    tokens: int
    """Of responses, in a call."""
    slot_steps: int
    """Tokens that its slots, or its rows, had time for."""
    cpu_s: float
    """Time of all cores in its last call, which others on the machine change less."""
    megabytes: float
    """Peak memory of its process."""


def main() -> None:
    """Print two Markdown tables, or be one of the processes that they compare."""
    arguments = _arguments()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if arguments.process:
        return serve({"torch": _torch, "server": _server, "engine": _engine}[arguments.process](arguments))
    full = ", all of that length" if arguments.full else ""
    print(f"{len(QUESTIONS)} prompts x {SAMPLES} samples, to {arguments.tokens} tokens{full}, {_cores()} cores\n")
    with tempfile.TemporaryDirectory() as folder:
        timed = _timed(arguments, Path(folder))
        print("\n".join(_table(timed)), end="\n\n")
        print("\n".join(_divergences(arguments.slots, Path(folder))))


def _timed(arguments: argparse.Namespace, folder: Path) -> dict[str, Timed]:
    """All programs, which take turns."""
    told = [f"--model={arguments.model}", f"--tokens={arguments.tokens}", f"--folder={folder}"]
    told += ["--full"] if arguments.full else []
    commands = {"torch": ["--process=torch"]}
    if arguments.server:
        commands["server"] = ["--process=server", "--server", arguments.server]
    commands |= {str(slots): ["--process=engine", "--slots", str(slots)] for slots in arguments.slots}
    processes = {name: Process([__file__, *command, *told]) for name, command in commands.items()}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(arguments.repeats):
        for name, process in processes.items():
            seconds[name].append(process.call())
    found = {}
    for name, process in processes.items():
        process.child.communicate()
        tokens, slot_steps, cpu_s = process.value  # type: ignore[misc]
        found[name] = Timed(min(seconds[name]), tokens, slot_steps, cpu_s, process.peak_megabytes)
    return found


def _table(timed: dict[str, Timed]) -> Iterator[str]:
    yield "| program | s | tokens | tokens/s | against torch | tokens/s of a core | against torch | slots busy | MB |"
    yield "|:---|---:|---:|---:|---:|---:|---:|---:|---:|"
    torch = timed["torch"]
    for name, found in timed.items():
        speed = found.tokens / found.seconds
        ratio, of_core = speed / (torch.tokens / torch.seconds), found.tokens / found.cpu_s
        if name == "server":
            yield f"| vLLM | {found.seconds:.1f} | {found.tokens:,} | {speed:.0f} | {ratio:.2f}x | | | | |"
            continue
        text = "`transformers` on torch" if name == "torch" else f"engine, {name} slots"
        busy = found.tokens / found.slot_steps
        yield (
            f"| {text} | {found.seconds:.1f} | {found.tokens:,} | {speed:.0f} | {ratio:.2f}x | {of_core:.0f} |"
            f" {of_core / (torch.tokens / torch.cpu_s):.2f}x | {busy:.0%} | {found.megabytes:,.0f} |"
        )


def _divergences(slots: list[int], folder: Path) -> Iterator[str]:
    import numpy as np

    drawn = {count: np.load(folder / f"{count}.npy") for count in slots}
    first = drawn[slots[0]]
    yield f"| against {slots[0]} slots | responses that part | tokens up to there | parted per 1,000 tokens |"
    yield "|:---|---:|---:|---:|"
    for count in slots[1:]:
        parted = (drawn[count] != first) & (first >= 0)
        shared = np.where(parted.any(axis=1), parted.argmax(axis=1), (first >= 0).sum(axis=1)).sum()
        number = int(parted.any(axis=1).sum())
        yield f"| {count} slots | {number} of {RESPONSES} | {shared:,} | {1000 * number / shared:.2f} |"


def _prompts(model: Path) -> list[list[int]]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [tokenizer(text)["input_ids"] for text in texts]


def _padded(model: Path, pad_id: int) -> tuple[Any, Any]:
    from m2po_jax.tasks import left_padded

    rows = _prompts(model)
    return left_padded(rows, max(map(len, rows)), pad_id)


def _engine(arguments: argparse.Namespace) -> Callable[[], Any]:
    import jax
    import numpy as np

    from m2po_jax.generation.engine import generate, sampling_keys
    from m2po_jax.models import Transformer, huggingface

    config = huggingface.read_config(arguments.model)
    params, model = huggingface.load(arguments.model, config), Transformer(config)
    tokens, valid = _padded(arguments.model, _end(arguments.model))
    groups = np.repeat(np.arange(len(QUESTIONS), dtype=np.uint32), SAMPLES)
    samples = np.tile(np.arange(SAMPLES, dtype=np.uint32), len(QUESTIONS))
    keys = sampling_keys(jax.random.key(0), np.uint32(0), groups, samples)
    options = {"samples_per_prompt": SAMPLES, "max_new_tokens": arguments.tokens, "slots": arguments.slots[0]}
    stop_ids = (-1,) if arguments.full else (_end(arguments.model),)

    def call() -> list[float]:
        start = time.process_time()
        made = generate(
            params, tokens, valid, keys, np.float32(1.0), model=model, stop_ids=stop_ids, pad_id=0, **options
        )
        drawn, _, mask, _, slot_steps = jax.device_get(made)
        np.save(arguments.folder / f"{arguments.slots[0]}.npy", np.where(mask, drawn, -1))
        return [int(mask.sum()), int(slot_steps), time.process_time() - start]

    return call


def _torch(arguments: argparse.Namespace) -> Callable[[], Any]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(_cores())
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    end = _end(arguments.model)
    tokens, valid = (torch.tensor(x).long() for x in _padded(arguments.model, end))
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    options |= {"num_return_sequences": SAMPLES, "max_new_tokens": arguments.tokens, "pad_token_id": end}
    options |= {"min_new_tokens": arguments.tokens} if arguments.full else {}

    def call() -> list[float]:
        start = time.process_time()
        torch.manual_seed(0)
        with torch.inference_mode():
            made = model.generate(input_ids=tokens, attention_mask=valid, **options)[:, tokens.shape[1] :]
        before_end = (torch.cumsum((made == end).long(), dim=1) == 0).sum(dim=1)
        lengths = torch.clamp(before_end + 1, max=made.shape[1])
        return [int(lengths.sum()), made.numel(), time.process_time() - start]

    return call


def _say(line: str) -> None:
    print(line, file=sys.stderr)  # standard output carries results between the processes


def _server(arguments: argparse.Namespace) -> Callable[[], Any]:
    from m2po_jax.generation.server import Server

    server, end = Server(arguments.server, _say), _end(arguments.model)
    shared = {"model": server.model(), "n": SAMPLES, "max_tokens": arguments.tokens, "temperature": 1.0, "top_p": 1.0}
    shared |= {"top_k": 0, "stop_token_ids": [end], "ignore_eos": arguments.full}
    if arguments.full:
        del shared["stop_token_ids"]
    bodies = [shared | {"prompt": prompt} for prompt in _prompts(arguments.model)]

    def call() -> list[float]:
        start = time.process_time()
        made = [each for asked in [server.complete(body) for body in bodies] for each in asked.result()]
        tokens = sum(len(each.tokens) for each in made)
        return [tokens, len(made) * arguments.tokens, time.process_time() - start]

    return call


def _cores() -> int:
    """Those that this process may use: `taskset` may say fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end(model: Path) -> int:
    """The id that ends a response of the model."""
    import transformers

    return int(transformers.AutoTokenizer.from_pretrained(model).eos_token_id)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python experiments/benchmarks/generation.py --model ~/models/SmolLM2-135M-Instruct",
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory, SmolLM2-135M or another")
    parser.add_argument("--tokens", type=int, default=128, help="longest response in tokens (default: 128)")
    about_slots = "numbers of slots, a program each (default: 64 32 16 8)"
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 32, 16, 8], help=about_slots)
    parser.add_argument("--server", help="URL of a vLLM that serves the model in float32, to be asked as well")
    parser.add_argument("--full", action="store_true", help="responses of full length, whatever the model says")
    parser.add_argument("--repeats", type=int, default=2, help="timed calls of each program (default: 2)")
    parser.add_argument("--process", choices=("torch", "server", "engine"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name, least in (("tokens", 1), ("repeats", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} is {getattr(arguments, name)}: use {least} or more")
    if min(arguments.slots) < 1:
        parser.error(f"--slots has {min(arguments.slots)}: use 1 or more")
    refuse_missing(parser, arguments.model)
    return arguments


if __name__ == "__main__":
    main()
