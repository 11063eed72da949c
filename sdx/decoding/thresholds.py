"""Draft until the product of confidences falls under a threshold (ThresholdGen).

"keep" drafts the token that crosses and stops after it. "drop" leaves it out: the test then
depends on the token, so the draft law loses the mass of all tokens that would have failed
(DESIGN: dropped by a token-dependent test), and the token after a drop is drawn from what p has
beyond that law. Legend: base.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sdx.decoding.base import Proposal, Sequence, Target
from sdx.decoding.chains import read_and_write, read_prompt, read_tail, settle
from sdx.decoding.confidence import Calibration, Uncalibrated
from sdx.decoding.heads import HeadModel
from sdx.decoding.sampling import best_token, log_probabilities
from sdx.records import Sampling, record, static


@record
class ThresholdDrafter:
    """At most `max_lookahead` tokens; stops once the product of calibrated confidences is below
    `threshold`. The inner loop ends when all rows have stopped: what is not drafted costs nothing.
    """

    model: Target | HeadModel
    threshold: float = static(default=0.3)
    max_lookahead: int = static(default=8)
    crossing: str = static(default="keep")
    calibration: Calibration = static(default=Uncalibrated())

    branching = 1

    @property
    def ragged(self) -> bool:
        return not isinstance(self.model, HeadModel)  # a head needs the features of all rows

    @property
    def least(self) -> int:
        return 0 if self.crossing == "drop" or self.threshold > 1 else 1

    @property
    def height(self) -> int:
        return self.max_lookahead

    @property
    def nodes(self) -> int:
        return self.max_lookahead

    def prepare(self, sequence: Sequence, prompt_slots: int, capacity: int, reading=None):
        return read_prompt(self.model, sequence, prompt_slots, capacity, self.height, reading)

    def propose(self, state, sequence: Sequence, sampling: Sampling, random):
        B, N = sequence.lengths_B.shape[0], self.max_lookahead
        drop, greedy = self.crossing == "drop", sampling.temperature == 0
        logits_BxV, cache = read_tail(self.model, state, sequence)
        V = logits_BxV.shape[-1]
        laws = () if greedy else jnp.full((B, N, V), -jnp.inf)
        start = {
            "step": jnp.int32(0),
            "logits": logits_BxV,
            "cache": cache,
            "product": jnp.ones((B,)),
            "drafting": jnp.full((B,), self.threshold <= 1.0),
            "dropped": jnp.zeros((B,), bool),
            "tokens": jnp.zeros((B, N), jnp.int32),
            "live": jnp.zeros((B, N), bool),
            "confidence": jnp.zeros((B, N)),
            "laws": laws,
            "random": random,
        }

        def going(at):
            return (at["step"] < N) & at["drafting"].any()

        def draft(at):
            step, drafting_B, logits_BxV = at["step"], at["drafting"], at["logits"]
            random, laws = at["random"], at["laws"]
            raw_BxV = jax.nn.softmax(logits_BxV.astype(jnp.float32), axis=-1)
            # For every token, also those not drawn: the mass that the test lets through.
            passes_BxV = at["product"][:, None] * self.calibration(raw_BxV) >= self.threshold
            if greedy:
                token_B = best_token(logits_BxV)
            else:
                log_q_BxV = log_probabilities(logits_BxV, sampling)
                token_B, random = random.draw(
                    # One certain token for rows that have stopped: no decision, no law.
                    jnp.where(
                        drafting_B[:, None], log_q_BxV, jnp.log(jax.nn.one_hot(jnp.zeros(B), V))
                    )
                )
                stored_BxV = jnp.where(passes_BxV, log_q_BxV, -jnp.inf) if drop else log_q_BxV
                laws = laws.at[:, step].set(
                    jnp.where(drafting_B[:, None], stored_BxV, laws[:, step])
                )
            own = token_B[:, None]
            raw_B = jnp.take_along_axis(raw_BxV, own, axis=1)[:, 0]
            passes_B = jnp.take_along_axis(passes_BxV, own, axis=1)[:, 0]
            kept_B = drafting_B & passes_B if drop else drafting_B
            # The last draft is never read: the next round reads it if it was accepted.
            logits_BxV, cache = jax.lax.cond(
                (drafting_B & passes_B).any() & (step + 1 < N),
                lambda cache: read_and_write(self.model, cache, own),
                lambda cache: (logits_BxV, cache),
                at["cache"],
            )
            return {
                "step": step + 1,
                "logits": logits_BxV,
                "cache": cache,
                "product": jnp.where(
                    drafting_B, at["product"] * self.calibration(raw_B), at["product"]
                ),
                "drafting": drafting_B & passes_B,
                "dropped": at["dropped"] | (drafting_B & ~kept_B),
                "tokens": at["tokens"].at[:, step].set(jnp.where(kept_B, token_B, 0)),
                "live": at["live"].at[:, step].set(kept_B),
                "confidence": at["confidence"].at[:, step].set(raw_B),
                "laws": laws,
                "random": random,
            }

        end = jax.lax.while_loop(going, draft, start)
        proposal = Proposal(
            tokens_BxN=end["tokens"],
            live_BxN=end["live"],
            log_q_BxRxV=None if greedy else end["laws"],
            dropped_B=end["dropped"] if drop else None,
            confidence_BxN=end["confidence"],
        )
        return proposal, end["cache"], end["random"]

    def commit(self, state, proposal, verdict, reading=None):
        return settle(self.model, state, verdict, reading)
