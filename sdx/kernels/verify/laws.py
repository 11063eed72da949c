"""What the implementations of verify exchange: laws of rows, and the streamed surplus."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

NEGATIVE = -1e30
BINS = 16  # thresholds looked at in one pass


class Law(NamedTuple):
    """R rows of logits `[R, V]` and what turns them into probabilities.

    p(x) = exp(logit(x) * inverse_temperature - log_normaliser) where logit(x) >= threshold,
    else 0. Probabilities are never stored. best_R: the likeliest token (lowest id among equals).
    """

    logits_RxV: jax.Array
    inverse_temperature_R: jax.Array
    log_normaliser_R: jax.Array
    threshold_R: jax.Array
    best_R: jax.Array

    def log_probability(self, rows, tokens):
        """ln p of `tokens` in `rows` (equal shapes), -inf where filtered."""
        logit = self.logits_RxV[rows, tokens].astype(jnp.float32)
        value = logit * self.inverse_temperature_R[rows] - self.log_normaliser_R[rows]
        return jnp.where(logit >= self.threshold_R[rows], value, -jnp.inf)


class Statistics(NamedTuple):
    """Per row: largest logit, its token, sum of exp((logit - top) * inverse_temperature)."""

    top_R: jax.Array
    best_R: jax.Array
    total_R: jax.Array


class Request(NamedTuple):
    """N questions about r(x) = (weight * p(x) - c * q(x))+ with excluded tokens cleared.

    target_rows_N, draft_rows_N: which row of either law. excluded_NxK: token ids, -1 for none.
    """

    target_rows_N: jax.Array
    draft_rows_N: jax.Array
    weight_N: jax.Array
    c_N: jax.Array
    excluded_NxK: jax.Array


class Surplus(NamedTuple):
    """Answers, summed over tokens that are not excluded.

    mass_N: S = sum of r. left_N: sum of p. undrawn_N: sum of q (0 without a draft).
    token_N, score_N: argmax of ln r + noise and that maximum (about -1e30 where r vanishes);
    left_token_N: argmax of ln p + noise. Without noise the tokens are meaningless.
    """

    mass_N: jax.Array
    left_N: jax.Array
    undrawn_N: jax.Array
    token_N: jax.Array
    score_N: jax.Array
    left_token_N: jax.Array
    left_score_N: jax.Array


def probability(logit, inverse_temperature, log_normaliser, threshold):
    """p of a tile of logits in float32; filtered and padded (-inf) entries give exactly 0."""
    value = jnp.exp(logit * inverse_temperature - log_normaliser)
    return jnp.where(logit >= threshold, value, 0.0)


def log_or_least(x):
    """ln x, and a very small finite number for 0 (double `where`: no -inf is formed)."""
    return jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), NEGATIVE)
