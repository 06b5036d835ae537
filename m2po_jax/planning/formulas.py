"""FLOPs of an update and of a unit's generation in closed form, from the configuration alone; 2 a multiply-add."""

from dataclasses import dataclass

from m2po_jax.config import Config, ModelConfig
from m2po_jax.learner.spec import objective_of
from m2po_jax.models import flops
from m2po_jax.models.flops import Forward, Work
from m2po_jax.planning.programs import row_widths

KERNEL_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Products of queries times keys times head_dim in each kernel of splash attention: both gradients repeat scores."""


@dataclass(frozen=True)
class UpdateFlops:
    """FLOPs of one model update over all devices."""

    useful: float
    """Forward once, backward twice as much: what MFU counts."""
    executed: float
    """With what is computed again: the pass before an objective's statistics, remat, scores and logits."""
    first_pass: float
    """Of those, the pass before an objective's statistics."""


def forward_flops(model: ModelConfig, rows: int, prompt: int, response: int) -> Forward:
    """One pass over `rows` sequences at full width; logits of response tokens only."""
    length = prompt + response
    return flops.forward(model, Work(rows * length, rows * length * (length + 1) / 2, rows * response))


def update_flops(config: Config, kernels: bool) -> UpdateFlops:
    """One model update of responses of full length.

    Args:
        kernels: attention runs in those of TPUs, which skip the keys after a query.
    """
    rows, (length, scored) = config.mini_batch_rows, row_widths(config)
    real = forward_flops(config.model, rows, config.task.max_prompt_tokens, config.sampling.max_new_tokens)
    forward = forward_flops(config.model, rows, length - scored, scored)
    first = config.learner.micro_batches > 1 and objective_of(config).needs_whole_batch
    forwards, remat = 1 + first, config.model.remat
    gradients = (KERNEL_PRODUCTS["dq"] + KERNEL_PRODUCTS["dkv"]) / 2 if kernels else 2.5
    blocks = forwards + 2 + (remat == "full")
    attention = (forwards + gradients + (remat != "none")) * (1.0 if kernels else 2.0)
    executed = blocks * forward.blocks + attention * forward.attention + (forwards + 3) * forward.logits
    first_pass = forward.blocks + (1.0 if kernels else 2.0) * forward.attention + forward.logits if first else 0.0
    return UpdateFlops(3.0 * real.total, executed, first_pass)


def generate_flops(config: Config) -> float:
    """One work unit: prompts once, then every response to its full length, each token against the keys before it."""
    model, prompts = config.model, config.rollouts.prompts_per_unit
    samples, prompt, response = (
        config.rollouts.group_size,
        config.task.max_prompt_tokens,
        config.sampling.max_new_tokens,
    )
    prefill = forward_flops(model, prompts, prompt, 1)
    whole = forward_flops(model, prompts * samples, prompt, response)
    shared = forward_flops(model, prompts * samples, prompt, 0)
    return prefill.total + whole.total - shared.blocks - shared.attention


def kernel_flops(name: str, model: ModelConfig, rows: int, length: int, tensor: int, block: int) -> float:
    """One call of a splash kernel on one device, for `rows` sequences; blocks on the diagonal are computed whole.

    Args:
        tensor: devices that the heads are cut over; block: queries of a block.
    """
    kind = next((kind for kind in ("dkv", "dq", "fwd") if kind in name), "fwd")
    pairs = length * (length + block) / 2
    return 2.0 * KERNEL_PRODUCTS[kind] * rows * (model.query_heads // tensor) * model.head_dim * pairs
