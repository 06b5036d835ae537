"""`m2po export`: a published version of a run's policy as a Hugging Face directory."""

from dataclasses import replace

import jax

from m2po_jax.config import Config, ModelConfig, UserError
from m2po_jax.models import Transformer, huggingface, sharding
from m2po_jax.rollouts import open_run, weights
from m2po_jax.tasks import ArithmeticTask


def export(run: str, out: str, version: int | None = None, source: str | None = None, dtype: str | None = None) -> str:
    """Write `out` and say what was written.

    Args:
        run: run directory or URL.
        out: a directory that is not there yet.
        version: a published version; None: the newest.
        source: directory with tokenizer files, perhaps with the weights whose dtypes to store in; None: the one that
            the run began from.
        dtype: float32, float16 or bfloat16; None: as in the source, or bfloat16.

    Raises:
        UserError: no such version, or one that is damaged; and as `models.huggingface.export` does.
    """
    store, info = open_run(run)
    published = weights.versions(store)
    if not published:
        raise UserError(f"{store.url} has no published weights yet")
    version = max(published) if version is None else version
    if version not in published:
        raise UserError(f"{store.url} has no weights of version {version}: it has {', '.join(map(str, published))}")
    model = Transformer(_with_vocabulary(info.config))
    abstract = jax.eval_shape(model.init_params, jax.random.key(0))
    params, digest = weights.load(store, version, sharding.published(abstract, model.config))
    source = source or info.config.model.source
    huggingface.export(params, model.config, source, out, dtype)
    tokenizer = f"with the tokenizer of {source}" if source else "without a tokenizer: its prompts are characters"
    return f"wrote {out}: version {version} of {store.url} (weights {digest[:12]}), {tokenizer}"


def _with_vocabulary(config: Config) -> ModelConfig:
    if config.model.vocab_size is not None:
        return config.model
    return replace(config.model, vocab_size=ArithmeticTask(config.task).tokenizer.vocab_size)
