"""Drafters of chains: nothing, a model token by token.

Legend: base.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sdx.decoding.base import Proposal, Rule, Sequence, Target, Verdict
from sdx.decoding.heads import HeadModel
from sdx.decoding.sampling import best_token, log_probabilities
from sdx.decoding.verify import after, known_tail
from sdx.records import Sampling, record, static

LAG = 2  # a model that drafts has not read the last token, and perhaps not the one before


@record
class NoDrafter:
    """Autoregression: every round reads one token."""

    height: int = static(default=0)
    branching: int = static(default=1)
    nodes: int = static(default=0)

    ragged = False

    def prepare(self, sequence, prompt_slots, capacity, reading=None):
        return ()

    def propose(self, state, sequence: Sequence, sampling, random):
        B = sequence.lengths_B.shape[0]
        empty = jnp.zeros((B, 0), jnp.int32)
        return Proposal(tokens_BxN=empty, live_BxN=empty > 0, rule="chosen"), state, random

    def commit(self, state, proposal, verdict, reading=None):
        return state


def read_prompt(
    model: Target | HeadModel,
    sequence: Sequence,
    prompt_slots: int,
    capacity: int,
    height: int = 0,
    reading: Any = None,
) -> Any:
    """A draft model's cache over the prompts (all known tokens but the last). A head takes the
    target's `reading` of them; `height`: the longest path that it will propose."""
    if isinstance(model, HeadModel):
        return model.prepare(sequence, prompt_slots, capacity, height, reading)
    prompts_BxS = sequence.tokens_BxL[:, :prompt_slots]
    B, S = prompts_BxS.shape
    cache = model.empty_cache(B, min(capacity, getattr(model, "max_positions", capacity)))
    fresh = model(prompts_BxS, model.empty_cache(B, 1), last=1).fresh
    every_BxS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    return cache.commit(fresh, every_BxS, sequence.lengths_B - 1)


def read_tail(model: Target | HeadModel, cache: Any, sequence: Sequence) -> tuple[jax.Array, Any]:
    """Logits `[B, V]` after all known tokens, and the cache with them."""
    if isinstance(model, HeadModel):
        return model.open(cache, sequence)
    cache = cache.rollback(sequence.lengths_B - LAG)
    return read_and_write(model, cache, known_tail(sequence, LAG))


def read_and_write(
    model: Target | HeadModel, cache: Any, tokens_BxT: jax.Array, step: int = 1
) -> tuple[jax.Array, Any]:
    """Logits `[B, V]` after the last of T tokens, and the cache with all of them. `step`: which
    draft this is, the first being 1 (a head may have a specialist for it)."""
    if isinstance(model, HeadModel):
        return model.write(cache, tokens_BxT, step)
    B, T = tokens_BxT.shape
    output = model(tokens_BxT, cache, last=1)
    logits_BxV = output.logits_BxTxV[:, -1]
    path_BxT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    counts_B = after(~jnp.isnan(logits_BxV[:, 0]), jnp.full((B,), T, jnp.int32))
    return logits_BxV, cache.commit(output.fresh, path_BxT, counts_B)


def settle(model: Target | HeadModel, cache: Any, verdict: Verdict, reading: Any) -> Any:
    """The cache of a model that wrote its drafts, for the next round: a head takes the target's
    features, a language model will roll back to the length that it finds."""
    if isinstance(model, HeadModel):
        return model.settle(cache, verdict, reading)
    return cache


@record
class ChainDrafter:
    """`lookahead` tokens from a draft model, one after the other.

    Its cache is behind the sequence by two tokens at the start of every round: the first pass
    reads both, so that a round whose drafts were all accepted needs no special case.
    """

    model: Target | HeadModel
    lookahead: int = static(default=4)
    rule: Rule = static(default="replacement")

    branching = 1
    ragged = False

    @property
    def height(self) -> int:
        return self.lookahead

    @property
    def nodes(self) -> int:
        return self.lookahead

    def prepare(self, sequence: Sequence, prompt_slots: int, capacity: int, reading=None):
        if self.lookahead == 0:
            return ()
        return read_prompt(self.model, sequence, prompt_slots, capacity, self.height, reading)

    def propose(self, state, sequence: Sequence, sampling: Sampling, random):
        B = sequence.lengths_B.shape[0]
        if self.lookahead == 0:
            return NoDrafter().propose(state, sequence, sampling, random)
        drafts, laws = [], []
        for step in range(self.lookahead):
            if step == 0:
                logits_BxV, cache = read_tail(self.model, state, sequence)
            else:
                logits_BxV, cache = read_and_write(self.model, cache, drafts[-1][:, None], step)
            if sampling.temperature == 0:
                token_B = best_token(logits_BxV)
            else:
                laws.append(log_probabilities(logits_BxV, sampling))
                token_B, random = random.draw(laws[-1])
            drafts.append(token_B)
        proposal = Proposal(
            tokens_BxN=jnp.stack(drafts, axis=1),
            live_BxN=jnp.ones((B, self.lookahead), bool),
            log_q_BxRxV=jnp.stack(laws, axis=1) if laws else None,
            rule=self.rule,
        )
        return proposal, cache, random

    def commit(self, state, proposal, verdict, reading=None):
        return settle(self.model, state, verdict, reading) if self.lookahead else state
