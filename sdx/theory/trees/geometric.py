"""Optimal trees in closed form when acceptance falls geometrically with the rank.

q[r] = alpha * ratio^r at every depth. A node of depth d whose path has rank sum s scores
alpha^d ratio^s, and there are C(s + d - 1, d - 1) such nodes, so the best tree of n nodes takes
whole classes (d, s) in the order of their scores: a table of depths x sums replaces the tree. Cheap
enough to be evaluated a million times; equal to `optimal_tree` (checked in the tests).
"""

from __future__ import annotations

from math import comb

import jax.numpy as jnp
import numpy as np

from sdx.records import Number, record, static
from sdx.theory.numerics import float64, safe_log


@record
class GeometricRanks:
    """q[r] = alpha * ratio^r, ratio = min(rank_ratio, 1 - alpha): the masses sum to at most 1.

    An assumption about drafts without measured rank acceptance; with measurements use
    `optimal_tree`. Tokens rise with alpha (checked in the tests): box bounds rely on it.
    """

    alpha: Number
    rank_ratio: Number = 0.3
    max_depth: int = static(default=12)
    max_rank_sum: int = static(default=7)

    def ratio(self):
        return jnp.minimum(self.rank_ratio, 1.0 - self.alpha)

    def masses(self, ranks: int):
        """q[r], r = 0..ranks - 1."""
        return self.alpha * self.ratio() ** jnp.arange(ranks)

    def _classes(self, budget, depth):
        """(depth, score, how many are taken) of every class, best first."""
        d, s = np.meshgrid(
            np.arange(1, self.max_depth + 1), np.arange(self.max_rank_sum + 1), indexing="ij"
        )
        many = np.vectorize(lambda d, s: float(comb(s + d - 1, d - 1)))(d, s).ravel()
        d, s = d.ravel(), s.ravel()
        scores = jnp.exp(d * safe_log(self.alpha) + s * safe_log(self.ratio()))
        # Sorted before the depth limit empties classes: one sort serves every budget and depth.
        order = jnp.argsort(-scores)
        scores, room = scores[order], jnp.where(d <= depth + 0.5, many, 0.0)[order]
        before = jnp.cumsum(room) - room
        return jnp.asarray(d)[order], scores, jnp.clip(budget - before, 0.0, room)

    @float64
    def expected_tokens(self, budget, depth):
        """Tokens per round of the best tree of `budget` nodes (real) and `depth` levels (integer).

        Beyond `max_depth` levels and rank sums of `max_rank_sum` nothing is counted: a lower bound,
        exact while the best tree stays inside.
        """
        _, scores, taken = self._classes(budget, depth)
        return 1.0 + jnp.sum(scores * taken)

    @float64
    def survival_of_tree(self, budget, depth):
        """P(at least k drafts accepted), k = 0..max_depth, of the same tree; sums to its tokens."""
        level, scores, taken = self._classes(budget, depth)
        empty = jnp.zeros(self.max_depth + 1, scores.dtype)
        return empty.at[level].add(scores * taken).at[0].set(1.0)
