"""The soft tree: expected tokens as a smooth function of budget, depth limit and acceptance.

Every node of a fixed candidate set gets the weight

    w_i = c_i * sigmoid((ln m_i - ln tau) / T),      sum_i w_i = budget,

m_i the minimum score over node i and everything it requires (so no node outweighs its parent or
left sibling), c_i = clip(max_depth - depth_i + 1, 0, 1) (mixing between integer depth limits), tau
the threshold that meets the budget. Expected tokens 1 + sum w_i score_i, soft depth
sum_d max_{depth d} w. As T -> 0 the candidates of highest m remain; for monotone ranks that is the
optimal tree, the gradient in q its envelope gradient, the one in the budget the next node's score.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sdx.records import Number, record, static
from sdx.theory.numerics import float64
from sdx.theory.trees.base import acceptance_table, along, node_scores, structure
from sdx.theory.trees.exact import greedy_tree

_TINY = 1e-300  # ln of a score of 0 stays finite: such a node weighs nothing at any budget it fits


@record
class SoftTree:
    """expected_tokens, nodes (sum of weights), depth (soft): scalars; weights [candidates]."""

    expected_tokens: Number
    nodes: Number
    depth: Number
    weights: Number
    parents: tuple[int, ...] = static()


@float64
def candidate_tree(acceptance, size: int, max_depth: int) -> tuple[int, ...]:
    """Parents of the `size` best candidates of a concrete acceptance, best first.

    Ranked by the running minimum over ranks, so that the set is closed for any acceptance.
    """
    q = np.asarray(acceptance_table(acceptance, max_depth), np.float64)
    return greedy_tree(np.minimum.accumulate(q, axis=1), size, max_depth).parents


def _threshold(log_m, room, budget, temperature):
    """ln tau of the budget, by bisection (not differentiated: the rule below does that)."""
    spread = 60.0 * temperature + 1.0

    def halve(_, bounds):
        low, high = bounds
        middle = 0.5 * (low + high)
        fits = jnp.sum(room * jax.nn.sigmoid((log_m - middle) / temperature)) <= budget
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high)

    start = (jnp.min(log_m) - spread, jnp.max(log_m) + spread)
    low, high = jax.lax.fori_loop(0, 100, halve, start)
    return 0.5 * (low + high)


@jax.custom_jvp
def _weights(log_m, room, budget, temperature):
    middle = _threshold(log_m, room, budget, temperature)
    return room * jax.nn.sigmoid((log_m - middle) / temperature)


@_weights.defjvp
def _weights_jvp(primals, tangents):
    """The budget's multiplier is eliminated: sum dw = d budget.

    dw_i = g_i dln m_i + s_i dc_i - p_i (sum_j (g_j dln m_j + s_j dc_j) - d budget), with s the
    sigmoid, g = c s (1 - s) / T and p = g / sum g taken as a softmax, which exists even where every
    g underflows (T -> 0): then p sits on the candidate next to the threshold.
    """
    log_m, room, budget, temperature = primals
    dlog_m, droom, dbudget, dtemperature = tangents
    middle = _threshold(log_m, room, budget, temperature)
    x = (log_m - middle) / temperature
    s = jax.nn.sigmoid(x)
    log_g = -jax.nn.softplus(x) - jax.nn.softplus(-x)
    inside = room > 0
    log_g = jnp.where(inside, log_g + jnp.log(jnp.where(inside, room, 1.0)), -jnp.inf)
    g = jnp.exp(log_g) / temperature
    p = jax.nn.softmax(log_g)
    free = g * (dlog_m - x * dtemperature) + s * droom
    # A budget above what the candidates hold is not binding: nothing to hand on.
    binding = budget < jnp.sum(room)
    share = jnp.where(binding, jnp.sum(free) - dbudget, 0.0)
    return room * s, free - p * share


@functools.partial(jax.jit, static_argnums=4)
def _soft(q, budget, max_depth, temperature, parents):
    s = structure(parents)
    score = node_scores(parents, q)
    minimum = along(s.requires, score, jnp.minimum, jnp.inf)
    log_m = jnp.log(jnp.maximum(minimum, _TINY))
    room = jnp.clip(max_depth - jnp.asarray(s.depth) + 1.0, 0.0, 1.0)
    weights = _weights(log_m, room, budget, temperature)
    levels = [jnp.max(weights[s.depth == d]) for d in range(1, int(s.depth.max()) + 1)]
    return SoftTree(
        expected_tokens=1.0 + jnp.sum(weights * score),
        nodes=jnp.sum(weights),
        depth=jnp.sum(jnp.stack(levels)),
        weights=weights,
        parents=parents,
    )


@float64
def soft_tree(acceptance, budget, max_depth, temperature=0.05, candidates=None) -> SoftTree:
    """Relaxed optimal tree, differentiable in acceptance, budget, max_depth (all real).

    acceptance: [ranks] or [depths, ranks] masses. budget: nodes without the root, > 0. temperature:
    T > 0 in units of ln score, anneal it (1 -> 0.02). candidates: parents of the fixed candidate
    set (`candidate_tree`); by default the best 4 * budget + 32 of the given numbers, which must
    then be concrete. Round the result with `optimal_tree`. Weights are in the candidates' order.
    """
    deepest = int(np.ceil(np.asarray(max_depth))) if candidates is None else None
    if candidates is None:
        size = int(4 * np.ceil(np.asarray(budget))) + 32
        candidates = candidate_tree(acceptance, size, deepest)
    candidates = tuple(int(p) for p in candidates)
    if not candidates:
        raise ValueError("the candidate set is empty: give acceptance at least one rank and depth")
    s = structure(candidates)
    q = acceptance_table(acceptance, int(s.depth.max()), int(s.rank.max()) + 1)
    floats = [jnp.asarray(v, q.dtype) for v in (budget, max_depth, temperature)]
    return _soft(q, *floats, candidates)
