"""The best lengths and thresholds of a cascade, by gradient.

Lengths: many starts climb the soft cascade while it cools, then rounding and the exact
neighbourhood. Thresholds are real: many starts climb, the best is the answer.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sdx.records import Number, record, static
from sdx.theory.cascades import (
    CascadeOutcome,
    _as_vectors,
    _cascade,
    _soft_cascade,
    _threshold_cascade,
)
from sdx.theory.numerics import float64


@record
class CascadeOptimum:
    """Best parameters found (lengths, or thresholds), what they yield and how dearly: `evaluations`
    of the objective, a gradient counting as 3."""

    parameters: tuple[Number, ...]
    outcome: CascadeOutcome
    evaluations: int = static()


def _climb(objective, start, temperatures, rate):
    """Adam ascent of objective(free, temperature) along the temperatures; the last point."""
    optimiser = optax.adam(rate)

    def step(carry, temperature):
        free, state = carry
        slope = jax.grad(objective)(free, temperature)
        slope = jnp.where(jnp.isfinite(slope), slope, 0.0)
        updates, state = optimiser.update(-slope, state)
        return (optax.apply_updates(free, updates), state), None

    return jax.lax.scan(step, (start, optimiser.init(start)), temperatures)[0][0]


@functools.partial(jax.jit, static_argnames=("max_length",))
def _climb_lengths(alphas, costs, starts, temperatures, max_length):
    def objective(free, temperature):
        lengths = max_length * jax.nn.sigmoid(free)
        outcome = _soft_cascade(alphas, costs, lengths, temperature, max_length)
        return jnp.log(outcome.speedup)

    ends = jax.vmap(lambda s: _climb(objective, s, temperatures, 0.1))(starts)
    return max_length * jax.nn.sigmoid(ends)


@functools.partial(jax.jit, static_argnames=("max_length",))
def _speedups(alphas, costs, lengths, max_length):
    return jax.vmap(lambda k: _cascade(alphas, costs, k, max_length).speedup)(lengths)


@float64
def optimal_lengths(
    alphas, costs, max_length: int = 8, starts: int = 12, steps: int = 60
) -> CascadeOptimum:
    """Lengths (integers in 0..max_length) of highest throughput for a cascade of given models.

    alphas [n - 1], costs [n] as in `theory.cascades.cascade`. The ascent's ends are rounded and
    improved by exact evaluation of all neighbours (+-1 in every length) until none is better.
    """
    costs, alphas = _as_vectors(costs, alphas=alphas)
    levels = alphas.shape[0]
    # Cool from a blur of one token to a fifth of one: below, gradients vanish between integers.
    temperatures = jnp.geomspace(1.0, 0.2, steps)
    grid = np.random.default_rng(0).uniform(0.03, 0.97, (starts, levels))
    begin = jnp.asarray(np.log(grid / (1 - grid)))
    ends = _climb_lengths(alphas, costs, begin, temperatures, max_length)
    points = np.unique(np.clip(np.rint(np.asarray(ends)), 0, max_length), axis=0)
    moves = np.array(list(itertools.product((-1, 0, 1), repeat=levels)))
    seen = {}

    def evaluate(batch):
        new = [k for k in map(tuple, batch) if k not in seen]
        if new:
            # Padded to one shape per size class, so that few programs are compiled.
            size = max(32, 1 << (len(new) - 1).bit_length())
            padded = np.array(new + [new[0]] * (size - len(new)))
            values = np.asarray(_speedups(alphas, costs, jnp.asarray(padded), max_length))
            seen.update(zip(new, values[: len(new)].tolist(), strict=True))

    evaluate(points)
    for point in points:
        best = tuple(point)
        while True:
            around = np.clip(np.array(best) + moves, 0, max_length)
            evaluate(around)
            better = max(map(tuple, around), key=seen.get)
            if seen[better] <= seen[best]:
                break
            best = better
    best = max(seen, key=seen.get)
    return CascadeOptimum(
        parameters=tuple(int(k) for k in best),
        outcome=_cascade(alphas, costs, jnp.asarray(best), max_length),
        evaluations=3 * starts * steps + len(seen),
    )


@functools.partial(jax.jit, static_argnames=("crossing", "bounds"))
def _climb_thresholds(laws, costs, starts, rates, crossing, bounds):
    def objective(free, _):
        p = jax.nn.sigmoid(free)
        outcome = _threshold_cascade(laws, costs, p, crossing, *bounds)
        return jnp.log(outcome.speedup)

    ends = jax.vmap(lambda s: _climb(objective, s, rates, 0.15))(starts)
    return ends, jax.vmap(lambda free: objective(free, None))(ends)


@float64
def optimal_thresholds(
    laws, costs, crossing="keep", starts: int = 6, steps: int = 60, bounds=(32, 8, 48)
) -> CascadeOptimum:
    """Thresholds in (0, 1) of highest throughput for a cascade with confidence laws `laws`.

    As `theory.cascades.threshold_cascade`; bounds: its (max_tokens, max_call, steps).
    """
    laws = tuple(laws)
    costs = jnp.asarray(costs, jnp.float64)
    grid = np.random.default_rng(1).uniform(0.05, 0.95, (starts, len(laws)))
    begin = jnp.asarray(np.log(grid / (1 - grid)))
    ends, values = _climb_thresholds(laws, costs, begin, jnp.zeros(steps), crossing, bounds)
    best = jax.nn.sigmoid(ends[jnp.argmax(values)])
    return CascadeOptimum(
        parameters=tuple(float(p) for p in best),
        outcome=_threshold_cascade(laws, costs, best, crossing, *bounds),
        evaluations=starts * (3 * steps + 1),
    )
