"""Several drafters in a row: exact tokens and cost of a cascade of any number of levels.

    level 3 (target)   calls level 2 until it holds k_3 tokens (or: until the product of their
      `- level 2         confidences is under p_3), then verifies all it holds in one pass
           `- level 1  drafts one token per call

One call of level n returns X_n tokens: the accepted ones and one more. Calls are independent, so
the totals at which level n + 1 may stop form a renewal process. With B_i the mass "a call of level
n ends at i tokens, all i are accepted and drafting goes on", v the acceptance rate and P the law of
X_n, the tokens of level n + 1 have

    P(A >= j) = sum_{i < j} B_i v^{j - i} P(X_n >= j - i),      X_{n+1} = A + 1,

one formula for fixed lengths and thresholds: only B differs. Multi-level slides (Benoit, Marchal,
Obrecht 2026), algorithms FixedLengthGen and ThresholdGen; the slides treat two levels.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from sdx.records import Number, record
from sdx.theory.numerics import float64
from sdx.theory.thresholds import _check_choice, _grid, _nodes, _toeplitz


@record
class CascadeOutcome:
    """Per call of the target. tokens: expected output; cost: expected cost in the units of `costs`;
    throughput: tokens / cost; speedup: over the target alone; calls [levels - 1]: expected calls
    of each level per call of the level above; missing: probability left out by truncation;
    survival [n]: P(at least k drafts accepted); verify: expected cost of the target's own pass."""

    tokens: Number
    cost: Number
    throughput: Number
    speedup: Number
    calls: Number
    missing: Number
    survival: Number
    verify: Number


def _tail(law):
    """P(X >= l) for l = 0..n from P(X = l), l = 0..n."""
    return jnp.cumsum(law[::-1])[::-1]


def _verified(accepted, tail, rate, size):
    """P(X = j), j = 0..size, of a level whose boundary masses are `accepted` [starts]."""
    starts = accepted.shape[0]
    gap = np.arange(size)[:, None] - np.arange(starts)[None, :]  # j - i for j = 0..size - 1
    reach = jnp.append(tail, 0.0)[np.clip(gap, 0, tail.shape[0])]
    # v^gap with gap clipped at 1: 0^0 and its gradient never arise.
    weight = jnp.where(gap >= 1, rate ** np.maximum(gap, 1) * reach, 0.0)
    survival = weight @ accepted  # P(A >= j), j = 1..size - 1 (row 0 is empty)
    survival = survival.at[0].set(1.0)
    return jnp.concatenate([jnp.zeros(1), survival - jnp.append(survival[1:], 0.0)]), survival


def _renewal_masses(law, starts):
    """u_i = P(a call ends at exactly i tokens), i = 0..starts - 1."""
    n = law.shape[0] - 1  # calls return 1..n tokens

    def step(recent, _):
        new = jnp.dot(law[1:], recent)
        return jnp.concatenate([new[None], recent[:-1]]), new

    first = jnp.zeros(n).at[0].set(1.0)
    if starts == 1:
        return jnp.ones(1)
    return jnp.concatenate([jnp.ones(1), jax.lax.scan(step, first, None, length=starts - 1)[1]])


def _fixed(alphas, costs, going_on):
    """going_on [levels - 1, K]: probability of drafting on while holding i tokens, i < K."""
    levels, starts = going_on.shape
    law = jnp.array([0.0, 1.0])
    cost, calls, own = costs[0], [], costs[0]
    for n in range(levels):
        ends = _renewal_masses(law, starts) * going_on[n]
        # A level that holds starts - 1 tokens may get as many more as one call returns.
        size = starts + law.shape[0] - 1
        tail = _tail(law)
        rate = alphas[n]
        power = rate ** np.maximum(np.arange(starts), 1)
        power = jnp.where(np.arange(starts) == 0, 1.0, power)
        own = _pass_cost(costs[n + 1], lambda e=ends, t=tail, s=size: _verified(e, t, 1.0, s)[1])
        law, survival = _verified(ends * power, tail, rate, size)
        calls.append(jnp.sum(ends))
        cost = own + calls[-1] * cost
    return _outcome(survival, cost, own, _alone(costs), jnp.stack(calls), jnp.zeros(()))


def _pass_cost(cost, held):
    """Expected cost of a pass: `cost` if it is one number, else `cost`[j] for j tokens held, with
    held() = P(at least j tokens held)."""
    if jnp.ndim(cost) == 0:
        return cost
    at_least = held()
    return cost[0] + jnp.sum(at_least[1:] * jnp.diff(cost[: at_least.shape[0]]))


def _alone(costs):
    """The target's pass that verifies nothing."""
    return costs[-1] if jnp.ndim(costs[-1]) == 0 else costs[-1][0]


def _outcome(survival, cost, verify, alone, calls, missing):
    tokens = jnp.sum(survival)
    throughput = tokens / cost
    return CascadeOutcome(
        tokens=tokens,
        cost=cost,
        throughput=throughput,
        speedup=throughput * alone,
        calls=calls,
        missing=missing,
        survival=survival,
        verify=verify,
    )


@functools.partial(jax.jit, static_argnames="max_length")
def _cascade(alphas, costs, lengths, max_length):
    # Mixing: every call draws the length below or above with the odds of the fraction.
    going_on = jnp.clip(lengths[:, None] - np.arange(max_length), 0.0, 1.0)
    return _fixed(alphas, costs, going_on)


@functools.partial(jax.jit, static_argnames="max_length")
def _soft_cascade(alphas, costs, lengths, temperature, max_length):
    place = (lengths[:, None] - np.arange(max_length) - 0.5) / temperature
    return _fixed(alphas, costs, jax.nn.sigmoid(place))


def held_limits(levels: int, max_length: int) -> list[int]:
    """The most tokens that each level above the first can hold: the length of its cost table less
    one (`cascade_of_passes`)."""
    most, longest = [], 1
    for _ in range(levels):
        most.append(max_length - 1 + longest)
        longest = most[-1] + 1
    return most


@float64
def cascade_of_passes(alphas, costs, lengths, max_length: int) -> CascadeOutcome:
    """`cascade` where a pass costs more the more it verifies.

    costs: one number for the smallest model's pass, then for each level a vector whose entry j is
    the cost of its pass over j held tokens and the one before them, j = 0..`held_limits`. The
    number held is exact: P(held >= j) is P(A >= j) at acceptance rate 1.
    """
    alphas, lengths = (jnp.asarray(v, jnp.float64) for v in (alphas, lengths))
    return _cascade(alphas, tuple(costs), lengths, int(max_length))


def _as_vectors(costs, **others):
    costs = jnp.asarray(costs, jnp.float64)
    vectors = [jnp.asarray(v, jnp.float64) for v in others.values()]
    for name, vector in zip(others, vectors, strict=True):
        if costs.ndim != 1 or vector.shape != (costs.shape[0] - 1,):
            raise ValueError(
                f"costs has shape {costs.shape}, {name} {vector.shape}: n models, smallest first, "
                f"need n costs and n - 1 {name}"
            )
    return costs, *vectors


@float64
def cascade(alphas, costs, lengths, max_length: int | None = None) -> CascadeOutcome:
    """Exact tokens, cost and throughput of FixedLengthGen with n models.

    alphas [n - 1]: acceptance rate of each model's tokens by the next one. costs [n]: one pass of
    each model, smallest first, any unit. lengths [n - 1]: k of each level above the first, real
    >= 0: between integers each call draws the lower or the higher one (mixing), so throughput is
    monotone between integers. max_length: static bound of the lengths, needed when they are traced.
    """
    costs, alphas, lengths = _as_vectors(costs, alphas=alphas, lengths=lengths)
    if max_length is None:
        max_length = max(1, math.ceil(float(jnp.max(lengths))))
    return _cascade(alphas, costs, lengths, int(max_length))


@float64
def soft_cascade(alphas, costs, lengths, temperature, max_length: int) -> CascadeOutcome:
    """As `cascade`, drafting on while holding i tokens with probability
    sigmoid((length - i - 1/2) / temperature): smooth in the lengths, exact as it cools (at
    integers). What the ascent over lengths differentiates."""
    costs, alphas, lengths = _as_vectors(costs, alphas=alphas, lengths=lengths)
    temperature = jnp.asarray(temperature, jnp.float64)
    return _soft_cascade(alphas, costs, lengths, temperature, int(max_length))


# ---------------------------------------------------------------------------- thresholds


def _convolutions(matrix, count):
    """The identity and the powers of a Toeplitz matrix, [count + 1, n, n]."""
    identity = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
    powers = jax.lax.scan(lambda p, _: (matrix @ p, p), identity, None, length=count + 1)
    return powers[1]


def _boundary_masses(law, powers, starts):
    """Grid masses [starts, n] of "a call ends at i tokens with the product at y, still >= p"."""
    longest = law.shape[0] - 1
    moves = law[1:, None, None] * powers[1 : longest + 1]
    size = powers.shape[-1]

    def step(recent, _):
        new = jnp.einsum("lab,lb->a", moves, recent)
        return jnp.concatenate([new[None], recent[:-1]]), new

    start = jnp.zeros(size, powers.dtype).at[0].set(1.0)
    first = jnp.zeros((longest, size), powers.dtype).at[0].set(start)
    rest = jax.lax.scan(step, first, None, length=starts - 1)[1]
    return jnp.concatenate([start[None], rest])


def _dropped(law, accepted, tilted, plain, inside):
    """P(A >= j) if a call that takes the product under p is dropped whole.

    A call of l tokens that starts at i contributes to j = i + r, 1 <= r <= l, when all its l
    confidences keep the product >= p, r of them counted as accepted: their kernel is the r-fold
    tilted and (l - r)-fold plain convolution. Both act on the left of `inside`, as vectors.
    """
    starts, longest = accepted.shape[0], law.shape[0] - 1
    rest = jnp.einsum("a,mab->mb", inside, plain)  # after m more tokens [m, n]
    extra = np.arange(longest + 1)[None, :] - np.arange(1, longest + 1)[:, None]  # l - r
    weight = jnp.where(extra >= 0, law[None, :], 0.0)
    kept = jnp.einsum("rl,rlb->rb", weight, rest[np.maximum(extra, 0)])
    ends = jnp.einsum("rb,rbc,ic->ri", kept, tilted[1:], accepted)
    survival = jnp.zeros(starts)
    for r in range(1, min(longest, starts - 1) + 1):
        survival = survival.at[r:].add(ends[r - 1, : starts - r])
    return survival.at[0].set(1.0)


def _held(law, drafted, ends, plain, inside, crossing):
    """P(at least j tokens held for verification): acceptance at rate 1."""
    if crossing == "keep":
        return _verified(ends, _tail(law), 1.0, ends.shape[0])[1]
    return _dropped(law, drafted, plain, plain, inside)


@functools.partial(jax.jit, static_argnames=("crossing", "max_tokens", "max_call", "steps"))
def _threshold_cascade(laws, costs, thresholds, crossing, max_tokens, max_call, steps):
    law = jnp.array([0.0, 1.0])
    cost, calls, missing, own = costs[0], [], jnp.zeros(()), costs[0]
    for n, confidence in enumerate(laws):
        edges = _grid(thresholds[n], steps)
        longest = law.shape[0] - 1
        plain, tilted = jax.vmap(lambda f, n=longest: _convolutions(_toeplitz(f), n))(
            _nodes(confidence, edges)
        )
        inside = jnp.ones(steps + 1).at[-1].set(0.5)  # the trapezoid's end
        drafted = _boundary_masses(law, plain, max_tokens)
        ends = drafted @ inside
        accepted = _boundary_masses(law, tilted, max_tokens)
        calls.append(jnp.sum(ends))
        held = functools.partial(_held, law, drafted, ends, plain, inside, crossing)
        own = _pass_cost(costs[n + 1], held)
        if crossing == "keep":
            law, survival = _verified(accepted @ inside, _tail(law), confidence.mean(), max_tokens)
        else:
            survival = _dropped(law, accepted, tilted, plain, inside)
            law = jnp.concatenate([jnp.zeros(1), survival - jnp.append(survival[1:], 0.0)])
        missing = jnp.maximum(missing, jnp.maximum(ends[-1], survival[-1]))
        if n + 1 < len(laws) and law.shape[0] > max_call + 1:
            missing = jnp.maximum(missing, jnp.sum(law[max_call + 1 :]))
            law = law[: max_call + 1].at[max_call].add(jnp.sum(law[max_call + 1 :]))
        cost = own + calls[-1] * cost
    return _outcome(survival, cost, own, _alone(costs), jnp.stack(calls), missing)


@float64
def threshold_cascade(
    laws,
    costs,
    thresholds,
    crossing: Literal["keep", "drop"] = "keep",
    max_tokens: int = 48,
    max_call: int = 12,
    steps: int = 96,
) -> CascadeOutcome:
    """Tokens, cost and throughput of ThresholdGen with n models.

    laws [n - 1]: confidence law (theory.thresholds) of each model's tokens towards the next one;
    thresholds [n - 1] in (0, 1): level n drafts until the product of the confidences it holds is
    under its threshold. costs [n], smallest first. keep: the crossing call's tokens are verified
    (the slides' algorithm); drop: they are thrown away. Static bounds: `max_tokens` held by a
    level, `max_call` returned by an intermediate one; `missing` is the probability beyond them.
    Second order in 1 / steps; differentiable in laws, costs and thresholds.
    """
    _check_choice("crossing", crossing, ("keep", "drop"))
    laws = tuple(laws)
    costs, thresholds = _as_vectors(costs, thresholds=thresholds)
    if len(laws) != thresholds.shape[0]:
        raise ValueError(
            f"{len(laws)} confidence laws for {costs.shape[0]} models: give one per model but the "
            f"target"
        )
    bounds = int(max_tokens), int(max_call), int(steps)
    return _threshold_cascade(laws, costs, thresholds, crossing, *bounds)
