"""One decoder, its decode cache, and the log-probs of given tokens."""

from m2po_jax.models.logprobs import response_logprobs
from m2po_jax.models.transformer import Cache, Transformer

__all__ = ["Cache", "Transformer", "response_logprobs"]
