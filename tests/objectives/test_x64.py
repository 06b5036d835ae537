"""With 64-bit numbers switched on for the whole process, objectives still compute in float32, and the same."""

import pytest

from tests import tiny

SCRIPT = """
import jax
import numpy as np
from m2po_jax import objectives
from tests.objectives import batches

policy, behavior, advantages, mask = batches.normal_batch(0)
for name in objectives.names():
    losses = []
    for wide in (False, True):
        jax.config.update("jax_enable_x64", wide)
        arrays = [x.astype(np.float64) if wide else x for x in (policy, behavior, advantages)]
        more = {"entropy": -arrays[0], "staleness": np.arange(len(mask)), "proximal_logprobs": arrays[0]}
        (loss, metrics), gradient = jax.value_and_grad(objectives.get(name), has_aux=True)(*arrays, mask, **more)
        assert loss.dtype == np.float32 and all(value.dtype == np.float32 for value in metrics.values())
        losses.append((float(loss), np.asarray(gradient, np.float32), float(metrics["m2_kept"])))
    for a, b in zip(*losses):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7, err_msg=name)
    print(name)
"""


@pytest.mark.slow
def test_every_objective_is_the_same_with_64_bits(user_env):
    done = tiny.run(tiny.subprocess_env(user_env), "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 15
