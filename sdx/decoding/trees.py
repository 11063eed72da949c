"""Drafters of trees: a fixed topology, or one grown by confidence.

A level of the tree is one pass of the draft model over the nodes that have children; their keys
and values stay outside the cache until the target has chosen a path.
Legend: base.py; G nodes read at one level, C candidates before reranking.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdx.decoding.base import Proposal, Rule, Sequence, Target, Tree, Verdict
from sdx.decoding.chains import LAG, read_prompt, read_tail, settle
from sdx.decoding.heads import HeadModel
from sdx.decoding.sampling import best_tokens, log_probabilities
from sdx.decoding.verify import known_tail
from sdx.records import Sampling, record, static


def check_parents(parents: tuple[int, ...]) -> None:
    """Raises ValueError unless there is a node and every node's parent comes before it (-1: the
    root)."""
    if not parents:
        raise ValueError("a tree without nodes: give its `parents`, or decode autoregressively")
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"parents[{node}] = {parent}: must be -1 (the root) or an earlier node"
            )


def topology(parents: tuple[int, ...]) -> dict[str, np.ndarray]:
    """children `[M, K]`, depths `[M]`, ancestors `[M, M]` of a fixed tree, node 0 the root."""
    M = len(parents) + 1
    ancestors = np.eye(M, dtype=bool)
    offspring: list[list[int]] = [[] for _ in range(M)]
    for node, parent in enumerate(parents, start=1):
        ancestors[node] |= ancestors[parent + 1]
        offspring[parent + 1].append(node)
    children = np.full((M, max(1, *map(len, offspring))), -1, np.int32)
    for node, own in enumerate(offspring):
        children[node, : len(own)] = own
    return {
        "children": children,
        "depths": ancestors.sum(1).astype(np.int32) - 1,
        "ancestors": ancestors,
    }


def tree_of_parents(parents_BxN: jax.Array, height: int, branching: int) -> Tree:
    """The tree of each row; `parents_BxN` are node numbers (0 the root), in topological order."""
    B, N = parents_BxN.shape
    row_B = jnp.arange(B)[:, None]
    ancestors = jnp.broadcast_to(jnp.eye(N + 1, dtype=bool), (B, N + 1, N + 1))
    parents_BxM = jnp.pad(parents_BxN, ((0, 0), (1, 0)))
    for _ in range(height):  # every step reaches one generation further up
        ancestors |= ancestors[row_B, parents_BxM]
    same_BxNxN = parents_BxN[:, :, None] == parents_BxN[:, None, :]
    rank_BxN = (same_BxNxN & jnp.tri(N, k=-1, dtype=bool)).sum(-1)
    children = jnp.full((B, N + 1, branching), -1, jnp.int32)
    children = children.at[row_B, parents_BxN, rank_BxN].set(jnp.arange(1, N + 1, dtype=jnp.int32))
    return Tree(
        children_XxMxK=children,
        depths_XxM=ancestors.sum(-1).astype(jnp.int32) - 1,
        ancestors_XxMxM=ancestors,
        law_M=jnp.zeros((N + 1,), jnp.int32),
        height=height,
    )


@record
class Grown:
    """State of a tree drafter between proposing and committing: what the passes of this round
    computed, and where each node's part lies in it."""

    cache: Any
    fresh: Any
    at_BxM: jax.Array


@record
class Opened:
    """A tree drafter's model after the known tokens: their last logits, its cache, and what its
    passes see beside the cache: `fresh`, the first `columns` of which are known tokens, the root
    the last of them. A head has written them all: no columns."""

    logits_BxV: jax.Array
    cache: Any
    fresh: Any
    columns: int = static(default=LAG)


def open_tree(model: Target | HeadModel, state: Any, sequence: Sequence) -> Opened:
    """Reads the known tail; a language model keeps it outside its cache until the commit."""
    if isinstance(model, HeadModel):
        logits_BxV, cache = read_tail(model, state, sequence)
        return Opened(logits_BxV=logits_BxV, cache=cache, fresh=None, columns=0)
    cache = state.rollback(sequence.lengths_B - LAG)
    output = model(known_tail(sequence, LAG), cache, last=1)
    return Opened(logits_BxV=output.logits_BxTxV[:, -1], cache=cache, fresh=output.fresh)


def read_level(
    model: Target | HeadModel, opened: Opened, fresh: Any, tokens, mask, positions, level: int
) -> tuple[jax.Array, Any]:
    """Logits of the nodes of a level, and all fresh so far."""
    extra = {"step": level} if isinstance(model, HeadModel) else {}
    output = model(tokens, opened.cache, mask=mask, positions=positions, pending=fresh, **extra)
    joined = output.fresh if fresh is None else model.join([fresh, output.fresh])
    return output.logits_BxTxV, joined


def commit_grown(model: Target | HeadModel, grown: Grown, verdict: Verdict, reading: Any) -> Any:
    """Writes the known tail and the accepted path but its last node: that one may not have been
    read, and the next round reads it anyway. A head forgets its drafts."""
    if isinstance(model, HeadModel):
        return settle(model, grown.cache, verdict, reading)
    B = verdict.accepted_B.shape[0]
    at_BxP = jnp.take_along_axis(grown.at_BxM, verdict.path_BxP, axis=1)
    known_BxL = jnp.broadcast_to(jnp.arange(LAG, dtype=jnp.int32), (B, LAG))
    path = jnp.concatenate([known_BxL, at_BxP], axis=1)
    counts_B = LAG + jnp.maximum(verdict.accepted_B - 1, 0)
    return grown.cache.commit(grown.fresh, path, counts_B)


def draw_children(log_q_BxGxV, counts: list[int], rule: Rule, random):
    """Children of G nodes in the order in which they are tested: tokens and liveness, one list of
    `[B]` arrays per node. counts: children per node."""
    weights = log_q_BxGxV
    tokens, live = [[] for _ in counts], [[] for _ in counts]
    for rank in range(max(counts)):
        nodes = np.array([g for g, count in enumerate(counts) if count > rank])
        left_BxGxV = weights[:, nodes]
        drawn_BxG, random = random.draw(left_BxGxV)
        for i, g in enumerate(nodes):
            tokens[g].append(drawn_BxG[:, i])
            live[g].append(left_BxGxV[:, i].max(-1) > -jnp.inf)
        if rule == "without_replacement":
            drawn_BxGxV = jax.nn.one_hot(drawn_BxG, weights.shape[-1], dtype=bool)
            weights = weights.at[:, nodes].set(jnp.where(drawn_BxGxV, -jnp.inf, left_BxGxV))
    return tokens, live, random


def best_children(logits_BxGxV, counts: list[int]):
    """The likeliest children of G nodes, in the same form as `draw_children`."""
    value_BxGxK, token_BxGxK = best_tokens(logits_BxGxV, max(counts))
    tokens = [[token_BxGxK[:, g, r] for r in range(n)] for g, n in enumerate(counts)]
    live = [[value_BxGxK[:, g, r] > -jnp.inf for r in range(n)] for g, n in enumerate(counts)]
    return tokens, live


@record
class StaticTreeDrafter:
    """A fixed tree; `children` says how siblings come to be (`records.StaticTree`). Under greedy
    decoding the law is a point, and children are always the likeliest."""

    model: Target | HeadModel
    parents: tuple[int, ...] = static()
    children: str = static(default="without_replacement")

    ragged = False

    @property
    def height(self) -> int:
        return int(topology(self.parents)["depths"].max())

    @property
    def branching(self) -> int:
        return topology(self.parents)["children"].shape[1]

    @property
    def nodes(self) -> int:
        return len(self.parents)

    def prepare(self, sequence: Sequence, prompt_slots: int, capacity: int, reading=None):
        return read_prompt(self.model, sequence, prompt_slots, capacity, self.height, reading)

    def propose(self, state, sequence: Sequence, sampling: Sampling, random):
        shape = topology(self.parents)
        offspring = [[int(c) for c in row if c > 0] for row in shape["children"]]
        chosen = self.children == "top" or sampling.temperature == 0
        opened = open_tree(self.model, state, sequence)
        columns = [None] * (self.nodes + 1)
        alive = [None] * (self.nodes + 1)
        laws, law_M = [], np.zeros(self.nodes + 1, np.int32)
        # Nodes in the order of their columns in `fresh`, after the known ones.
        read = [0] if opened.columns else []
        fresh = opened.fresh
        for depth in range(self.height):
            level = [
                n for n in range(self.nodes + 1) if shape["depths"][n] == depth and offspring[n]
            ]
            if depth == 0:
                logits_BxGxV = opened.logits_BxV[:, None]
            else:
                tokens = jnp.stack([columns[n] for n in level], axis=1)
                # Columns of the mask: the token before the root, the nodes read so far, these.
                sees = shape["ancestors"][np.ix_(level, read + level)]
                before = max(opened.columns - 1, 0)
                mask = jnp.asarray(np.pad(sees, ((0, 0), (before, 0)), constant_values=True))
                positions = sequence.lengths_B[:, None] - 1 + shape["depths"][level]
                logits_BxGxV, fresh = read_level(
                    self.model, opened, fresh, tokens, mask, positions, depth
                )
                read += level
            counts = [len(offspring[n]) for n in level]
            if chosen:
                tokens, live = best_children(logits_BxGxV, counts)
            else:
                law_M[level] = np.arange(len(level)) + sum(law.shape[1] for law in laws)
                laws.append(log_probabilities(logits_BxGxV, sampling))
                tokens, live, random = draw_children(laws[-1], counts, self.children, random)
            for n, own_tokens, own_live in zip(level, tokens, live, strict=True):
                for child, token_B, live_B in zip(offspring[n], own_tokens, own_live, strict=True):
                    columns[child] = token_B
                    alive[child] = live_B if n == 0 else live_B & alive[n]
        at_M = np.zeros(self.nodes + 1, np.int32)
        at_M[read] = np.arange(len(read)) + max(opened.columns - 1, 0)
        B = sequence.lengths_B.shape[0]
        proposal = Proposal(
            tokens_BxN=jnp.stack(columns[1:], axis=1).astype(jnp.int32),
            live_BxN=jnp.stack(alive[1:], axis=1),
            log_q_BxRxV=jnp.concatenate(laws, axis=1) if laws else None,
            tree=self._tree(shape, law_M),
            rule="chosen" if chosen else self.children,
        )
        at_BxM = jnp.broadcast_to(at_M, (B, len(at_M)))
        return proposal, Grown(cache=opened.cache, fresh=fresh, at_BxM=at_BxM), random

    def _tree(self, shape, law_M) -> Tree:
        return Tree(
            children_XxMxK=jnp.asarray(shape["children"])[None],
            depths_XxM=jnp.asarray(shape["depths"])[None],
            ancestors_XxMxM=jnp.asarray(shape["ancestors"])[None],
            law_M=jnp.asarray(law_M),
            height=self.height,
        )

    def commit(self, state: Grown, proposal: Proposal, verdict: Verdict, reading=None):
        return commit_grown(self.model, state, verdict, reading)


@record
class DynamicTreeDrafter:
    """EAGLE-2 (Li et al. 2024): `depth` times the best `branching` nodes get `branching` children
    each; of all candidates the `budget` likeliest are kept. Chosen by value throughout."""

    model: Target | HeadModel
    budget: int = static(default=16)
    depth: int = static(default=4)
    branching: int = static(default=4)

    ragged = False

    @property
    def height(self) -> int:
        return self.depth

    @property
    def nodes(self) -> int:
        b = self.branching
        return min(self.budget, b + (self.depth - 1) * b * b)

    def prepare(self, sequence: Sequence, prompt_slots: int, capacity: int, reading=None):
        return read_prompt(self.model, sequence, prompt_slots, capacity, self.height, reading)

    def propose(self, state, sequence: Sequence, sampling: Sampling, random):
        b, B = self.branching, sequence.lengths_B.shape[0]
        row_B = jnp.arange(B)[:, None]
        opened = open_tree(self.model, state, sequence)
        fresh = opened.fresh
        score_Bxb, token_Bxb = best_tokens(_confidence(opened.logits_BxV), b)
        # Candidates in order of birth: score, token, number of the parent (0 the root).
        scores, tokens, parents = [score_Bxb], [token_Bxb], [jnp.zeros((B, b), jnp.int32)]
        born, column = b, jnp.zeros((B, 1 + b), jnp.int32)  # column of fresh, by candidate number
        frontier_Bxb = jnp.broadcast_to(jnp.arange(1, b + 1), (B, b))  # candidate numbers
        sees = jnp.ones((B, b, opened.columns), bool)
        for level in range(1, self.depth):
            own = jnp.broadcast_to(jnp.eye(b, dtype=bool), (B, b, b))
            sees = jnp.concatenate([sees, own], axis=-1)
            at = opened.columns + (level - 1) * b + jnp.arange(b)
            column = column.at[row_B, frontier_Bxb].set(at)
            positions = jnp.broadcast_to(sequence.lengths_B[:, None] - 1 + level, (B, b))
            logits_BxbxV, fresh = read_level(
                self.model, opened, fresh, token_Bxb, sees, positions, level
            )
            value, token = best_tokens(_confidence(logits_BxbxV), b)
            score_Bxbb = (score_Bxb[..., None] + value).reshape(B, b * b)
            token_Bxbb = token.reshape(B, b * b)
            scores.append(score_Bxbb)
            tokens.append(token_Bxbb)
            parents.append(jnp.repeat(frontier_Bxb, b, axis=1))
            column = jnp.pad(column, ((0, 0), (0, b * b)))
            score_Bxb, best_Bxb = jax.lax.top_k(score_Bxbb, b)
            token_Bxb = token_Bxbb[row_B, best_Bxb]
            frontier_Bxb, born = born + 1 + best_Bxb, born + b * b
            sees = sees[row_B, best_Bxb // b]
        scores, tokens, parents = (jnp.concatenate(x, axis=1) for x in (scores, tokens, parents))
        # A child scores at most its parent and is born later; top_k prefers the earlier of equals:
        # the parents of what is kept are kept.
        _, kept_BxN = jax.lax.top_k(scores, self.nodes)
        kept_BxN = jnp.sort(kept_BxN, axis=1)
        number = jnp.zeros((B, born + 1), jnp.int32)
        number = number.at[row_B, kept_BxN + 1].set(jnp.arange(1, self.nodes + 1, dtype=jnp.int32))
        parents_BxN = number[row_B, parents[row_B, kept_BxN]]
        at_BxM = jnp.pad(column[row_B, kept_BxN + 1], ((0, 0), (1, 0)))
        proposal = Proposal(
            tokens_BxN=tokens[row_B, kept_BxN].astype(jnp.int32),
            live_BxN=scores[row_B, kept_BxN] > -jnp.inf,
            tree=tree_of_parents(parents_BxN, self.depth, b),
            rule="chosen",
        )
        return proposal, Grown(cache=opened.cache, fresh=fresh, at_BxM=at_BxM), random

    def commit(self, state: Grown, proposal: Proposal, verdict: Verdict, reading=None):
        return commit_grown(self.model, state, verdict, reading)


def _confidence(logits: jax.Array) -> jax.Array:
    """log of the draft's own probabilities, whatever the sampling."""
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
