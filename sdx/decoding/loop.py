"""The one loop: draft, read, accept, commit, until every row is finished.

`start` reads the prompts and emits the first token of every row; `advance` runs rounds in one
compiled `while_loop` whose state is donated, so caches are written in place. Rolling back is a
length; finished rows commit nothing. The loop knows no algorithm.
Legend: base.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from sdx.decoding.base import Drafter, Proposal, Sequence, Target
from sdx.decoding.llama_target import kernels_of
from sdx.decoding.random import RandomSource
from sdx.decoding.statistics import Statistics
from sdx.decoding.verify import append, commit_path, emitted, judge, read_live, read_proposal
from sdx.records import Sampling, record


@record
class State:
    """Everything that changes from round to round.

    limits_B: the length that a row must not exceed. `rounds`: target passes of the whole batch,
    the prompt's not counted.
    """

    sequence: Sequence
    limits_B: jax.Array
    finished_B: jax.Array
    cache: Any
    draft: Any
    random: RandomSource
    statistics: Statistics
    rounds: jax.Array


def cut(
    tokens_BxQ: jax.Array, counts_B: jax.Array, room_B: jax.Array, stops_E: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many of the emitted tokens stay, and whether the row ends: after the first stop id, or
    when no room is left, exactly where one-by-one decoding would end."""
    counts_B = jnp.minimum(counts_B, room_B)
    Q = tokens_BxQ.shape[1]
    stop_BxQ = (tokens_BxQ[..., None] == stops_E).any(-1) & (jnp.arange(Q) < counts_B[:, None])
    stopped_B = stop_BxQ.any(-1)
    counts_B = jnp.where(stopped_B, jnp.argmax(stop_BxQ, axis=-1) + 1, counts_B)
    return counts_B.astype(jnp.int32), stopped_B | (counts_B >= room_B)


def begin(
    target: Target,
    drafter: Drafter,
    prompts_BxS: jax.Array,
    prompt_lengths_B: jax.Array,
    limits_B: jax.Array,
    stops_E: jax.Array,
    random: RandomSource,
    *,
    sampling: Sampling,
    capacity: int,
) -> State:
    """Reads the prompts (row b: the first `prompt_lengths_B[b]` >= 1 of S slots) and emits the
    first token. `capacity`: slots of the target's cache. The token buffer has room for a round
    more, so that drafts may run past the end; what they write there is cut."""
    B, S = prompts_BxS.shape
    # Read against a cache of one dead slot: the prompt attends to itself only.
    output = target(prompts_BxS, target.empty_cache(B, 1))
    every_BxS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    cache = target.empty_cache(B, capacity).commit(output.fresh, every_BxS, prompt_lengths_B)
    at_Bx1x1 = (prompt_lengths_B - 1)[:, None, None]
    logits_Bx1xV = jnp.take_along_axis(output.logits_BxTxV, at_Bx1x1, axis=1)
    nothing = Proposal(
        tokens_BxN=jnp.zeros((B, 0), jnp.int32), live_BxN=jnp.zeros((B, 0), bool), rule="chosen"
    )
    verdict, _, random = judge(logits_Bx1xV, nothing, sampling, random, kernels_of(target))
    room_B = limits_B - prompt_lengths_B
    counts_B, finished_B = cut(verdict.token_B[:, None], jnp.ones_like(room_B), room_B, stops_E)
    slots = max(capacity, S) + drafter.height + 4
    tokens_BxL = jnp.pad(prompts_BxS, ((0, 0), (0, slots - S)))
    prompt = Sequence(tokens_BxL=tokens_BxL, lengths_B=prompt_lengths_B)
    sequence = append(prompt, verdict.token_B[:, None], counts_B)
    return State(
        sequence=sequence,
        limits_B=limits_B,
        finished_B=finished_B,
        cache=cache,
        draft=drafter.prepare(sequence, S, capacity, output),
        random=random,
        statistics=Statistics.zeros(B, drafter.height, drafter.branching, drafter.nodes),
        rounds=jnp.int32(0),
    )


def one_round(
    target: Target, drafter: Drafter, stops_E: jax.Array, state: State, *, sampling: Sampling
) -> State:
    """Draft -> read -> accept -> commit."""
    sequence, active_B = state.sequence, ~state.finished_B
    proposal, draft, random = drafter.propose(state.draft, sequence, sampling, state.random)
    # A finished row's drafts must not widen the pass.
    proposal = dataclasses.replace(proposal, live_BxN=proposal.live_BxN & active_B[:, None])
    if drafter.ragged:
        output = read_live(target, state.cache, sequence, proposal, lag=1, least=drafter.least)
    else:
        output = read_proposal(target, state.cache, sequence, proposal, lag=1)
    verdict, _, random = judge(output.logits_BxTxV, proposal, sampling, random, kernels_of(target))
    tokens_BxQ = emitted(proposal, verdict)
    room_B = state.limits_B - sequence.lengths_B
    counts_B, ended_B = cut(tokens_BxQ, verdict.accepted_B + 1, room_B, stops_E)
    counts_B = jnp.where(active_B, counts_B, 0)
    # The cache gets the last known token and all new ones but the newest.
    cache = commit_path(state.cache, output.fresh, verdict, 1, counts_B - 1, active_B)
    return State(
        sequence=append(sequence, tokens_BxQ, counts_B),
        limits_B=state.limits_B,
        finished_B=state.finished_B | ended_B,
        cache=cache,
        draft=drafter.commit(draft, proposal, verdict, output),
        random=random,
        statistics=state.statistics.add(proposal, verdict, active_B),
        rounds=state.rounds + 1,
    )


def run(
    target: Target,
    drafter: Drafter,
    stops_E: jax.Array,
    state: State,
    until: jax.Array,
    *,
    sampling: Sampling,
) -> State:
    """Rounds until every row is finished, or `until` rounds are done in all."""

    def going(state: State):
        return ~state.finished_B.all() & (state.rounds < until)

    step = functools.partial(one_round, target, drafter, stops_E, sampling=sampling)
    return jax.lax.while_loop(going, step, state)


start = jax.jit(begin, static_argnames=("sampling", "capacity"))
advance = jax.jit(run, static_argnames=("sampling",), donate_argnames=("state",))
