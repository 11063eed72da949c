"""Confidence of a draft token: how likely the target is to accept it, as the draft sees it.

The raw confidence is the draft's own probability (softmax at temperature 1, whatever the
sampling). Calibration maps it to what was measured; any map is lossless, a good one stops drafting
at the right place. Fitted from the counts that `statistics.Statistics` keeps per bin.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from sdx.records import record, static

BINS = 20  # equal bins of raw confidence over [0, 1]


def bin_of(confidence: jax.Array) -> jax.Array:
    """The bin's number, 0 .. BINS - 1."""
    return jnp.clip((confidence * BINS).astype(jnp.int32), 0, BINS - 1)


class Calibration(Protocol):
    """A hashable map of raw to calibrated confidence, monotone, elementwise."""

    def __call__(self, raw: jax.Array) -> jax.Array: ...


@record
class Uncalibrated:
    """The raw confidence."""

    def __call__(self, raw: jax.Array) -> jax.Array:
        return raw


@record
class TemperatureCalibration:
    """The log-odds of the raw confidence divided by `temperature` (> 1: less sure)."""

    temperature: float = static(default=1.0)

    def __call__(self, raw: jax.Array) -> jax.Array:
        raw = jnp.clip(raw, 1e-7, 1 - 1e-7)
        return jax.nn.sigmoid((jnp.log(raw) - jnp.log1p(-raw)) / self.temperature)


@record
class IsotonicCalibration:
    """Piecewise linear through measured points, non-decreasing."""

    raw: tuple[float, ...] = static()
    measured: tuple[float, ...] = static()

    def __call__(self, raw: jax.Array) -> jax.Array:
        return jnp.interp(raw, jnp.asarray(self.raw), jnp.asarray(self.measured))


def fit_temperature(tested_C: np.ndarray, accepted_C: np.ndarray) -> TemperatureCalibration:
    """The temperature of largest likelihood of the counts per bin (BINS bins).

    Raises ValueError if nothing was tested.
    """
    tested, accepted = _counts(tested_C, accepted_C)
    middle = (np.arange(BINS) + 0.5) / BINS
    odds = np.log(middle) - np.log1p(-middle)

    def loss(log_temperature: float) -> float:
        z = odds / np.exp(log_temperature)
        return float(np.sum(tested * np.logaddexp(0, z) - accepted * z))

    best = scipy.optimize.minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded")
    return TemperatureCalibration(temperature=float(np.exp(best.x)))


def fit_isotonic(tested_C: np.ndarray, accepted_C: np.ndarray) -> IsotonicCalibration:
    """The non-decreasing acceptance rate per bin of least squares, weighted by the counts.

    Raises ValueError if nothing was tested.
    """
    tested, accepted = _counts(tested_C, accepted_C)
    seen = tested > 0
    middle = ((np.arange(BINS) + 0.5) / BINS)[seen]
    rate = accepted[seen] / tested[seen]
    fitted = scipy.optimize.isotonic_regression(rate, weights=tested[seen]).x
    return IsotonicCalibration(raw=tuple(middle.tolist()), measured=tuple(fitted.tolist()))


def _counts(tested_C, accepted_C) -> tuple[np.ndarray, np.ndarray]:
    tested, accepted = np.asarray(tested_C, float), np.asarray(accepted_C, float)
    if tested.shape != (BINS,) or accepted.shape != (BINS,):
        raise ValueError(f"counts of {tested.shape[0]} bins: a calibration is fitted on {BINS}")
    if tested.sum() == 0:
        raise ValueError("no draft was tested: measure with a policy that records confidence")
    return tested, accepted
