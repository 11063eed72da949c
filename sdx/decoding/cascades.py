"""Several drafters: each level's model verifies what the level below drafts (FixedLengthGen,
ThresholdGen).

    target            verifies k_3 or more tokens that follow model 2's law exactly
      |  calls until it holds k_3
    model 2           verifies k_2 tokens of model 1, emits accepted ones and one of its own
      |  calls until it holds k_2
    model 1           one token per call: a chain (or a tree)

Because every level is lossless, its tokens are draws from its own model's law, and that law is what
the level above tests against. Whether a level goes on depends on tokens already emitted only, never
on the next one. Legend: base.py; N tokens that a level may hold.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sdx.decoding.base import Drafter, Proposal, Sequence, Target
from sdx.decoding.chains import LAG, read_prompt
from sdx.decoding.confidence import Calibration, Uncalibrated
from sdx.decoding.llama_target import kernels_of
from sdx.decoding.verify import append, commit_path, emitted, judge, read_proposal
from sdx.records import Sampling, record, static


@record
class CascadeDrafter:
    """One level: `model` verifies the proposals of `below` until it holds `length` tokens (it may
    overshoot), or, with a `threshold`, until the product of calibrated confidences of its tokens
    falls under it (the crossing call is kept) or `length` are held."""

    model: Target
    below: Drafter
    length: int = static(default=2)
    threshold: float = static(default=0.0)
    calibration: Calibration = static(default=Uncalibrated())

    branching = 1
    ragged = True

    @property
    def least(self) -> int:
        return 1 if self.threshold else self.length

    @property
    def height(self) -> int:
        return self.length + self.below.height

    @property
    def nodes(self) -> int:
        return self.height

    def prepare(self, sequence: Sequence, prompt_slots: int, capacity: int, reading=None):
        cache = read_prompt(self.model, sequence, prompt_slots, capacity)
        return cache, self.below.prepare(sequence, prompt_slots, capacity)

    def propose(self, state, sequence: Sequence, sampling: Sampling, random):
        B, N = sequence.lengths_B.shape[0], self.nodes
        cache, below = state
        V, greedy = self.model.vocab_size, sampling.temperature == 0
        start = {
            "sequence": sequence,
            "held": jnp.zeros((B,), jnp.int32),
            "product": jnp.ones((B,)),
            "laws": () if greedy else jnp.full((B, N, V), -jnp.inf),
            "confidence": jnp.zeros((B, N)),
            "cache": cache,
            "below": below,
            "random": random,
        }

        def wanting(at) -> jax.Array:
            return (at["held"] < self.length) & (at["product"] >= self.threshold)

        end = jax.lax.while_loop(
            lambda at: wanting(at).any(),
            lambda at: self._call(at, wanting(at), sampling),
            start,
        )
        slots_BxN = sequence.lengths_B[:, None] + jnp.arange(N)
        slots_BxN = jnp.minimum(slots_BxN, sequence.tokens_BxL.shape[1] - 1)
        proposal = Proposal(
            tokens_BxN=jnp.take_along_axis(end["sequence"].tokens_BxL, slots_BxN, axis=1),
            live_BxN=jnp.arange(N) < end["held"][:, None],
            log_q_BxRxV=None if greedy else end["laws"],
            confidence_BxN=end["confidence"] if self.threshold else None,
        )
        return proposal, (end["cache"], end["below"]), end["random"]

    def _call(self, at: dict[str, Any], active_B: jax.Array, sampling: Sampling) -> dict[str, Any]:
        """One round of this level: draft below, read, accept, commit."""
        sequence = at["sequence"]
        proposal, below, random = self.below.propose(at["below"], sequence, sampling, at["random"])
        cache = at["cache"].rollback(sequence.lengths_B - LAG)
        output = read_proposal(self.model, cache, sequence, proposal, lag=LAG)
        verdict, log_p_BxMxV, random = judge(
            output.logits_BxTxV, proposal, sampling, random, kernels_of(self.model)
        )
        tokens_BxQ = emitted(proposal, verdict)
        B, Q = tokens_BxQ.shape
        counts_B = jnp.where(active_B, verdict.accepted_B + 1, 0)
        # The law of the token after each accepted node is that node's row.
        rows_BxQ = jnp.pad(verdict.path_BxP, ((0, 0), (1, 0)))
        slots_BxQ = jnp.where(
            jnp.arange(Q) < counts_B[:, None], at["held"][:, None] + jnp.arange(Q), self.nodes
        )
        row_B = jnp.arange(B)[:, None]
        laws, product_B, confidence = at["laws"], at["product"], at["confidence"]
        if sampling.temperature > 0:
            laws = laws.at[row_B, slots_BxQ].set(log_p_BxMxV[row_B, rows_BxQ], mode="drop")
        if self.threshold:
            raw = jax.nn.softmax(output.logits_BxTxV.astype(jnp.float32), axis=-1)
            raw_BxQ = raw[row_B, rows_BxQ, tokens_BxQ]
            confidence = confidence.at[row_B, slots_BxQ].set(raw_BxQ, mode="drop")
            factor = jnp.where(jnp.arange(Q) < counts_B[:, None], self.calibration(raw_BxQ), 1.0)
            product_B = product_B * factor.prod(-1)
        return {
            "sequence": append(sequence, tokens_BxQ, counts_B),
            "held": at["held"] + counts_B,
            "product": product_B,
            "laws": laws,
            "confidence": confidence,
            "cache": commit_path(cache, output.fresh, verdict, LAG, verdict.accepted_B, active_B),
            "below": self.below.commit(below, proposal, verdict),
            "random": random,
        }

    def commit(self, state, proposal, verdict, reading=None):
        return state  # every level rolls back to its own length in the next round
