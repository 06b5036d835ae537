"""Log-probs of responses by the forward pass of training, for whoever has tokens in rows."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from m2po_jax.models import Transformer, response_logprobs
from m2po_jax.tasks import left_padded, right_padded


def score(
    model: Transformer,
    params: Any,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    widths: tuple[int, int],
    temperature: float,
) -> np.ndarray:
    """Log-probs of the tokens of responses, float32 (B, T), zero beyond their lengths.

    `widths` is (P, T), what prompts and responses are padded to: a program is compiled for each (B, P, T).
    """
    prompts_BP, valid_BP = left_padded(prompts, widths[0], 0)
    responses_BT, mask_BT = right_padded(responses, widths[1], 0)
    scored_BT, _ = _score(model, params, prompts_BP, valid_BP, responses_BT, mask_BT, np.float32(temperature))
    return np.asarray(scored_BT, np.float32)


_score = partial(jax.jit, static_argnames=("model",))(response_logprobs)
