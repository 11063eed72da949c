"""Reading a proposal with a model and judging it: the second half of every round.

Used by the loop for the target and by every level of a cascade for its own model.
Legend: base.py; T = lag + N tokens read, of which `lag` are known (the target has read all known
tokens but the last: lag 1; a model that drafts may miss two).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from sdx.decoding import accept, streamed, walk
from sdx.decoding.base import Proposal, Sequence, Target, Verdict
from sdx.decoding.random import RandomSource
from sdx.decoding.sampling import best_token, log_probabilities
from sdx.kernels import wanted
from sdx.records import Sampling, record


@record
class Read:
    """A model's output: logits of root and nodes, and what a commit takes."""

    logits_BxTxV: jax.Array
    fresh: Any


def known_tail(sequence: Sequence, lag: int) -> jax.Array:
    """The last `lag` known tokens of every row, `[B, lag]`."""
    slot_Bxlag = sequence.lengths_B[:, None] - lag + jnp.arange(lag)
    return jnp.take_along_axis(sequence.tokens_BxL, slot_Bxlag, axis=1)


def read_proposal(
    model: Target, cache: Any, sequence: Sequence, proposal: Proposal, lag: int
) -> Any:
    """One pass over the known tail and the candidates; `cache` holds lengths - lag tokens.

    Returns the model's output with logits of the root and the N nodes, `[B, M, V]`.
    """
    N = proposal.tokens_BxN.shape[1]
    tokens_BxT = jnp.concatenate([known_tail(sequence, lag), proposal.tokens_BxN], axis=1)
    if proposal.tree is None:
        return model(tokens_BxT, cache, last=N + 1)
    tree = proposal.tree
    # The known tokens before the root are a chain that every node sees.
    before = lag - 1
    X, M, _ = tree.ancestors_XxMxM.shape
    mask_XxTxT = jnp.zeros((X, M + before, M + before), bool)
    mask_XxTxT = mask_XxTxT.at[:, :before, :before].set(jnp.tri(before, dtype=bool))
    mask_XxTxT = mask_XxTxT.at[:, before:, :before].set(True)
    mask_XxTxT = mask_XxTxT.at[:, before:, before:].set(tree.ancestors_XxMxM)
    steps_XxT = jnp.concatenate(
        [jnp.broadcast_to(jnp.arange(before), (X, before)), before + tree.depths_XxM], axis=1
    )
    positions_BxT = cache.lengths_B[:, None] + steps_XxT
    return model(tokens_BxT, cache, mask=mask_XxTxT, positions=positions_BxT, last=N + 1)


def read_live(
    model: Target, cache: Any, sequence: Sequence, proposal: Proposal, lag: int, least: int = 0
) -> Any:
    """`read_proposal` of a chain that may be shorter than its N slots: the pass is only as wide as
    the longest live row needs (`least`, and powers of two up to N). Rows that nobody drafted get
    zeros."""
    N = proposal.tokens_BxN.shape[1]
    widths = sorted({least, N} | {2**i for i in range(N.bit_length()) if least < 2**i < N})

    def read(width):
        short = Proposal(
            tokens_BxN=proposal.tokens_BxN[:, :width], live_BxN=proposal.live_BxN[:, :width]
        )
        output = read_proposal(model, cache, sequence, short, lag)
        logits = jnp.pad(output.logits_BxTxV, ((0, 0), (0, N - width), (0, 0)))
        return logits, model.pad(output.fresh, lag + N)

    longest = proposal.live_BxN.sum(-1).max()
    which = (longest > jnp.array(widths)).sum()
    logits, fresh = jax.lax.switch(which, [functools.partial(read, w) for w in widths])
    return Read(logits_BxTxV=logits, fresh=fresh)


def judge(
    logits_BxMxV: jax.Array,
    proposal: Proposal,
    sampling: Sampling,
    random: RandomSource,
    kernels: str = "auto",
) -> tuple[Verdict, jax.Array | None, RandomSource]:
    """The verdict, and the adjusted log-probabilities that it used (None under greedy).

    kernels: which implementation of the ops of `sdx.kernels` judges; "auto" on a CPU is the dense
    form, which is faster there.
    """
    if wanted(kernels):
        return streamed.judge(logits_BxMxV, proposal, sampling, random, kernels)
    if sampling.temperature == 0:
        best_BxM = best_token(logits_BxMxV)
        greedy = accept.greedy_chain if proposal.tree is None else accept.greedy_tree
        return greedy(best_BxM, proposal), None, random
    log_p_BxMxV = log_probabilities(logits_BxMxV, sampling)
    if proposal.tree is not None:
        verdict, random = walk.tree(random, log_p_BxMxV, proposal)
    elif proposal.rule == "block":
        verdict, random = accept.block_chain(random, log_p_BxMxV, proposal)
    else:
        verdict, random = accept.chain(random, log_p_BxMxV, proposal)
    return verdict, log_p_BxMxV, random


def emitted(proposal: Proposal, verdict: Verdict) -> jax.Array:
    """Accepted tokens and the target's own after them, `[B, P + 1]`; the rest repeats the last."""
    B, P = verdict.path_BxP.shape
    if P == 0:
        return verdict.token_B[:, None]
    if proposal.tree is None:
        path_tokens_BxP = proposal.tokens_BxN
    else:
        at_BxP = jnp.maximum(verdict.path_BxP - 1, 0)
        path_tokens_BxP = jnp.take_along_axis(proposal.tokens_BxN, at_BxP, axis=1)
    drafts_BxQ = jnp.pad(path_tokens_BxP, ((0, 0), (0, 1)))
    own_BxQ = jnp.arange(P + 1) >= verdict.accepted_B[:, None]
    return jnp.where(own_BxQ, verdict.token_B[:, None], drafts_BxQ)


def after(known_B: jax.Array, counts_B: jax.Array) -> jax.Array:
    """The same counts, but not before `known_B`, which is always true and known only to us.

    The write to a cache must come after the pass that reads the same buffers. Without a data
    dependence XLA may order it first, and then copies every cache in every round (an optimization
    barrier is gone before copies are decided).
    """
    return jnp.where(known_B, counts_B, 0)


def commit_path(
    cache: Any, fresh: Any, verdict: Verdict, lag: int, accepted_B: jax.Array, active_B: jax.Array
) -> Any:
    """Writes the known tail and the first `accepted_B` nodes of the path; nothing for rows that
    are not active."""
    B, P = verdict.path_BxP.shape
    counts_B = jnp.where(active_B, lag + accepted_B, 0)
    known_Bxlag = jnp.broadcast_to(jnp.arange(lag, dtype=jnp.int32), (B, lag))
    path_BxQ = jnp.concatenate([known_Bxlag, verdict.path_BxP + (lag - 1)], axis=1)
    return cache.commit(fresh, path_BxQ, after(verdict.token_B >= 0, counts_B))


def append(sequence: Sequence, tokens_BxQ: jax.Array, counts_B: jax.Array) -> Sequence:
    """The sequence with the first `counts_B` of these tokens after each row."""
    B, Q = tokens_BxQ.shape
    L = sequence.tokens_BxL.shape[1]
    step_Q = jnp.arange(Q)
    slot_BxQ = jnp.where(
        step_Q < counts_B[:, None], sequence.lengths_B[:, None] + step_Q, L + step_Q
    )
    tokens_BxL = sequence.tokens_BxL.at[jnp.arange(B)[:, None], slot_BxQ].set(
        tokens_BxQ, mode="drop", unique_indices=True
    )
    return Sequence(tokens_BxL=tokens_BxL, lengths_B=sequence.lengths_B + counts_B)
