"""Walking down a token tree: siblings are tested in order, an accepted child is the next node.

Two rules (accept.py): "drawn" keeps the residual (p - c q)+ of the current node through its
constant c alone, "chosen" keeps what is left of p. No child is discarded after its value was seen,
and a child that its law cannot have produced is skipped without a test.
Legend: see base.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sdx.decoding.accept import draw_surplus, pick, surplus, with_root
from sdx.decoding.base import Proposal, Verdict
from sdx.decoding.random import RandomSource
from sdx.records import record


@record
class Walk:
    """Where the walk stands. At the current node: `c_B` of the residual, `rejected_BxV` tokens
    already refused; `stopped_B` once a node refused all its children."""

    node_B: jax.Array
    stopped_B: jax.Array
    c_B: jax.Array
    rejected_BxV: jax.Array
    accepted_B: jax.Array
    path_BxP: jax.Array
    ranks_BxP: jax.Array
    random: RandomSource


def _test_drawn(p_BxV, q_BxV, token_B, walk_c_B, rejected_BxV, replacement):
    """Probability to keep a child drawn from q, and the residual's constant if it is refused."""
    weights_BxV = jnp.where(rejected_BxV, 0.0, jnp.maximum(p_BxV - walk_c_B[:, None] * q_BxV, 0.0))
    mass_B = weights_BxV.sum(-1)
    if replacement:
        undrawn_B = jnp.ones_like(mass_B)
    else:
        # A sum over what is left, never 1 - Q: at Q = 1 - 1e-7 the difference has no digits.
        undrawn_B = jnp.where(rejected_BxV, 0.0, q_BxV).sum(-1)
    own = jnp.take_along_axis(weights_BxV, token_B[:, None], axis=1)[:, 0]
    q = jnp.take_along_axis(q_BxV, token_B[:, None], axis=1)[:, 0]
    sound_B = (mass_B > 0) & (q > 0) & (undrawn_B > 0)
    ratio = own * (undrawn_B / jnp.where(sound_B, q, 1.0)) / jnp.where(sound_B, mass_B, 1.0)
    keep_B = jnp.where(sound_B, jnp.minimum(ratio, 1.0), 0.0)
    return keep_B, walk_c_B + mass_B / jnp.where(undrawn_B > 0, undrawn_B, 1.0)


def _test_chosen(p_BxV, token_B, rejected_BxV):
    """Probability to keep a chosen child: its share of the mass not refused so far."""
    left_BxV = jnp.where(rejected_BxV, 0.0, p_BxV)
    mass_B = left_BxV.sum(-1)
    own = jnp.take_along_axis(left_BxV, token_B[:, None], axis=1)[:, 0]
    return jnp.where(mass_B > 0, own / jnp.where(mass_B > 0, mass_B, 1.0), 0.0)


def tree(
    random: RandomSource, log_p_BxMxV: jax.Array, proposal: Proposal
) -> tuple[Verdict, RandomSource]:
    """The accepted path of a tree, and the token after it."""
    tokens_BxM, live_BxM, children_BxMxK = with_root(proposal)
    B, _, K = children_BxMxK.shape
    V, height = log_p_BxMxV.shape[-1], proposal.tree.height
    row_B = jnp.arange(B)
    drawn = proposal.rule != "chosen"

    def descend(depth, walk: Walk) -> Walk:
        p_BxV = jnp.exp(pick(log_p_BxMxV, walk.node_B))
        if drawn:
            q_BxV = jnp.exp(pick(proposal.log_q_BxRxV, proposal.tree.law_M[walk.node_B]))
        found_B = walk.stopped_B
        node_B, rank_B = walk.node_B, jnp.zeros((B,), jnp.int32)
        c_B, rejected_BxV, random = walk.c_B, walk.rejected_BxV, walk.random
        for rank in range(K):
            child_B = children_BxMxK[row_B, walk.node_B, rank]
            token_B = tokens_BxM[row_B, child_B]
            if drawn:
                replacement = proposal.rule == "replacement"
                keep_B, next_c_B = _test_drawn(
                    p_BxV, q_BxV, token_B, c_B, rejected_BxV, replacement
                )
            else:
                keep_B, next_c_B = _test_chosen(p_BxV, token_B, rejected_BxV), c_B
            tested_B = (child_B > 0) & live_BxM[row_B, child_B] & ~found_B
            kept_Bx1, random = random.accept(jnp.where(tested_B, keep_B, 0.0)[:, None])
            kept_B = kept_Bx1[:, 0] & tested_B
            refused_B = tested_B & ~kept_B
            c_B = jnp.where(refused_B, next_c_B, c_B)
            rejected_BxV |= refused_B[:, None] & (jnp.arange(V) == token_B[:, None])
            node_B = jnp.where(kept_B, child_B, node_B)
            rank_B = jnp.where(kept_B, rank, rank_B)
            found_B |= kept_B
        moved_B = found_B & ~walk.stopped_B
        return Walk(
            node_B=node_B,
            stopped_B=walk.stopped_B | ~moved_B,
            c_B=jnp.where(moved_B, 0.0, c_B),
            rejected_BxV=rejected_BxV & ~moved_B[:, None],
            accepted_B=walk.accepted_B + moved_B,
            path_BxP=walk.path_BxP.at[:, depth].set(node_B),
            ranks_BxP=walk.ranks_BxP.at[:, depth].set(rank_B),
            random=random,
        )

    zeros_B, zeros_BxP = jnp.zeros((B,), jnp.int32), jnp.zeros((B, height), jnp.int32)
    walk = Walk(
        node_B=zeros_B,
        stopped_B=jnp.zeros((B,), bool),
        c_B=jnp.zeros((B,), jnp.float32),
        rejected_BxV=jnp.zeros((B, V), bool),
        accepted_B=zeros_B,
        path_BxP=zeros_BxP,
        ranks_BxP=zeros_BxP,
        random=random,
    )
    walk = jax.lax.fori_loop(0, height, descend, walk)
    log_p_BxV = pick(log_p_BxMxV, walk.node_B)
    weights_BxV = jnp.exp(log_p_BxV)
    if drawn:
        log_q_BxV = pick(proposal.log_q_BxRxV, proposal.tree.law_M[walk.node_B])
        weights_BxV = surplus(log_p_BxV, log_q_BxV, walk.c_B)
    token_B, random = draw_surplus(walk.random, weights_BxV, log_p_BxV, walk.rejected_BxV)
    verdict = Verdict(
        accepted_B=walk.accepted_B,
        path_BxP=walk.path_BxP,
        ranks_BxP=walk.ranks_BxP,
        token_B=token_B,
    )
    return verdict, random
