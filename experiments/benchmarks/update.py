"""What a whole update costs: packed here, against the same one written plainly in torch with transformers; one table.

Command:   python experiments/benchmarks/update.py --model DIR     (SmolLM2-135M)
Hardware:  2 CPU cores, about 4 minutes and 8 GB; needs torch and transformers; see README.md for the table.
Expect:    more than 1.3 times the tokens a second of torch, most of it because little of a packed row is padding.

The same responses, of lognormal lengths, the same objective, clip of the gradient and AdamW. Torch has a response a
row, padded to the longest prompt and the longest response, and computes logits of responses alone. Tokens are those
of prompts and responses, without padding. Each program runs in a process of its own, in turn with the other, and
times are the fastest of several calls: machines differ and are shared, read the ratios.

The share of the time outside of matrix products is what is left when every product of the update, at its size, is
timed alone and taken as often as the update computes it.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from model import Process, refuse_missing, serve

LEARNING_RATE, CLIP_NORM, THRESHOLD, CLIP = 1e-6, 1.0, 0.04, 0.2
GROUP_SIZE = 8
OBJECTIVES = ("m2po", "grpo")
SIZES = "objective", "responses", "prompt", "response"


class Timed(NamedTuple):
    """What is known of a program: its fastest call, the norm of its last gradient, and its peak memory."""

    seconds: float
    norm: float
    megabytes: float


class Data(NamedTuple):
    """One mini-batch on the host, prompts padded on the left and responses on the right, to the longest."""

    prompts: Any
    prompt_mask: Any
    responses: Any
    response_mask: Any
    noise: Any
    """What behaviour log-probs are beside the policy's."""
    rewards: Any

    @property
    def tokens(self) -> int:
        """Of prompts and responses."""
        return int(self.prompt_mask.sum() + self.response_mask.sum())


def main() -> None:
    """Print one Markdown table, or be one of the processes that it compares."""
    arguments = _arguments()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if arguments.process:
        return serve(_PROGRAMS[arguments.process](arguments))
    batch = data(arguments)
    timed = _timed(("torch", "jax"), arguments) | _timed(("jax_unpacked",), arguments)
    norms = {name: found.norm for name, found in timed.items()}
    if max(norms.values()) - min(norms.values()) > 1e-2 * max(norms.values()):
        raise SystemExit(f"error: norms of the gradient are {norms}: not the same update")
    print(f"{arguments.objective}, {arguments.responses} responses, {batch.tokens} tokens, {os.cpu_count()} cores\n")
    print("\n".join(_table(arguments, batch, timed)))


def _timed(names: tuple[str, ...], arguments: argparse.Namespace) -> dict[str, Timed]:
    """Programs that take turns."""
    told = [f"--{name}={getattr(arguments, name)}" for name in ("model", *SIZES)]
    processes = [Process([__file__, f"--process={name}", *told]) for name in names]
    seconds = [[process.call() for process in processes] for _ in range(arguments.repeats)]
    for process in processes:
        process.child.communicate()
    fastest = [min(times) for times in zip(*seconds, strict=True)]
    found = (Timed(s, process.value, process.peak_megabytes) for s, process in zip(fastest, processes, strict=True))
    return dict(zip(names, found, strict=True))


def _table(arguments: argparse.Namespace, batch: Data, timed: dict[str, Timed]) -> Iterator[str]:
    import numpy as np

    masks = np.concatenate([batch.prompt_mask, batch.response_mask], axis=1)
    rows, width, scored = _packed(arguments, batch).shapes
    padding = {"jax": 1 - batch.tokens / (rows * width)} | dict.fromkeys(("jax_unpacked", "torch"), 1 - masks.mean())
    yield "| update | s | tokens/s | padding | MB | against torch |"
    yield "|:---|---:|---:|---:|---:|---:|"
    names = {"jax": "packed", "jax_unpacked": "a response a row", "torch": "`transformers` on torch, a response a row"}
    for name, text in names.items():
        seconds, _, megabytes = timed[name]
        speed = f"{batch.tokens / seconds:.0f} | {padding[name]:.0%} | {megabytes:,.0f}"
        yield f"| {text} | {seconds:.2f} | {speed} | {timed['torch'].seconds / seconds:.2f}x |"
    products = products_s(arguments.model, rows, width, scored)
    outside = 1 - products / timed["jax"].seconds
    yield f"\n{outside:.0%} of the packed update is outside of matrix products, which take {products:.2f} s alone."


def data(arguments: argparse.Namespace) -> Data:
    """Lognormal lengths: prompts of 40 % of the longest on average, responses of 30 %."""
    import numpy as np

    rng = np.random.default_rng(0)
    count = arguments.responses

    def lengths(longest: int, share: float, spread: float) -> Any:
        drawn = np.exp(rng.normal(np.log(share * longest) - spread**2 / 2, spread, count))
        return np.clip(drawn, 2, longest).astype(int)

    prompt_lengths, response_lengths = lengths(arguments.prompt, 0.4, 0.4), lengths(arguments.response, 0.3, 0.7)
    prompt_mask = np.arange(prompt_lengths.max())[::-1] < prompt_lengths[:, None]
    response_mask = np.arange(response_lengths.max()) < response_lengths[:, None]
    ids = lambda mask: np.where(mask, rng.integers(3, 49_000, mask.shape), 0).astype(np.int32)  # noqa: E731
    noise = rng.normal(0, 0.3, response_mask.shape).astype(np.float32)
    rewards = (rng.random(count) < 0.5).astype(np.float32)
    return Data(ids(prompt_mask), prompt_mask, ids(response_mask), response_mask, noise, rewards)


class Packed(NamedTuple):
    """The mini-batch of the learner, packed, and its sizes."""

    batch: Any
    shapes: tuple[int, int, int]
    """Rows, slots of a row, and those whose logits are computed."""


def _mini_batch(batch: Data) -> Any:
    import numpy as np

    from m2po_jax.learner.update import MiniBatch

    count = len(batch.rewards)
    return MiniBatch(
        prompt_tokens=batch.prompts,
        prompt_valid=batch.prompt_mask,
        response_tokens=batch.responses,
        response_mask=batch.response_mask,
        behavior_logprobs=np.zeros(batch.noise.shape, np.float32),
        rewards=batch.rewards,
        truncated=np.zeros(count, bool),
        staleness=np.zeros(count, np.int32),
    )


def _packed(arguments: argparse.Namespace, batch: Data) -> Packed:
    import numpy as np

    from m2po_jax.learner.packing import Packing, Sequences, row_width

    order = np.argsort(~batch.prompt_mask, axis=1, kind="stable")
    prompts = np.take_along_axis(batch.prompts, order, axis=1)
    lengths = batch.prompt_mask.sum(axis=1), batch.response_mask.sum(axis=1)
    sequences = Sequences(prompts, lengths[0], batch.responses, lengths[1])
    packing = Packing(row_width(arguments.prompt + arguments.response), arguments.response, arguments.responses)
    rows = packing.pack(sequences, packing.size(packing.rows_needed(sequences)))
    mini_batch = _mini_batch(batch)._replace(prompt_tokens=None, prompt_valid=None, packed=rows)
    return Packed(mini_batch, (*rows.tokens.shape, rows.scored.shape[1]))


def _jax_update(arguments: argparse.Namespace, packed: bool) -> Callable[[], float]:
    import jax
    import numpy as np

    from m2po_jax import objectives
    from m2po_jax.config import LearnerConfig
    from m2po_jax.learner.state import init_state, make_optimizer
    from m2po_jax.learner.update import UpdateSpec, make_score, make_update
    from m2po_jax.models import Transformer, huggingface

    config = huggingface.read_config(arguments.model)
    params = huggingface.load(arguments.model, config)
    objective = objectives.get(arguments.objective)
    spec = UpdateSpec(Transformer(config), objective, 1.0, GROUP_SIZE, "std", arguments.response)
    whole = data(arguments)
    batch = _packed(arguments, whole).batch if packed else _mini_batch(whole)
    behavior = np.asarray(make_score(spec)(params, batch)) + whole.noise
    batch = batch._replace(behavior_logprobs=np.where(whole.response_mask, behavior, 0))
    learner = LearnerConfig(learning_rate=LEARNING_RATE, warmup_updates=0, decay_updates=None, clip_norm=CLIP_NORM)
    optimizer = make_optimizer(learner)
    update = make_update(spec, optimizer)
    state = jax.device_put(init_state(params, optimizer), jax.devices()[0])  # as an update leaves it
    del params

    def call() -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(update(state, batch))
        return float(metrics["grad_norm"])

    return call


def _torch_update(arguments: argparse.Namespace) -> Callable[[], float]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    whole = Data(*(torch.from_numpy(x) for x in data(arguments)))
    tokens, mask = torch.cat([whole.prompts, whole.responses], 1).long(), whole.response_mask
    attention = torch.cat([whole.prompt_mask, mask], 1).long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)

    def logprobs() -> Any:
        inputs = {"input_ids": tokens, "attention_mask": attention, "position_ids": positions, "use_cache": False}
        logits = model(**inputs, logits_to_keep=mask.shape[1] + 1).logits[:, :-1]
        return torch.log_softmax(logits, -1).gather(-1, whole.responses.long()[..., None])[..., 0]

    with torch.no_grad():
        behavior = logprobs() + whole.noise
    groups = whole.rewards.reshape(-1, GROUP_SIZE)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).reshape(-1, 1)

    def call() -> float:
        optimizer.zero_grad(set_to_none=True)
        log_ratio = torch.where(mask, logprobs() - behavior, 0.0)
        keep = mask & _TORCH_KEPT[arguments.objective](log_ratio.detach(), advantages, mask)
        loss = -(keep * log_ratio.exp() * advantages).sum() / mask.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return norm.item()

    return call


def _torch_m2po(log_ratio: Any, advantages: Any, mask: Any) -> Any:
    """All but the largest of the trust region, so that the mean of those left is at most the threshold."""
    import torch

    pushed = mask & (log_ratio * advantages > 0)
    squares, order = log_ratio[pushed].square().sort()
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1)
    kept = torch.zeros(len(squares), dtype=torch.bool)
    kept[order[: int((means <= THRESHOLD).sum())]] = True
    keep = torch.ones_like(mask)
    keep[pushed] = kept
    return keep


def _torch_grpo(log_ratio: Any, advantages: Any, mask: Any) -> Any:
    """All but those that are pushed, with a ratio outside of the clip; the others' gradient is that of the clip."""
    ratio = log_ratio.exp()
    return ~((advantages > 0) & (ratio > 1 + CLIP) | (advantages < 0) & (ratio < 1 - CLIP))


_TORCH_KEPT = {"m2po": _torch_m2po, "grpo": _torch_grpo}

_PROGRAMS: dict[str, Callable[[argparse.Namespace], Callable[[], float]]] = {
    "jax": lambda arguments: _jax_update(arguments, packed=True),
    "jax_unpacked": lambda arguments: _jax_update(arguments, packed=False),
    "torch": _torch_update,
}


def products_s(model: Path, rows: int, width: int, scored: int) -> float:
    """Seconds of the matrix products of a packed update, each timed alone."""
    from m2po_jax.models import huggingface

    c = huggingface.read_config(model)
    tokens, d, v, f = rows * width, c.width, c.vocab_size or 0, c.mlp_width
    q, k = c.query_heads * c.head_dim, c.kv_heads * c.head_dim
    once = {shape: _of_weights_s(tokens, *shape) for shape in {(d, q), (q, d), (d, k), (d, f), (f, d)}}
    total = c.layers * sum(once[shape] for shape in ((d, q), (q, d), (d, k), (d, k), (d, f), (d, f), (f, d)))
    heads = rows * c.kv_heads
    queries = (heads, width * c.query_heads // c.kv_heads)
    scores = _product_s((*queries, c.head_dim), (heads, c.head_dim, width))
    values = _product_s((*queries, width), (heads, width, c.head_dim))
    turned = _product_s((heads, width, queries[1]), (*queries, c.head_dim))
    total += c.layers * (3 * scores + 2 * values + 2 * turned)  # forward 1 and 1; scores again; four gradients
    return total + _of_weights_s(rows * scored, d, v)


def _of_weights_s(tokens: int, inner: int, outer: int) -> float:
    """Forward, and the gradients of the input and of the weights."""
    shapes = (
        ((tokens, inner), (inner, outer)),
        ((tokens, outer), (outer, inner)),
        ((inner, tokens), (tokens, outer)),
    )
    return sum(_product_s(*shape) for shape in shapes)


def _product_s(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> float:
    import jax
    import jax.numpy as jnp

    a, b = jnp.ones(a_shape, jnp.float32), jnp.ones(b_shape, jnp.float32)
    product, times = jax.jit(jnp.matmul), []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(product(a, b))
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python experiments/benchmarks/update.py --model ~/models/SmolLM2-135M-Instruct",
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory, SmolLM2-135M or another")
    parser.add_argument("--objective", choices=OBJECTIVES, default="m2po", help="default: m2po")
    parser.add_argument("--responses", type=int, default=16, help="of the mini-batch, in groups of 8 (default: 16)")
    parser.add_argument("--prompt", type=int, default=64, help="longest prompt in tokens (default: 64)")
    parser.add_argument("--response", type=int, default=192, help="longest response in tokens (default: 192)")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each program (default: 3)")
    parser.add_argument("--process", choices=_PROGRAMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name, least in (("responses", 8), ("prompt", 8), ("response", 8), ("repeats", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} is {getattr(arguments, name)}: use {least} or more")
    if arguments.responses % GROUP_SIZE:
        parser.error(f"--responses is {arguments.responses}: use a multiple of {GROUP_SIZE}")
    refuse_missing(parser, arguments.model)
    return arguments


if __name__ == "__main__":
    main()
