"""Draft heads as design variables: acceptance from K, n, adversary, position, temperature; cost.

Laws of acceptance of one head family on one target, all effects on the logit of a hazard
h_k = P(k-th draft accepted | the ones before it were):

    logit h_k = base + layers ln K + adversary a - temperature T + boost ln(nodes / 60)
                - (drift + spread (1 - 1/n)) ln k

K layers; a in [0, 1] adversarial training; T sampling temperature; n positions per specialist (a
single head is n = infinity, written 0 as in records.DrafterSpec): drift is the deviation that any
draft suffers at later positions, spread what a layer pays for serving many of them. The form is
ours; coefficients are fitted on KOALA's and PosS's tables (experiments/heads_fit.py) or on
measurements. For trees the hazards are those of the whole level (some child is accepted).

Cost of a round in units of one autoregressive step (PosS, appendix D, in physical terms):

    round = verify + depth draft_step + tokens_step (nodes - 60)/20 + switch (specialists used - 1)
            + sampling T
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optimistix
from jax.flatten_util import ravel_pytree

from sdx.records import Number, record
from sdx.theory.acceptance import PerPosition
from sdx.theory.numerics import float64

_REFERENCE_NODES = 60.0


@record
class HeadLaw:
    """Coefficients of the law above, in logits. Fields are leaves: fit them or replace them."""

    base: Number
    layers: Number = 0.0
    adversary: Number = 0.0
    temperature: Number = 0.0
    boost: Number = 0.0
    drift: Number = 0.0
    spread: Number = 0.0

    def hazards(
        self,
        positions: int,
        layers=1.0,
        specialist_positions=0.0,
        adversary=0.0,
        temperature=0.0,
        nodes=_REFERENCE_NODES,
    ):
        """h_1..h_positions [positions]; every argument but `positions` is real."""
        n = jnp.asarray(specialist_positions)
        single = n < 1.0
        share = jnp.where(single, 1.0, 1.0 - 1.0 / jnp.where(single, 1.0, n))
        k = jnp.arange(1.0, positions + 1.0)
        logit = (
            self.base
            + self.layers * jnp.log(layers)
            + self.adversary * adversary
            - self.temperature * temperature
            + self.boost * jnp.log(nodes / _REFERENCE_NODES)
            - (self.drift + self.spread * share) * jnp.log(k)
        )
        return jax.nn.sigmoid(logit)


@float64
def head_acceptance(law: HeadLaw, positions: int = 8, **head) -> PerPosition:
    """The chain's acceptance law of a head: `PerPosition` over `positions` drafts.

    head: layers K, specialist_positions n (0: one layer for all), adversary, temperature, nodes.
    """
    return PerPosition(rates=law.hazards(positions, **head))


@float64
def head_length(law: HeadLaw, depth, **head):
    """Mean acceptance length tau = 1 + sum_{k <= depth} prod_{j <= k} h_j, real depth in [0, 32]
    (linear between integers)."""
    survival = jnp.cumprod(law.hazards(32, **head))
    partial = jnp.clip(jnp.asarray(depth, jnp.float64) - jnp.arange(32.0), 0.0, 1.0)
    return 1.0 + jnp.sum(partial * survival)


@float64
def specialists_used(depth, specialist_positions):
    """How many specialists a draft of `depth` positions visits: depth / n, at least 1 (n < 1: one
    layer for all). The real version of a ceiling, which tables of integers take themselves."""
    n = jnp.asarray(specialist_positions, jnp.float64)
    single = n < 1.0
    return jnp.where(single, 1.0, jnp.maximum(depth / jnp.where(single, 1.0, n), 1.0))


# ---------------------------------------------------------------------------- cost


@record
class HeadCost:
    """A round's parts in units of one autoregressive step of the target (see the module)."""

    verify: Number
    draft_step: Number
    tokens_step: Number = 0.0
    switch: Number = 0.0
    sampling: Number = 0.0

    @float64
    def round_steps(self, depth, nodes=_REFERENCE_NODES, specialists=1.0, temperature=0.0):
        """Seconds of a round over seconds of an autoregressive step; arguments broadcast."""
        return (
            self.verify
            + self.draft_step * jnp.asarray(depth)
            + self.tokens_step * (jnp.asarray(nodes) - _REFERENCE_NODES) / 20.0
            + self.switch * (jnp.asarray(specialists) - 1.0)
            + self.sampling * jnp.asarray(temperature)
        )

    @float64
    def speedup(self, mean_length, depth, nodes=_REFERENCE_NODES, specialists=1.0, temperature=0.0):
        """Mean acceptance length over the round's steps."""
        return jnp.asarray(mean_length) / self.round_steps(depth, nodes, specialists, temperature)


@float64
def fit_head_cost(
    mean_length, speedup, depth, nodes, specialists, temperature, weights=None
) -> HeadCost:
    """Least squares of relative errors of the round, mean_length / speedup; all arguments [n].

    weights [n]: 0 leaves a row out. A column that does not vary gets coefficient 0.
    """
    arguments = (mean_length, speedup, depth, nodes, specialists, temperature)
    mean_length, speedup, depth, nodes, specialists, temperature = (
        jnp.asarray(a, jnp.float64) for a in arguments
    )
    steps = mean_length / speedup
    weights = jnp.ones_like(steps) if weights is None else jnp.asarray(weights, jnp.float64)
    columns = jnp.stack(
        [
            jnp.ones_like(steps),
            depth,
            (nodes - _REFERENCE_NODES) / 20.0,
            specialists - 1.0,
            temperature,
        ],
        axis=1,
    )
    basis = columns / steps[:, None] * jnp.sqrt(weights)[:, None]
    # A tiny ridge decides columns without variation (a single temperature) at 0.
    normal = basis.T @ basis + 1e-12 * jnp.eye(5)
    values = jnp.linalg.solve(normal, basis.T @ jnp.sqrt(weights))
    return HeadCost(
        verify=values[0],
        draft_step=values[1],
        tokens_step=values[2],
        switch=values[3],
        sampling=values[4],
    )


# ---------------------------------------------------------------------------- fits of acceptance


@functools.partial(jax.jit, static_argnames=("residual",))
def _least_squares(residual, start, data):
    solution = optimistix.least_squares(
        residual,
        optimistix.LevenbergMarquardt(rtol=1e-10, atol=1e-10),
        start,
        args=jax.lax.stop_gradient(data),
        max_steps=500,
        throw=False,
    )
    # The optimum is differentiated by Newton's step from it, not through the iterations.
    flat, unravel = ravel_pytree(jax.lax.stop_gradient(solution.value))

    def loss(flat, data):
        parts = jax.tree.leaves(residual(unravel(flat), data))
        return 0.5 * sum(jnp.sum(part**2) for part in parts)

    step = jnp.linalg.solve(jax.hessian(loss)(flat, data), jax.grad(loss)(flat, data))
    return unravel(flat - step)


def _length_residual(law, data):
    depth, nodes, n, temperature, length = data

    def one(depth, nodes, n, temperature):
        return head_length(law, depth, specialist_positions=n, temperature=temperature, nodes=nodes)

    ridge = jnp.stack([law.layers, law.adversary])
    return jax.vmap(one)(depth, nodes, n, temperature) / length - 1.0, ridge


@float64
def fit_length_law(depth, nodes, specialist_positions, temperature, mean_length) -> HeadLaw:
    """The law through measured mean acceptance lengths; arguments [n], relative least squares.

    `layers` and `adversary` are not in such data and come out 0.
    """
    arguments = (depth, nodes, specialist_positions, temperature, mean_length)
    data = tuple(jnp.asarray(a, jnp.float64) for a in arguments)
    names = ("base", "layers", "adversary", "temperature", "boost", "drift", "spread")
    start = (1.3, 0.0, 0.0, 0.1, 0.2, 0.1, 0.1)
    law = HeadLaw(**dict(zip(names, map(jnp.float64, start), strict=True)))
    return _least_squares(_length_residual, law, data)


def _rate_residual(law, data):
    target, layers, adversary, rates = data

    def one(target, layers, adversary):
        # A single layer serves all positions: only drift + spread is identified, called drift.
        mine = HeadLaw(**{**vars(law), "base": law.base[target], "spread": 0.0})
        return mine.hazards(rates.shape[1], layers=layers, adversary=adversary)

    unused = jnp.stack([law.temperature, law.boost, law.spread])
    return jax.vmap(one)(target, layers, adversary) - rates, unused


@float64
def fit_rate_law(target, layers, adversary, rates) -> HeadLaw:
    """The law through measured hazards `rates` [n, positions] of heads with `layers` [n] and
    `adversary` [n] on targets numbered `target` [n] (ints): one base per target, the rest shared.

    Returns a HeadLaw whose base has shape [targets]; spread is not identified and comes out 0.
    """
    target = np.asarray(target)
    data = (
        jnp.asarray(target),
        *(jnp.asarray(a, jnp.float64) for a in (layers, adversary, rates)),
    )
    names = ("layers", "adversary", "temperature", "boost", "drift", "spread")
    rest = dict(zip(names, map(jnp.float64, (0.1, 0.05, 0, 0, 0.2, 0)), strict=True))
    return _least_squares(_rate_residual, HeadLaw(base=jnp.ones(target.max() + 1), **rest), data)


# ---------------------------------------------------------------------------- KOALA


def layer_cost_interval(lengths, best, without: int = 0) -> tuple[float, float]:
    """Per-layer costs y for which K = `best` maximises length_K / (1 + y (K - without)).

    lengths: mapping K -> mean acceptance length. without: 0 measures y against everything but the
    head's layers, 1 against the round of a one-layer head. Returns (low, high), high may be inf;
    low > high if no y does. Each rival K' is one linear inequality in y.
    """
    low, high = 0.0, float("inf")
    own, k = lengths[best], best - without
    for rival, length in lengths.items():
        slope = own * (rival - without) - length * k
        gap = length - own  # y * slope >= gap
        if slope > 0:
            low = max(low, gap / slope)
        elif slope < 0:
            high = min(high, gap / slope)
        elif gap > 0:
            return 1.0, 0.0
    return low, high
