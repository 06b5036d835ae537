"""Second-moment trust policy optimisation (M2PO) for language models on JAX, on rollouts of any age."""

__version__ = "0.1.0"
