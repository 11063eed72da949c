"""Optimal trees in closed form when acceptance falls geometrically with the rank.

q[r] = alpha * rank_ratio^r at every depth. A node of depth d whose path has rank sum s scores
alpha^d rank_ratio^s, and there are C(s + d - 1, d - 1) such nodes, so the best tree of n nodes takes
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
    """q[r] = alpha * rank_ratio^r, the masses of all ranks summing to at most 1.

    `rank_share`: of the mass that the first rank leaves, what the second takes, so
    rank_ratio = rank_share (1 - alpha) / alpha, kept below 1 - alpha. An assumption about drafts
    without measured rank acceptance; with measurements use `optimal_tree`.
    """

    alpha: Number
    rank_share: Number = 0.45
    max_depth: int = static(default=12)
    max_rank_sum: int = static(default=7)

    def rank_ratio(self):
        left = 1.0 - self.alpha
        return jnp.minimum(self.rank_share * left / jnp.maximum(self.alpha, 1e-12), left)

    def masses(self, ranks: int):
        """q[r], r = 0..ranks - 1."""
        return self.alpha * self.rank_ratio() ** jnp.arange(ranks)

    @float64
    def expected_tokens(self, budget, depth):
        """Tokens per round of the best tree of `budget` nodes (real) and `depth` levels (integer).

        Beyond `max_depth` levels and rank sums of `max_rank_sum` nothing is counted: a lower bound,
        exact while the best tree stays inside.
        """
        d, s = np.meshgrid(
            np.arange(1, self.max_depth + 1), np.arange(self.max_rank_sum + 1), indexing="ij"
        )
        many = np.vectorize(lambda d, s: float(comb(s + d - 1, d - 1)))(d, s).ravel()
        logs = d.ravel() * safe_log(self.alpha) + s.ravel() * safe_log(self.rank_ratio())
        scores = jnp.where(d.ravel() <= depth + 0.5, jnp.exp(logs), 0.0)
        order = jnp.argsort(-scores)
        scores, many = scores[order], jnp.asarray(many)[order]
        before = jnp.cumsum(many) - many
        return 1.0 + jnp.sum(scores * jnp.clip(budget - before, 0.0, many))
