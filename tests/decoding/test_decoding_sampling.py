"""Filters without sorting equal the filters by sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.decoding.sampling import (
    best_token,
    best_tokens,
    check_sampling,
    log_probabilities,
    ordered_bits,
)
from sdx.records import Sampling


def by_sorting(logits, sampling):
    """The definition, one row at a time, in float64."""
    z = np.asarray(logits, np.float64) / sampling.temperature
    if sampling.top_k:
        z = np.where(z >= np.sort(z)[-min(sampling.top_k, z.size)], z, -np.inf)
    p = np.exp(z - z.max())
    p /= p.sum()
    above = np.array([p[p > x].sum() for x in p])
    p = np.where(above < sampling.top_p, p, 0.0)
    return p / p.sum()


@pytest.mark.parametrize(
    "top_k, top_p", [(0, 1.0), (1, 1.0), (7, 1.0), (0, 0.1), (0, 0.9), (5, 0.6)]
)
def test_filters(top_k, top_p):
    sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p)
    logits = 3 * jax.random.normal(jax.random.key(0), (20, 97))
    ours = np.exp(np.asarray(log_probabilities(logits, sampling)))
    for row, expected in zip(ours, map(lambda x: by_sorting(x, sampling), logits), strict=True):
        np.testing.assert_allclose(row, expected, atol=2e-6)


def test_ties_stay_together():
    law = jnp.exp(
        log_probabilities(jnp.array([1.0, 2.0, 2.0, 2.0]), Sampling(temperature=1.0, top_k=2))
    )
    np.testing.assert_allclose(law, [0, 1 / 3, 1 / 3, 1 / 3], atol=1e-6)


def test_masked_logits_stay_masked():
    logits = jnp.array([0.0, -jnp.inf, 1.0, -jnp.inf])
    for sampling in (Sampling(temperature=1.0, top_k=3), Sampling(temperature=1.0, top_p=0.99)):
        law = jnp.exp(log_probabilities(logits, sampling))
        assert law[1] == law[3] == 0 and jnp.isfinite(law).all()


def test_the_integer_image_keeps_the_order():
    keys = ordered_bits(jnp.array([-jnp.inf, -3.0, -1e-30, 0.0, 1e-30, 2.0, jnp.inf]))
    assert (keys[1:] > keys[:-1]).all()
    assert ordered_bits(jnp.float32(-0.0)) == ordered_bits(jnp.float32(0.0))


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_meaningless_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        check_sampling(Sampling(**{"temperature": 1.0, **bad}))


def test_the_best_tokens_are_those_of_a_sort():
    """Ties, -inf and NaN included; the first of equals wins."""
    # + 0.0: top_k puts -0 below 0, a comparison does not.
    logits = jnp.round(2 * jax.random.normal(jax.random.key(1), (3, 5, 33))) + 0.0
    logits = logits.at[0, 0, 4:].set(-jnp.inf)
    assert (best_token(logits) == jnp.argmax(logits, -1)).all()
    for count in (1, 4, 12):
        values, tokens = best_tokens(logits, count)
        expected = jax.lax.top_k(logits, count)
        real = expected[0] > -jnp.inf
        np.testing.assert_array_equal(values, expected[0])
        np.testing.assert_array_equal(jnp.where(real, tokens, 0), jnp.where(real, expected[1], 0))
    assert int(best_token(jnp.full((7,), jnp.nan))) < 7
