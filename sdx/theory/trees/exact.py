"""The best tree of at most `budget` nodes and `max_depth` levels, exactly.

If q[d, r] does not increase with r at any depth, a node's score is never above those of what it
requires, so the `budget` highest scores form a tree: best-first search. Otherwise a poor early
sibling may be the price of a good later one and the optimum is Sequoia's dynamic programme, made
depth-dependent:

    T_d(m) = F_{d+1, 0}(m)                    best sum of scores under an accepted node of depth d
    F_{d,r}(n) = max_{1 <= m <= n} q[d, r] (1 + T_d(m - 1)) + F_{d, r+1}(n - m)

with at most m - 1 nodes below the child of rank r, and F = 0 when n = 0 or the ranks are used up.
"""

from __future__ import annotations

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np

from sdx.theory.numerics import float64
from sdx.theory.trees.base import Tree, acceptance_table, concrete_table, expected_tokens_of_tree


def _check(budget, max_depth):
    for name, value in (("budget", budget), ("max_depth", max_depth)):
        if int(value) != value or value < 0:
            raise ValueError(f"{name} is {value}: it counts nodes or levels, give an integer >= 0")


def is_monotone(q: np.ndarray) -> bool:
    """True where best-first search is exact: no rank likelier than an earlier one of its depth."""
    return bool((q[:, 1:] <= q[:, :-1]).all())


def _tree(parents, q) -> Tree:
    value = float(expected_tokens_of_tree(parents, q))
    return Tree(parents=tuple(parents), expected_tokens=value)


@float64
def greedy_tree(acceptance, budget: int, max_depth: int) -> Tree:
    """Best-first: always adds the open node of highest score. Exact for monotone ranks only.

    An open node is the next sibling or the first child of a node already in the tree. O(n log n).
    """
    _check(budget, max_depth)
    q = concrete_table(acceptance, max_depth)
    parents: list[int] = []
    heap = []  # (-score, tie-breaker, parent, depth, rank, score of the parent)
    if max_depth and q.shape[1]:
        heap.append((-q[0, 0], 0, -1, 1, 0, 1.0))
    pushed = 1
    while heap and len(parents) < budget:
        negative, _, parent, depth, rank, above = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        for entry in (
            (above * q[depth - 1, rank + 1], parent, depth, rank + 1, above)
            if rank + 1 < q.shape[1]
            else None,
            (-negative * q[depth, 0], node, depth + 1, 0, -negative) if depth < max_depth else None,
        ):
            if entry is not None:
                heapq.heappush(heap, (-entry[0], pushed, *entry[1:]))
                pushed += 1
    return _tree(parents, q)


def _sequoia(q: np.ndarray, budget: int):
    """Tables of the programme: T_0 [budget + 1] and the choices m [depths, ranks, budget + 1]."""
    depths, ranks = q.shape
    below = np.zeros(budget + 1)
    choice = np.zeros((depths, ranks, budget + 1), np.int32)
    padded = np.full(2 * budget + 1, -np.inf)  # F(n - m), -inf where m > n
    stride = padded.strides[0]
    shifted = np.lib.stride_tricks.as_strided(
        padded[budget:], (budget + 1, budget), (stride, -stride)
    )  # shifted[n, j] = F(n - j); row n of the programme reads rows n - 1 with m = j + 1
    for d in range(depths - 1, -1, -1):
        forest = np.zeros(budget + 1)
        for r in range(ranks - 1, -1, -1):
            padded[budget:] = forest
            value = shifted[:-1] + (q[d, r] * (1.0 + below[:-1]))[None, :]
            best = value.argmax(axis=1)
            forest = np.concatenate([[0.0], value[np.arange(budget), best]])
            choice[d, r, 1:] = best + 1
        below = forest
    return below, choice


def _unfold(choice: np.ndarray, budget: int) -> list[int]:
    """Parents in topological order from the programme's choices."""
    depths, ranks, _ = choice.shape
    parents: list[int] = []
    queue = [(-1, 0, budget)]  # (node, depth, nodes that its descendants may use)
    for node, depth, room in queue:
        if depth == depths:
            continue
        for r in range(ranks):
            if room == 0:
                break
            m = int(choice[depth, r, room])
            queue.append((len(parents), depth + 1, m - 1))
            parents.append(node)
            room -= m
    return parents


@float64
def optimal_tree(acceptance, budget: int, max_depth: int) -> Tree:
    """The tree of at most `budget` nodes and `max_depth` levels with most expected tokens; exact.

    acceptance: [ranks] or [depths, ranks], masses in [0, 1] (concrete numbers). Budget and depth do
    not count the root. Returns `Tree` with `.parents` and `.expected_tokens`. Best-first for
    monotone ranks, else the dynamic programme: O(depth * ranks * budget^2), 0.3 s for
    16 * 32 * 512^2. For the envelope gradient differentiate `expected_tokens_of_tree(tree.parents,
    acceptance)`, or `tree_profile`. ValueError for masses outside [0, 1], missing depths or ranks.
    """
    _check(budget, max_depth)
    q = concrete_table(acceptance, max_depth)
    if is_monotone(q) or budget == 0:
        return greedy_tree(q, budget, max_depth)
    _, choice = _sequoia(q, budget)
    parents = _unfold(choice, budget)
    return _tree(parents, q)


@functools.partial(jax.jit, static_argnums=1)
def _profile(q, budget: int):
    n = np.arange(1, budget + 1)
    m = np.arange(1, budget + 1)
    gap = n[:, None] - m[None, :]
    invalid = jnp.asarray(gap < 0)
    gap = jnp.asarray(np.maximum(gap, 0))

    def add_rank(forest, inputs):
        mass, below = inputs
        first = mass * (1.0 + below[:-1])
        value = jnp.where(invalid, -jnp.inf, first[None, :] + forest[gap])
        best = jax.lax.stop_gradient(jnp.argmax(value, axis=1))
        # Gathered anew at the argmax: reverse mode then keeps indices, not budget^2 masks.
        taken = first[best] + forest[n - 1 - best]
        return jnp.concatenate([jnp.zeros(1, taken.dtype), taken]), None

    def add_depth(below, row):
        over_ranks = (row[::-1], jnp.broadcast_to(below, (row.shape[0], budget + 1)))
        forest, _ = jax.lax.scan(add_rank, jnp.zeros(budget + 1, row.dtype), over_ranks)
        return forest, None

    below, _ = jax.lax.scan(add_depth, jnp.zeros(budget + 1, q.dtype), q[::-1])
    return 1.0 + below


@float64
def tree_profile(acceptance, budget: int, max_depth: int):
    """Expected tokens [budget + 1] of the optimal trees of 0..`budget` nodes, all at once.

    The dynamic programme in JAX: exact for any ranks, differentiable in acceptance (the envelope
    gradient), jit- and vmap-able. `budget`, `max_depth`: ints. What the search profiles over.
    """
    _check(budget, max_depth)
    q = acceptance_table(acceptance, max_depth)
    if budget == 0 or q.size == 0:
        return jnp.ones(budget + 1, q.dtype)
    return _profile(q, int(budget))
