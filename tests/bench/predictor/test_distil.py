from __future__ import annotations

import numpy as np
import pytest

from bench.predictor.distil import alone, distilled, rounded
from predictor_store.predict.static_encoder import token_vectors


def test_token_vectors_are_the_same_on_every_host() -> None:
    """But for rounding, which is a thousand times what another order of sums makes of it."""
    rng = np.random.default_rng(0)
    shares = 0.97 ** np.arange(40) * rng.choice([0.3, 1.0], size=(3000, 1))
    alone = rng.gamma(2.0, size=(3000, 40)) * shares @ np.linalg.qr(rng.normal(size=(40, 40)))[0]
    ours = distilled(alone.astype(np.float32))
    noise = 1e-4 * np.abs(alone).mean() * rng.normal(size=alone.shape)
    theirs = distilled((alone + noise).astype(np.float32))
    np.testing.assert_allclose(ours, theirs, atol=0.01 * np.abs(ours).max())


@pytest.mark.slow
def test_the_shipped_file_is_what_the_command_makes() -> None:
    """But for the last digit, which hosts round differently."""
    vectors, scales = rounded(distilled(alone()))
    shipped, shipped_scales = token_vectors()
    np.testing.assert_allclose(scales, shipped_scales, rtol=1e-2)
    assert abs(vectors.astype(int) - shipped).max() <= 2
