"""Drafters of chains: nothing, a model token by token.

Legend: base.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sdx.decoding.base import Proposal, Rule, Sequence, Target
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

    def prepare(self, sequence, prompt_slots, capacity):
        return ()

    def propose(self, state, sequence: Sequence, sampling, random):
        B = sequence.lengths_B.shape[0]
        empty = jnp.zeros((B, 0), jnp.int32)
        return Proposal(tokens_BxN=empty, live_BxN=empty > 0, rule="chosen"), state, random

    def commit(self, state, proposal, verdict):
        return state


def read_prompt(model: Target, sequence: Sequence, prompt_slots: int, capacity: int) -> Any:
    """A draft model's cache over the prompts (all known tokens but the last)."""
    prompts_BxS = sequence.tokens_BxL[:, :prompt_slots]
    B, S = prompts_BxS.shape
    cache = model.empty_cache(B, min(capacity, getattr(model, "max_positions", capacity)))
    fresh = model(prompts_BxS, model.empty_cache(B, 1), last=1).fresh
    every_BxS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    return cache.commit(fresh, every_BxS, sequence.lengths_B - 1)


def read_and_write(model: Target, cache: Any, tokens_BxT: jax.Array) -> tuple[jax.Array, Any]:
    """Logits `[B, V]` after the last of T tokens, and the cache with all of them."""
    B, T = tokens_BxT.shape
    output = model(tokens_BxT, cache, last=1)
    logits_BxV = output.logits_BxTxV[:, -1]
    path_BxT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    counts_B = after(~jnp.isnan(logits_BxV[:, 0]), jnp.full((B,), T, jnp.int32))
    return logits_BxV, cache.commit(output.fresh, path_BxT, counts_B)


@record
class ChainDrafter:
    """`lookahead` tokens from a draft model, one after the other.

    Its cache is behind the sequence by two tokens at the start of every round: the first pass
    reads both, so that a round whose drafts were all accepted needs no special case.
    """

    model: Target
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

    def prepare(self, sequence: Sequence, prompt_slots: int, capacity: int):
        if self.lookahead == 0:
            return ()
        return read_prompt(self.model, sequence, prompt_slots, capacity)

    def propose(self, state, sequence: Sequence, sampling: Sampling, random):
        B = sequence.lengths_B.shape[0]
        if self.lookahead == 0:
            return NoDrafter().propose(state, sequence, sampling, random)
        cache = state.rollback(sequence.lengths_B - LAG)
        tokens_BxT = known_tail(sequence, LAG)
        drafts, laws = [], []
        for _ in range(self.lookahead):
            logits_BxV, cache = read_and_write(self.model, cache, tokens_BxT)
            if sampling.temperature == 0:
                token_B = best_token(logits_BxV)
            else:
                laws.append(log_probabilities(logits_BxV, sampling))
                token_B, random = random.draw(laws[-1])
            drafts.append(token_B)
            tokens_BxT = token_B[:, None]
        proposal = Proposal(
            tokens_BxN=jnp.stack(drafts, axis=1),
            live_BxN=jnp.ones((B, self.lookahead), bool),
            log_q_BxRxV=jnp.stack(laws, axis=1) if laws else None,
            rule=self.rule,
        )
        return proposal, cache, random

    def commit(self, state, proposal, verdict):
        return state  # the next round rolls back to its own length
