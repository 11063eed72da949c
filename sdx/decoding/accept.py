"""Which drafts to keep, and what to emit after them: lossless for every kind of candidate.

One primitive serves all rules: the surplus (a p - c q)+ of one row, its mass S(c), and a draw from
it. No residual is stored: a row is sampled once, after acceptance is decided. The rule depends on
how the candidates came to be:

- drawn from q, successively, siblings i.i.d. ("replacement", Miao et al. 2024) or without
  replacement ("without_replacement", Chen et al. 2024, Yang et al. 2024): after j rejected
  siblings the residual is (p - c_j q)+ / S_j with c_0 = 0, c_{j+1} = c_j + S_j / (1 - Q_j), Q_j
  the mass drawn before (0 with replacement). A chain has one child: c = 0, then c = 1
  (Leviathan et al. 2023).
- "chosen" by value (top-k, n-gram, reranking): the candidate's law is a point, so it is kept with
  its probability under what is left of p.
- dropped by a token-dependent test: q loses the mass of tokens that fail; the same chain rule.
- "block" (Sun et al. 2024): one decision for the whole chain.

All functions take log-probabilities in float32, shapes `[B, rows, V]`, and the random source.
Legend: see base.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sdx.decoding.base import Proposal, Verdict
from sdx.decoding.random import RandomSource


def surplus(
    log_p_BxV: jax.Array, log_q_BxV: jax.Array, c_B: jax.Array, a_B: jax.Array | float = 1.0
) -> jax.Array:
    """The primitive's integrand (a p - c q)+, `[B, V]`; its sum is S(c).

    p and q may be log-probabilities with -inf. c = 0 switches q off.
    """
    a_B = jnp.broadcast_to(jnp.asarray(a_B, jnp.float32), c_B.shape)
    p = a_B[:, None] * jnp.exp(log_p_BxV)
    return jnp.maximum(p - c_B[:, None] * jnp.exp(log_q_BxV), 0.0)


def draw_surplus(
    random: RandomSource,
    weights_BxV: jax.Array,
    log_p_BxV: jax.Array,
    rejected_BxV: jax.Array,
) -> tuple[jax.Array, RandomSource]:
    """A token by `weights`; where they vanish, by p without the rejected tokens, and where even
    that vanishes (rounding: the event has no probability), by p."""
    p_BxV = jnp.exp(log_p_BxV)
    left_BxV = jnp.where(rejected_BxV, 0.0, p_BxV)
    weights_BxV = jnp.where(rejected_BxV, 0.0, weights_BxV)
    left_BxV = jnp.where(left_BxV.sum(-1, keepdims=True) > 0, left_BxV, p_BxV)
    weights_BxV = jnp.where(weights_BxV.sum(-1, keepdims=True) > 0, weights_BxV, left_BxV)
    return random.draw(jnp.log(weights_BxV))


def pick(x_BxRxV: jax.Array, row_B: jax.Array) -> jax.Array:
    """Row `row_B[b]` of each batch row, `[B, V]`."""
    return jnp.take_along_axis(x_BxRxV, row_B[:, None, None], axis=1)[:, 0]


def _at(x_BxNxV: jax.Array, tokens_BxN: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BxNxV, tokens_BxN[..., None], axis=-1)[..., 0]


def _leading(kept_BxN: jax.Array) -> jax.Array:
    """How many come before the first false."""
    return jnp.cumprod(kept_BxN.astype(jnp.int32), axis=-1).sum(-1)


def chain_verdict(accepted_B: jax.Array, token_B: jax.Array, length: int) -> Verdict:
    B = accepted_B.shape[0]
    path_BxN = jnp.broadcast_to(jnp.arange(1, length + 1, dtype=jnp.int32), (B, length))
    return Verdict(
        accepted_B=accepted_B,
        path_BxP=path_BxN,
        ranks_BxP=jnp.zeros_like(path_BxN),
        token_B=token_B,
    )


# ---------------------------------------------------------------------------- greedy


def greedy_chain(best_BxM: jax.Array, proposal: Proposal) -> Verdict:
    """Keeps the drafts that are the target's own choice. `best_BxM`: argmax of the logits."""
    N = proposal.tokens_BxN.shape[1]
    kept_BxN = (proposal.tokens_BxN == best_BxM[:, :N]) & proposal.live_BxN
    accepted_B = _leading(kept_BxN)
    token_B = jnp.take_along_axis(best_BxM, accepted_B[:, None], axis=1)[:, 0]
    return chain_verdict(accepted_B, token_B, N)


def greedy_tree(best_BxM: jax.Array, proposal: Proposal) -> Verdict:
    """Walks down from the root while a child is the target's own choice."""
    tokens_BxM, live_BxM, children_BxMxK = with_root(proposal)
    B = best_BxM.shape[0]
    row_B = jnp.arange(B)

    def descend(depth, walk):
        node_B, walking_B, accepted_B, path_BxP, ranks_BxP = walk
        child_BxK = children_BxMxK[row_B, node_B]
        wanted_Bx1 = best_BxM[row_B, node_B][:, None]
        match_BxK = (tokens_BxM[row_B[:, None], child_BxK] == wanted_Bx1) & (child_BxK > 0)
        match_BxK &= live_BxM[row_B[:, None], child_BxK]
        rank_B = jnp.argmax(match_BxK, axis=-1).astype(jnp.int32)
        walking_B &= match_BxK.any(-1)
        node_B = jnp.where(walking_B, child_BxK[row_B, rank_B], node_B)
        return (
            node_B,
            walking_B,
            accepted_B + walking_B,
            path_BxP.at[:, depth].set(node_B),
            ranks_BxP.at[:, depth].set(rank_B),
        )

    zeros_B = jnp.zeros((B,), jnp.int32)
    zeros_BxP = jnp.zeros((B, proposal.tree.height), jnp.int32)
    start = (zeros_B, jnp.ones((B,), bool), zeros_B, zeros_BxP, zeros_BxP)
    node_B, _, accepted_B, path, ranks = jax.lax.fori_loop(0, proposal.tree.height, descend, start)
    token_B = best_BxM[row_B, node_B]
    return Verdict(accepted_B=accepted_B, path_BxP=path, ranks_BxP=ranks, token_B=token_B)


def with_root(proposal: Proposal) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens and liveness indexed by node number (0, the root, is no candidate), and the children
    of every node for every row."""
    tokens_BxM = jnp.pad(proposal.tokens_BxN, ((0, 0), (1, 0)))
    live_BxM = jnp.pad(proposal.live_BxN, ((0, 0), (1, 0)))
    children = proposal.tree.children_XxMxK
    return tokens_BxM, live_BxM, jnp.broadcast_to(children, (len(tokens_BxM), *children.shape[1:]))


# ---------------------------------------------------------------------------- chains


def chain(
    random: RandomSource, log_p_BxMxV: jax.Array, proposal: Proposal
) -> tuple[Verdict, RandomSource]:
    """Token by token: drawn from q (whole, or what a test let through), or chosen by value."""
    tokens_BxN, live_BxN = proposal.tokens_BxN, proposal.live_BxN
    B, N = tokens_BxN.shape
    if N == 0:  # autoregression
        token_B, random = random.draw(log_p_BxMxV[:, 0])
        return chain_verdict(jnp.zeros((B,), jnp.int32), token_B, 0), random
    p_BxN = jnp.exp(_at(log_p_BxMxV[:, :N], tokens_BxN))
    if proposal.rule == "chosen":
        keep_BxN = p_BxN
    else:
        q_BxN = jnp.exp(_at(proposal.log_q_BxRxV, tokens_BxN))
        keep_BxN = jnp.where(q_BxN > 0, p_BxN / jnp.where(q_BxN > 0, q_BxN, 1.0), 0.0)
    kept_BxN, random = random.accept(jnp.where(live_BxN, jnp.minimum(keep_BxN, 1.0), 0.0))
    accepted_B = _leading(kept_BxN & live_BxN)
    token_B, random = _after_chain(random, log_p_BxMxV, proposal, accepted_B, 1.0)
    return chain_verdict(accepted_B, token_B, N), random


def _after_chain(
    random: RandomSource,
    log_p_BxMxV: jax.Array,
    proposal: Proposal,
    accepted_B: jax.Array,
    a_B: jax.Array | float,
) -> tuple[jax.Array, RandomSource]:
    """The token after a chain's accepted drafts: from (a p - q)+ after a rejection or a drop,
    from p when all were accepted."""
    N, V = proposal.tokens_BxN.shape[1], log_p_BxMxV.shape[-1]
    log_p_BxV = pick(log_p_BxMxV, accepted_B)
    at_B = jnp.minimum(accepted_B, N - 1)
    refused_B = accepted_B < proposal.live_BxN.sum(-1)
    first_B = jnp.take_along_axis(proposal.tokens_BxN, at_B[:, None], axis=1)
    rejected_BxV = (jnp.arange(V) == first_B) & refused_B[:, None]
    if proposal.rule == "block":  # a block may fail although this token alone would have passed
        rejected_BxV = jnp.zeros_like(rejected_BxV)
    if proposal.rule == "chosen":
        weights_BxV = jnp.exp(log_p_BxV)
    else:
        subtract_B = refused_B
        if proposal.dropped_B is not None:
            subtract_B |= proposal.dropped_B
        a_B = jnp.where(subtract_B, a_B, 1.0)
        log_q_BxV = pick(proposal.log_q_BxRxV, at_B)
        weights_BxV = surplus(log_p_BxV, log_q_BxV, subtract_B.astype(jnp.float32), a_B)
    return draw_surplus(random, weights_BxV, log_p_BxV, rejected_BxV)


def block_chain(
    random: RandomSource, log_p_BxMxV: jax.Array, proposal: Proposal
) -> tuple[Verdict, RandomSource]:
    """Block verification (Sun et al. 2024, algorithm 2): the longest prefix whose own event
    happens. pi_i = min(1, pi_{i-1} p_i / q_i); s_i = S of (pi_i p - q) at the row after i drafts;
    h_i = s_i / (s_i + 1 - pi_i), and h = pi at the chain's end. 1 / pi is never formed."""
    tokens_BxN, drafted_B = proposal.tokens_BxN, proposal.live_BxN.sum(-1)
    B, N = tokens_BxN.shape
    p_BxN = jnp.exp(_at(log_p_BxMxV[:, :N], tokens_BxN))
    q_BxN = jnp.exp(_at(proposal.log_q_BxRxV, tokens_BxN))
    pi, prefix = jnp.ones((B,)), []
    for i in range(N):
        # q = 0: the token cannot have been drawn; the row is dead there.
        q = q_BxN[:, i]
        pi = jnp.where(q > 0, jnp.minimum(1.0, pi * p_BxN[:, i] / jnp.where(q > 0, q, 1.0)), 0.0)
        prefix.append(pi)
    chances = []
    for i in range(1, N + 1):
        pi = prefix[i - 1]
        happens = pi
        if i < N:
            log_p, log_q = log_p_BxMxV[:, i], proposal.log_q_BxRxV[:, i]
            s = surplus(log_p, log_q, jnp.ones((B,)), pi).sum(-1)
            rest = s + (1 - pi)
            inner = jnp.where(rest > 0, s / jnp.where(rest > 0, rest, 1.0), 1.0)
            happens = jnp.where(i < drafted_B, inner, pi)
        chances.append(jnp.where(i <= drafted_B, happens, 0.0))
    happens_BxN, random = random.accept(jnp.stack(chances, axis=1))
    order_N = jnp.arange(1, N + 1, dtype=jnp.int32)
    accepted_B = jnp.max(jnp.where(happens_BxN, order_N, 0), axis=1)
    pi_BxM = jnp.stack([jnp.ones((B,)), *prefix], axis=1)
    a_B = jnp.take_along_axis(pi_BxM, accepted_B[:, None], axis=1)[:, 0]
    token_B, random = _after_chain(random, log_p_BxMxV, proposal, accepted_B, a_B)
    return chain_verdict(accepted_B, token_B, N), random
