"""Judging a proposal through the ops of `sdx.kernels`: no probabilities are stored.

The rules are those of accept.py and walk.py, in the streamed form of `kernels.verify.rules`.
Legend: base.py; W = B * M rows of logits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from sdx.decoding import accept
from sdx.decoding.base import Proposal, Verdict
from sdx.decoding.random import RandomSource
from sdx.kernels import known_law, law, surplus, verification_rules
from sdx.records import Sampling


def judge(
    logits_BxMxV: jax.Array,
    proposal: Proposal,
    sampling: Sampling,
    random: RandomSource,
    kernels: str,
) -> tuple[Verdict, jax.Array | None, RandomSource]:
    """The verdict, and the adjusted log-probabilities (None under greedy)."""
    B, M, V = logits_BxMxV.shape
    logits_WxV = logits_BxMxV.reshape(B * M, V)
    if sampling.temperature == 0:
        best_BxM = law(logits_WxV, implementation=kernels).best_R.reshape(B, M)
        greedy = accept.greedy_chain if proposal.tree is None else accept.greedy_tree
        return greedy(best_BxM, proposal), None, random
    target = law(
        logits_WxV,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        implementation=kernels,
    )
    draft = None
    if proposal.log_q_BxRxV is not None:
        draft = known_law(proposal.log_q_BxRxV.reshape(-1, V))
    stream = functools.partial(surplus, implementation=kernels)
    if proposal.tree is None:
        accepted_B, token_B, random = verification_rules.chain(
            stream,
            random,
            target,
            draft,
            proposal.tokens_BxN,
            proposal.live_BxN,
            proposal.dropped_B,
            proposal.rule,
        )
        verdict = accept.chain_verdict(accepted_B, token_B, proposal.tokens_BxN.shape[1])
    else:
        accepted_B, path_BxP, ranks_BxP, token_B, random = verification_rules.tree(
            stream,
            random,
            target,
            draft,
            *accept.with_root(proposal),
            proposal.tree.law_M,
            proposal.tree.height,
            proposal.rule,
        )
        verdict = Verdict(
            accepted_B=accepted_B, path_BxP=path_BxP, ranks_BxP=ranks_BxP, token_B=token_B
        )
    scaled_WxV = logits_WxV.astype(jnp.float32) * target.inverse_temperature_R[:, None]
    log_p_WxV = jnp.where(
        logits_WxV >= target.threshold_R[:, None],
        scaled_WxV - target.log_normaliser_R[:, None],
        -jnp.inf,
    )
    return verdict, log_p_WxV.reshape(B, M, V), random
