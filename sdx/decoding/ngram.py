"""Prompt lookup (Saxena 2023): what followed the last occurrence of the current n-gram.

No model; candidates are chosen by value. Legend: base.py.
"""

from __future__ import annotations

import jax.numpy as jnp

from sdx.decoding.base import Proposal, Sequence
from sdx.records import Sampling, record, static


@record
class NgramDrafter:
    """Proposes up to `lookahead` tokens after the most recent earlier occurrence of the longest
    suffix of `longest` .. `shortest` tokens; nothing where there is none."""

    lookahead: int = static(default=4)
    longest: int = static(default=3)
    shortest: int = static(default=1)

    branching = 1
    ragged = True
    least = 0

    @property
    def height(self) -> int:
        return self.lookahead

    @property
    def nodes(self) -> int:
        return self.lookahead

    def prepare(self, sequence: Sequence, prompt_slots: int, capacity: int, reading=None):
        return ()

    def propose(self, state, sequence: Sequence, sampling: Sampling, random):
        tokens_BxL, lengths_B = sequence.tokens_BxL, sequence.lengths_B
        slot_L = jnp.arange(tokens_BxL.shape[1])
        same_BxL = jnp.ones(tokens_BxL.shape, bool)
        best_B = jnp.full(lengths_B.shape, -1)
        for n in range(1, self.longest + 1):
            # Slot l ends an n-gram equal to the suffix: compare one token further back each time.
            tail_B = jnp.take_along_axis(tokens_BxL, jnp.maximum(lengths_B - n, 0)[:, None], axis=1)
            shifted_BxL = jnp.roll(tokens_BxL, n - 1, axis=1)
            same_BxL &= (shifted_BxL == tail_B) & (slot_L >= n - 1)
            earlier_BxL = same_BxL & (slot_L < lengths_B[:, None] - 1)
            end_B = jnp.max(jnp.where(earlier_BxL, slot_L, -1), axis=1)
            if n >= self.shortest:
                best_B = jnp.where(end_B >= 0, end_B, best_B)  # a longer match wins
        from_BxN = best_B[:, None] + 1 + jnp.arange(self.lookahead)
        live_BxN = (best_B[:, None] >= 0) & (from_BxN < lengths_B[:, None])
        tokens_BxN = jnp.take_along_axis(tokens_BxL, jnp.where(live_BxN, from_BxN, 0), axis=1)
        return Proposal(tokens_BxN=tokens_BxN, live_BxN=live_BxN, rule="chosen"), state, random

    def commit(self, state, proposal, verdict, reading=None):
        return state
