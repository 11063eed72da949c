"""The runtime under the stopwatch: step times and acceptance, as records that theory reads.

    target's round without drafting  --> StepTable (tokens per step x context)
    draft's rounds without a target  --> StepTable, and what a round costs beside its steps
    decoded prompts                  --> Measurement per lookahead (counts)

Every time is taken inside the runtime's own compiled loop, over many rounds of one call: a step in
isolation is cheaper (no accept, no commit, warm caches) and would flatter the prediction.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdx.decoding import generation, loop
from sdx.decoding.base import Proposal
from sdx.decoding.base import Sequence as Tokens
from sdx.decoding.chains import ChainDrafter
from sdx.decoding.heads import HeadModel
from sdx.decoding.llama_target import as_target
from sdx.decoding.random import Keys
from sdx.decoding.statistics import Statistics
from sdx.records import Autoregressive, Chain, Measurement, Policy, Sampling, record, static
from sdx.theory.hardware import StepTable, step_table

Progress = Callable[[str], None]
Timer = Callable[[], float]


def silent(message: str) -> None:
    """Reports nothing."""


def built(builders: Mapping[Any, Callable[[], Any]], report: Progress) -> dict[Any, Any]:
    """Every builder's result. In threads: compiling keeps one core busy and holds no lock."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {key: pool.submit(builder) for key, builder in builders.items()}
        results = {}
        for key, future in futures.items():
            results[key] = future.result()
            report(f"compiled {key}")
    return results


# ------------------------------------------------------------------ parts of a round, alone


@record
class FixedDrafter:
    """Proposes one token `lookahead` times, at no cost: leaves the target's side of a round."""

    lookahead: int = static(default=0)

    branching = 1
    ragged = False

    @property
    def height(self) -> int:
        return self.lookahead

    @property
    def nodes(self) -> int:
        return self.lookahead

    def prepare(self, sequence, prompt_slots, capacity, reading=None):
        return ()

    def propose(self, state, sequence: Tokens, sampling, random):
        B = sequence.lengths_B.shape[0]
        tokens_BxN = jnp.zeros((B, self.lookahead), jnp.int32)
        live_BxN = jnp.ones((B, self.lookahead), bool)
        return Proposal(tokens_BxN=tokens_BxN, live_BxN=live_BxN, rule="chosen"), state, random

    def commit(self, state, proposal, verdict, reading=None):
        return state


@record
class NoCache:
    """Lengths and nothing else."""

    lengths_B: jax.Array

    def commit(self, fresh, path_BxP, counts_B):
        return NoCache(lengths_B=self.lengths_B + counts_B)

    def rollback(self, lengths_B):
        return NoCache(lengths_B=lengths_B)


@record
class NoReading:
    """Logits of a `NoTarget`, and features for draft heads; nothing to commit."""

    logits_BxTxV: jax.Array
    hidden_BxTxD: jax.Array
    layers: tuple[jax.Array, ...]
    fresh: None = None


@record
class NoTarget:
    """Answers without reading: leaves the draft's side of a round. width, depth: of the features
    that a draft head takes, and how many layers it may take them from."""

    vocab_size: int = static(default=2)
    width: int = static(default=1)
    depth: int = static(default=0)

    @classmethod
    def of_draft(cls, model: Any) -> NoTarget:
        """A target for this draft model or head."""
        if not isinstance(model, HeadModel):
            return cls(vocab_size=model.vocab_size)
        config = model.head.config
        depth = max(config.feature_layers, default=0)
        return cls(vocab_size=config.vocab_size, width=config.width, depth=depth)

    def empty_cache(self, batch: int, capacity: int) -> NoCache:
        return NoCache(lengths_B=jnp.zeros((batch,), jnp.int32))

    def __call__(self, tokens_BxT, cache, mask=None, positions=None, pending=None, last=None):
        B, T = tokens_BxT.shape
        hidden_BxTxD = jnp.zeros((B, T, self.width))
        return NoReading(
            logits_BxTxV=jnp.zeros((B, last or T, self.vocab_size)),
            hidden_BxTxD=hidden_BxTxD,
            layers=(hidden_BxTxD,) * self.depth,
        )


def round_timer(
    target: Any, drafter: Any, *, context: int, capacity: int, batch: int = 1, rounds: int = 32
) -> Timer:
    """A function that runs `rounds` rounds of the compiled loop and returns seconds per round,
    the call itself (a loop of no rounds) not counted.

    Every call starts at `context` tokens of history in caches of `capacity` slots. Compiled and
    run once before it is returned.
    """
    room = 1 + rounds * (drafter.height + 1)
    if context + room > capacity:
        rounds = (capacity - context - 1) // (drafter.height + 1)
    if rounds < 1 or context < 2:
        raise ValueError(
            f"context {context} and lookahead {drafter.height} leave no room for a round in "
            f"{capacity} cache slots: 2 <= context <= {capacity - drafter.height - 2}"
        )
    stops_E = jnp.zeros((0,), jnp.int32)
    # A compiled program of its own, or every rewinding would cost a handful of dispatches.
    rewind = jax.jit(_rewound, static_argnames=("context",), donate_argnames=("state",))
    state = _idle_state(target, drafter, batch, context, capacity)

    def timed(count: int) -> float:
        nonlocal state
        state = jax.block_until_ready(rewind(state, context=context))
        begun = time.perf_counter()
        state = loop.advance(target, drafter, stops_E, state, np.int32(count), sampling=Sampling())
        jax.block_until_ready(state)
        return time.perf_counter() - begun

    call = math.inf

    def run() -> float:
        nonlocal call
        # Timers take turns: the first rounds of a turn fetch the weights from memory that decoding,
        # which does nothing else, finds in the cache. And a call costs as much as a small round:
        # its shortest time is taken off, for what disturbs a call only lengthens it.
        timed(rounds)
        call = min(call, timed(0))
        seconds = timed(rounds)
        # A disturbed call can seem longer than the rounds of a tiny model: never more than half.
        return max(seconds - call, seconds / 2) / rounds

    run()
    return run


def _idle_state(target, drafter, batch: int, context: int, capacity: int) -> loop.State:
    """A state in mid-decoding whose history was never read: zeros in the caches."""
    lengths_B = jnp.full((batch,), context, jnp.int32)
    sequence = Tokens(tokens_BxL=jnp.zeros((batch, capacity), jnp.int32), lengths_B=lengths_B)

    @jax.jit
    def prepare(sequence):
        reading = target(sequence.tokens_BxL[:, :1], target.empty_cache(batch, 1))
        return drafter.prepare(sequence, 1, capacity, reading)

    return loop.State(
        sequence=sequence,
        limits_B=jnp.full((batch,), 2**30, jnp.int32),
        finished_B=jnp.zeros((batch,), bool),
        cache=target.empty_cache(batch, capacity),
        draft=prepare(sequence),
        random=Keys.of(jax.random.key(0), batch),
        statistics=Statistics.zeros(batch, drafter.height, drafter.branching, drafter.nodes),
        rounds=jnp.int32(0),
    )


def _rewound(state: loop.State, context: int) -> loop.State:
    """Back to `context` tokens. A rollback is a length: it may lengthen a cache of zeros too."""
    lengths_B = jnp.full_like(state.sequence.lengths_B, context)
    sequence = Tokens(tokens_BxL=state.sequence.tokens_BxL, lengths_B=lengths_B)
    cache = state.cache.rollback(lengths_B - 1)
    return dataclasses.replace(state, sequence=sequence, cache=cache, rounds=jnp.int32(0))


def interleaved(
    timers: Mapping[Any, Timer], repeats: int, report: Progress = silent
) -> dict[Any, np.ndarray]:
    """`repeats` samples of every timer, taken in turns so that a slow minute hits all alike."""
    samples = {key: [] for key in timers}
    for turn in range(repeats):
        for key, timer in timers.items():
            samples[key].append(timer())
        report(f"timing, turn {turn + 1} of {repeats}")
    return {key: np.asarray(values) for key, values in samples.items()}


# ------------------------------------------------------------------------------ step tables


@record
class DraftTimes:
    """A draft's side of a round: `rounds[i]` seconds to draft `lookaheads[i]` tokens.

    Affine by construction of a chain; `table` holds the slope as the one-token step, `extra` the
    intercept (the first pass reads two tokens), `residual` the largest relative misfit.
    """

    table: StepTable
    extra_seconds: float
    lookaheads: tuple[int, ...] = static(default=())
    rounds: tuple[float, ...] = static(default=())

    @property
    def residual(self) -> float:
        step = float(np.asarray(self.table.seconds).ravel()[0])
        fitted = self.extra_seconds + step * np.asarray(self.lookaheads)
        return float(np.abs(fitted / np.asarray(self.rounds) - 1).max())


def target_timers(
    model: Any,
    new_tokens: Iterable[int],
    contexts: Iterable[int],
    batches: Iterable[int] = (1,),
    *,
    capacity: int | None = None,
    rounds: int = 32,
    report: Progress = silent,
) -> dict[tuple[int, int, int], Timer]:
    """A timer per (batch, new_tokens, context): the whole round but for the drafting.

    new_tokens = 1 is a step of autoregression, gamma + 1 the verification of gamma drafts.
    `capacity`: slots of the caches (attention may read them all); None fits each context tightly.
    """
    model, builders = as_target(model), {}
    for key in itertools.product(batches, new_tokens, contexts):
        batch, tokens, context = key
        builders[key] = functools.partial(
            round_timer,
            model,
            FixedDrafter(lookahead=tokens - 1),
            context=context,
            capacity=capacity or _slots(context + 1 + rounds * tokens),
            batch=batch,
            rounds=rounds,
        )
    return built(builders, report)


def _slots(length: int) -> int:
    return -(-length // generation.SLOTS) * generation.SLOTS


def draft_timers(
    model: Any,
    lookaheads: Iterable[int],
    context: int,
    *,
    capacity: int,
    batch: int = 1,
    rounds: int = 32,
    report: Progress = silent,
) -> dict[int, Timer]:
    """A timer per lookahead: the draft's side of a round, against a target that costs nothing.
    model: a draft model, or a draft head bound to its target (`decoding.heads.bind`)."""
    model, builders = as_target(model), {}
    for lookahead in lookaheads:
        builders[lookahead] = functools.partial(
            round_timer,
            NoTarget.of_draft(model),
            ChainDrafter(model=model, lookahead=lookahead),
            context=context,
            capacity=capacity,
            batch=batch,
            rounds=rounds,
        )
    return built(builders, report)


def table_of_medians(samples: Mapping[tuple[int, int, int], np.ndarray], name: str) -> StepTable:
    """The StepTable of `interleaved` samples keyed by (batch, new_tokens, context)."""
    axes = [sorted({key[i] for key in samples}) for i in range(3)]
    seconds = np.empty([len(axis) for axis in axes])
    for key, values in samples.items():
        place = tuple(axis.index(x) for axis, x in zip(axes, key, strict=True))
        seconds[place] = np.median(values)
    return step_table(*axes, seconds, model=name, name=f"measured {name}")


def draft_times(
    samples: Mapping[int, np.ndarray], name: str, context: int, batch: int = 1
) -> DraftTimes:
    """Slope and intercept of the medians of `draft_timers` samples over the lookahead."""
    lookaheads = np.asarray(sorted(samples), float)
    if lookaheads.size < 2:
        raise ValueError("a draft's step time is a slope: time it at two lookaheads or more")
    seconds = np.asarray([np.median(samples[int(k)]) for k in lookaheads])
    # Relative residuals: the longest rounds must not decide alone.
    matrix = np.stack([lookaheads, np.ones_like(lookaheads)], 1) / seconds[:, None]
    step, extra = np.linalg.lstsq(matrix, np.ones_like(seconds))[0]
    return DraftTimes(
        table=step_table([batch], [1], [context], [[[step]]], model=name, name=f"measured {name}"),
        extra_seconds=float(extra),
        lookaheads=tuple(int(k) for k in lookaheads),
        rounds=tuple(seconds.tolist()),
    )


# ------------------------------------------------------------------------------ decoding


def decode(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    policies: Mapping[Any, tuple[Policy, Any]] | Sequence[Policy],
    *,
    max_new_tokens: int = 128,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    key: int = 0,
    repeats: int = 1,
    between: Callable[[], None] | None = None,
    report: Progress = silent,
) -> dict[Any, list[list[generation.Generation]]]:
    """Every policy on every prompt, batch 1: result[policy][prompt][repeat].

    policies: a sequence (all with `draft`), or a mapping of a label to (policy, its draft).
    Prompt by prompt all policies take their turn, so that a comparison is paired and a slow minute
    of the machine hits all alike. Each policy is compiled before anything is timed. `between` is
    called after every prompt (to take other samples under the same conditions).
    """
    if not isinstance(policies, Mapping):
        policies = {policy: (policy, draft) for policy in policies}
    # Laid out for small steps once, not per call.
    target = as_target(target)
    wrapped = {id(model): as_target(model) for _, model in policies.values() if model is not None}

    def once(label, prompt):
        policy, model = policies[label]
        model = None if isinstance(policy, Autoregressive) else wrapped[id(model)]
        return generation.generate(
            target, model, [prompt], policy, sampling, max_new_tokens, key, stop_ids=()
        )

    built({label: functools.partial(once, label, prompts[0]) for label in policies}, report)
    results = {label: [[] for _ in prompts] for label in policies}
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            for label in policies:
                results[label][number].append(once(label, prompt))
            if between is not None:
                between()
            report(f"decoded prompt {number + 1} of {len(prompts)}, turn {repeat + 1}")
    return results


def pooled(measurements: Iterable[Measurement]) -> Measurement:
    """The sum of measurements of one policy."""
    measurements = list(measurements)
    first = measurements[0]
    for other in measurements[1:]:
        if (other.policy, other.sampling, other.batch) != (
            first.policy,
            first.sampling,
            first.batch,
        ):
            raise ValueError("pooled measurements must share policy, sampling and batch")

    def total(name):
        values = np.asarray([np.asarray(getattr(m, name), float) for m in measurements])
        return values.sum(0).tolist()

    return dataclasses.replace(
        first,
        rounds=total("rounds"),
        tokens=total("tokens"),
        seconds=total("seconds"),
        drafted_per_position=tuple(total("drafted_per_position")),
        accepted_per_position=tuple(total("accepted_per_position")),
    )


def measure_acceptance(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    lookaheads: Iterable[int] = range(1, 10),
    *,
    max_new_tokens: int = 128,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    key: int = 0,
    report: Progress = silent,
) -> dict[int, list[Measurement]]:
    """Chains of every lookahead over the prompts: lookahead -> one Measurement per prompt."""
    policies = {gamma: (Chain(lookahead=gamma), draft) for gamma in lookaheads}
    runs = decode(
        target,
        draft,
        prompts,
        policies,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=key,
        report=report,
    )
    return {gamma: [r[0].measurement() for r in runs[gamma]] for gamma in runs}
