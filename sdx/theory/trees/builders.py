"""Trees that are built without an acceptance table, and the one searched from measured counts.

Baselines of the FPGA paper (section IV.E) and its Algorithm 1, line 3: take a large tree, count how
often every node is accepted, keep the nodes of highest count.
"""

from __future__ import annotations

import numpy as np

from sdx.records import Number, record, static
from sdx.theory.trees.base import structure


@record
class PriorScoreTree:
    """`parents` of the kept nodes; `kept`: their indices in the maximal tree; `expected_tokens`
    1 + sum of counts / rounds. Siblings keep their order, so ranks are renumbered by it."""

    expected_tokens: Number
    parents: tuple[int, ...] = static()
    kept: tuple[int, ...] = static()


def maximal_tree(widths, children: int | None = None) -> tuple[int, ...]:
    """A tree with `widths[l]` nodes at level l + 1, handed out to the nodes of the level above.

    Row by row: every parent gets its first child before any gets a second one, at most `children`
    each (default: no limit). ValueError where a level cannot hold its width.
    """
    parents: list[int] = []
    above = [-1]
    for level, width in enumerate(widths):
        limit = children if children is not None else width
        if width > limit * len(above):
            raise ValueError(
                f"level {level + 1} is to have {width} nodes but {len(above)} parents with "
                f"{limit} children each: raise `children` or lower the width"
            )
        counts = [width // len(above) + (i < width % len(above)) for i in range(len(above))]
        level_nodes = []
        for parent, count in zip(above, counts, strict=True):
            for _ in range(count):
                level_nodes.append(len(parents))
                parents.append(parent)
        above = level_nodes
    return tuple(parents)


def _restrict(parents: tuple[int, ...], kept: list[int]) -> tuple[int, ...]:
    place = {-1: -1} | {node: i for i, node in enumerate(kept)}
    return tuple(place[parents[node]] for node in kept)


def _levels(parents, order) -> list[list[int]]:
    """Nodes per level, those of highest `order` first, parents before their children's turn."""
    depth = structure(tuple(parents)).depth
    nodes = sorted(range(len(parents)), key=lambda i: (-order[i], i))
    return [[i for i in nodes if depth[i] == d] for d in range(1, int(depth.max()) + 1)]


def width_based_tree(parents, budget: int, order=None) -> tuple[int, ...]:
    """The first `budget` nodes of the shape `parents`, filled level by level.

    order: preference within a level (higher first), e.g. scores [n]; default as listed.
    """
    order = -np.arange(len(parents)) if order is None else np.asarray(order)
    kept = [i for level in _levels(parents, order) for i in level][:budget]
    return _restrict(tuple(parents), sorted(kept))


def depth_based_tree(parents, budget: int, order=None) -> tuple[int, ...]:
    """Consecutive nodes go to adjacent levels: the k-th at level m, the next at m + 1, and round.

    A level that is full, or whose remaining nodes lack their parent, is passed over.
    """
    order = -np.arange(len(parents)) if order is None else np.asarray(order)
    waiting = _levels(parents, order)
    chosen: set[int] = {-1}
    kept: list[int] = []
    while len(kept) < budget and any(waiting):
        progress = False
        for level in waiting:
            node = next((i for i in level if parents[i] in chosen), None)
            if node is None or len(kept) == budget:
                continue
            level.remove(node)
            chosen.add(node)
            kept.append(node)
            progress = True
        if not progress:
            break
    return _restrict(tuple(parents), sorted(kept))


def prior_score_tree(parents, counts, rounds, budget: int) -> PriorScoreTree:
    """The `budget` nodes of the maximal tree `parents` that were accepted most often.

    counts [n]: how often each node was accepted in `rounds` verification rounds (FPGA paper,
    Algorithm 1). An accepted node's parent was accepted too, so the best counts form a tree; ties
    go to the earlier node. ValueError where counts contradict that or exceed the rounds.
    """
    parents, counts = tuple(parents), np.asarray(counts, np.float64)
    if counts.shape != (len(parents),):
        raise ValueError(
            f"counts has shape {counts.shape}: give one count per node, {len(parents)}"
        )
    for i, parent in enumerate(parents):
        above = rounds if parent < 0 else counts[parent]
        if not 0 <= counts[i] <= above:
            raise ValueError(
                f"node {i} was accepted {counts[i]:g} times and what it hangs on {above:g} times: "
                f"a node is accepted only with its parent; recount"
            )
    kept = sorted(np.argsort(-counts, kind="stable")[:budget].tolist())
    tokens = 1.0 + float(counts[kept].sum()) / float(rounds)
    return PriorScoreTree(
        parents=_restrict(parents, kept), kept=tuple(kept), expected_tokens=tokens
    )
