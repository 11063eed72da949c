"""What a token tree is, and the tokens that any tree yields.

    root (the last committed token, not a node)
     |-- 0  rank 0, depth 1          parents = (-1, -1, 0, 0)
     |    |-- 2  rank 0, depth 2     a node requires its parent and its left siblings
     |    `-- 3  rank 1, depth 2
     `-- 1  rank 1, depth 1

`acceptance` is q[d, r]: the probability (mass, not conditional on the siblings) that among the
children of an accepted node at depth d the one of rank r is the accepted one; [depths, ranks], or
[ranks] when it does not depend on depth. A node's score is the product of q along its path: the
probability that the accepted path runs through it. Expected tokens per round = 1 + sum of scores
(the 1 is the token that the target emits in any case). Sequoia (Chen et al. 2024), section 3.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from sdx.records import Number, record, static
from sdx.theory.numerics import float64


class Structure(NamedTuple):
    """Static facts of a tree of n nodes, numpy integers of shape [n]; n itself stands for the root.

    parent: n for a child of the root. depth: 1-based. rank: among siblings. requires: the left
    sibling if there is one, else the parent; following it visits all that a node requires.
    """

    parent: np.ndarray
    depth: np.ndarray
    rank: np.ndarray
    requires: np.ndarray


@record
class Tree:
    """A tree with what it is expected to yield. `parents` as in records.StaticTree."""

    expected_tokens: Number
    parents: tuple[int, ...] = static()

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(int(d) for d in structure(self.parents).depth)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(int(r) for r in structure(self.parents).rank)

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)


@functools.lru_cache(maxsize=256)
def structure(parents: tuple[int, ...]) -> Structure:
    """Depths, ranks and requirements of `parents` (-1: the root). ValueError if not topological."""
    n = len(parents)
    depth, rank, requires = (np.zeros(n, np.int64) for _ in range(3))
    last_child = {}
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(
                f"parents[{i}] is {parent}: a parent must be -1 (the root) or come before its "
                f"child; list the nodes in topological order"
            )
        depth[i] = 1 if parent < 0 else depth[parent] + 1
        left = last_child.get(parent)
        rank[i] = 0 if left is None else rank[left] + 1
        requires[i] = (n if parent < 0 else parent) if left is None else left
        last_child[parent] = i
    parent = np.array([n if p < 0 else p for p in parents], np.int64)
    return Structure(parent, depth, rank, requires)


def acceptance_table(acceptance, depths: int, ranks: int | None = None):
    """`acceptance` as an array [depths, R]; ValueError where it has too few rows or columns."""
    q = jnp.asarray(acceptance)
    if q.ndim == 1:
        q = jnp.broadcast_to(q, (depths, q.shape[0]))
    if q.ndim != 2:
        raise ValueError(
            f"acceptance has shape {q.shape}: give [ranks] or [depths, ranks], one mass per rank"
        )
    if q.shape[0] < depths:
        raise ValueError(
            f"acceptance has {q.shape[0]} depths and the tree needs {depths}: give a row for every "
            f"depth, or one row [ranks] for all of them, or a smaller max_depth"
        )
    if ranks is not None and q.shape[1] < ranks:
        raise ValueError(
            f"acceptance has {q.shape[1]} ranks and the tree has siblings of rank {ranks - 1}: "
            f"give a mass for every rank"
        )
    return q[:depths]


def concrete_table(acceptance, depths: int) -> np.ndarray:
    """The table as float64 numpy, its entries checked to be masses."""
    q = np.asarray(acceptance_table(acceptance, depths), np.float64)
    if q.size and not (np.isfinite(q).all() and q.min() >= 0 and q.max() <= 1):
        raise ValueError(
            f"acceptance runs from {q.min()} to {q.max()}: probabilities lie in [0, 1] and are not "
            f"NaN; check the counts they came from"
        )
    return q


def along(pointers: np.ndarray, values, combine, neutral: float):
    """combine over i and everything reached from i by `pointers` (n ends a walk); log2(n) steps."""
    n = len(pointers)
    values = jnp.concatenate([values, jnp.full((1,), neutral, values.dtype)])
    pointers = np.append(pointers, n)
    while (pointers != n).any():
        values = combine(values, values[pointers])
        pointers = pointers[pointers]
    return values[:n]


def node_scores(parents: tuple[int, ...], q):
    """Score of every node [n] for a table q that is wide and deep enough; traceable in q."""
    s = structure(parents)
    return along(s.parent, q[s.depth - 1, s.rank], jnp.multiply, 1.0)


@float64
def expected_tokens_of_tree(parents, acceptance):
    """Expected tokens per round of any tree, 1 + sum of path products (Sequoia, eq. 1).

    parents: sequence of ints, -1 for a child of the root. acceptance: [ranks] or [depths, ranks].
    Scalar, differentiable in acceptance: at an optimal tree this is the envelope gradient.
    """
    parents = tuple(int(p) for p in parents)
    if not parents:
        return jnp.ones(())
    s = structure(parents)
    q = acceptance_table(acceptance, int(s.depth.max()), int(s.rank.max()) + 1)
    return 1.0 + jnp.sum(node_scores(parents, q))
