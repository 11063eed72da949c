"""Single passes and single proposals, repeated inside one compiled loop: what a StepTable times.

A Python call costs tens of microseconds and a host sync per step more; inside the runtime's loop
neither exists, so they must not be in the measurement either.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdx.decoding.base import Drafter, Sequence
from sdx.decoding.llama_target import as_target
from sdx.decoding.random import Keys
from sdx.decoding.sampling import best_token
from sdx.decoding.verify import after
from sdx.records import Sampling


@functools.partial(jax.jit, static_argnames=("every_logit",), donate_argnames=("cache",))
def repeat_passes(
    model: Any, cache: Any, tokens_BxT: jax.Array, repeats: jax.Array, every_logit: bool = True
) -> tuple[jax.Array, Any]:
    """`repeats` passes over T tokens after the cache, each written and rolled back; each pass
    reads tokens that the one before chose, so that none can be skipped."""
    B, T = tokens_BxT.shape
    lengths_B, path_BxT = cache.lengths_B, jnp.broadcast_to(jnp.arange(T), (B, T))

    def once(_, carry):
        tokens_BxT, cache = carry
        output = model(tokens_BxT, cache, last=None if every_logit else 1)
        best = best_token(output.logits_BxTxV)
        counts_B = after(best[:, 0] >= 0, jnp.full((B,), T, jnp.int32))
        cache = cache.commit(output.fresh, path_BxT, counts_B).rollback(lengths_B)
        return jnp.broadcast_to(best, (B, T)), cache

    return jax.lax.fori_loop(0, repeats, once, (tokens_BxT, cache))


@functools.partial(jax.jit, static_argnames=("sampling",), donate_argnames=("state",))
def repeat_proposals(
    drafter: Drafter,
    state: Any,
    sequence: Sequence,
    random: Keys,
    repeats: jax.Array,
    sampling: Sampling,
) -> tuple[Any, Sequence]:
    """`repeats` proposals after the same context, each depending on the one before."""

    def once(_, carry):
        state, sequence, random = carry
        proposal, state, random = drafter.propose(state, sequence, sampling, random)
        row_B = jnp.arange(sequence.lengths_B.shape[0])
        tokens_BxL = sequence.tokens_BxL.at[row_B, sequence.lengths_B - 1].set(
            proposal.tokens_BxN[:, -1]
        )
        return state, Sequence(tokens_BxL=tokens_BxL, lengths_B=sequence.lengths_B), random

    state, sequence, _ = jax.lax.fori_loop(0, repeats, once, (state, sequence, random))
    return state, sequence


def pass_seconds(
    model: Any,
    batch: int,
    new_tokens: int,
    context: int,
    repeats: int = 30,
    trials: int = 5,
    every_logit: bool = True,
    capacity: int | None = None,
) -> np.ndarray:
    """Seconds of one pass of `new_tokens` per row after `context` cached tokens, one figure per
    trial (take the median; the spread is the machine's noise).

    every_logit: as in verification; False computes the last token's logits only, as a draft step
    does. capacity: slots of the cache, as the run to be predicted will have (attention on a CPU
    visits all of them); default context + new_tokens rounded up to 32.
    """
    model = as_target(model)
    capacity = capacity or -(-(context + new_tokens) // 32) * 32
    cache = model.empty_cache(batch, capacity).rollback(jnp.full((batch,), context, jnp.int32))
    tokens_BxT = jnp.ones((batch, new_tokens), jnp.int32)
    seconds = []
    for trial in range(trials + 1):
        count = jnp.int32(repeats if trial else 2)  # the first compiles and warms up
        begun = time.perf_counter()
        _, cache = jax.block_until_ready(
            repeat_passes(model, cache, tokens_BxT, count, every_logit=every_logit)
        )
        seconds.append((time.perf_counter() - begun) / repeats)
    return np.array(seconds[1:])
