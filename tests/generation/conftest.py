import numpy as np
import pytest

from m2po_jax.rollouts import Rollouts


@pytest.fixture(scope="session")
def equal_rollouts():
    """Asserts that two Rollouts hold the same values in every column."""

    def equal(a: Rollouts, b: Rollouts) -> None:
        for name, value in vars(a).items():
            np.testing.assert_array_equal(value, getattr(b, name), err_msg=name)

    return equal
