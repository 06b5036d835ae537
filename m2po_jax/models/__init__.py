"""One decoder, its decode cache, and the log-probs of given tokens."""

from m2po_jax.models.logprobs import packed_logprobs, response_logprobs
from m2po_jax.models.transformer import Cache, Transformer

__all__ = ["Cache", "Transformer", "packed_logprobs", "response_logprobs"]
