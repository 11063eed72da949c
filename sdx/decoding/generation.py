"""The door of the runtime: validate once, then call the pure core.

    result = generate(target, draft, prompts, Chain(lookahead=3), Sampling(temperature=0.0),
                      max_new_tokens=128, key=0)
    result.tokens[0]                 # new token ids of the first prompt
    result.statistics.accepted_P     # accepted drafts per position

The first call with a new policy, sampling, batch or size compiles; `seconds` of that call includes
it. Call once to warm up before timing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdx.decoding.llama_target import as_target, with_kernels
from sdx.decoding.loop import State, advance, start
from sdx.decoding.policies import build_drafter, whole
from sdx.decoding.random import Keys
from sdx.decoding.sampling import check_sampling
from sdx.decoding.statistics import Statistics
from sdx.records import Autoregressive, Measurement, Policy, Sampling, record, static

SLOTS = 32  # prompts and caches come in multiples of this, so that lengths share compilations
ENDLESS = np.int32(2**31 - 1)


@record
class Generation:
    """What `generate` returns.

    tokens: new ids per prompt, a stop id included. prompt_seconds: reading the prompts (first
    token included); seconds: the decoding after it. rounds: target passes after the prompt's.
    """

    tokens: list[list[int]]
    statistics: Statistics
    rounds: int
    prompt_seconds: float
    seconds: float
    policy: Policy
    sampling: Sampling = static(default_factory=Sampling)

    def measurement(self, note: str = "") -> Measurement:
        """The counts as the record that `calibration` and `theory` exchange: tokens and seconds
        of the rounds, the prompts' pass and its tokens left out."""
        counts = self.statistics
        return Measurement(
            rounds=int(counts.rounds_B.sum()),
            tokens=sum(map(len, self.tokens)) - len(self.tokens),
            seconds=self.seconds,
            drafted_per_position=tuple(counts.drafted_P.tolist()),
            accepted_per_position=tuple(counts.accepted_P.tolist()),
            policy=self.policy,
            sampling=self.sampling,
            batch=len(self.tokens),
            note=note,
        )


@record
class Job:
    """A validated request, ready for the compiled core."""

    target: Any
    drafter: Any
    prompts_BxS: jax.Array
    prompt_lengths_B: jax.Array
    limits_B: jax.Array
    stops_E: jax.Array
    random: Keys
    sampling: Sampling
    capacity: int

    def start(self) -> State:
        """Reads the prompts, emits the first tokens."""
        return start(
            self.target,
            self.drafter,
            self.prompts_BxS,
            self.prompt_lengths_B,
            self.limits_B,
            self.stops_E,
            self.random,
            sampling=self.sampling,
            capacity=self.capacity,
        )

    def advance(self, state: State, until: int = ENDLESS) -> State:
        """Rounds until all rows are finished or `until` rounds are done. Consumes `state`."""
        return advance(
            self.target, self.drafter, self.stops_E, state, np.int32(until), sampling=self.sampling
        )


def prepare(
    target: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    policy: Policy,
    sampling: Sampling,
    max_new_tokens: int,
    key: jax.Array | int,
    stop_ids: Sequence[int] | None,
    kernels: str = "auto",
) -> Job:
    """Checks a request and lays it out. Raises ValueError naming what is wrong."""
    target = as_target(target)
    check_sampling(sampling)
    max_new_tokens = whole("max_new_tokens", max_new_tokens, 1)
    if not hasattr(drafter, "propose"):
        drafter = build_drafter(policy, drafter, target=target)
    if kernels != "auto":  # else each model keeps its own
        target, drafter = with_kernels(target, kernels), with_kernels(drafter, kernels)
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise ValueError("every prompt needs at least one token, and there must be a prompt")
    longest = max(lengths)
    for name, model in (("target", target), *models_of(drafter)):
        room = getattr(model, "max_positions", ENDLESS)
        if longest + max_new_tokens > room:
            raise ValueError(
                f"prompt of {longest} tokens + max_new_tokens {max_new_tokens} exceed the {room} "
                f"positions of the {name} model: shorten the prompt or the generation"
            )
        if model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the {name} model has {model.vocab_size} tokens, the target {target.vocab_size}: "
                "wrap it in CrossVocabulary"
            )
    slots = -(-longest // SLOTS) * SLOTS
    block = np.zeros((len(prompts), slots), np.int32)
    for row, prompt in zip(block, prompts, strict=True):
        row[: len(prompt)] = prompt
    if block.min() < 0 or block.max() >= target.vocab_size:
        bad = int(block.min() if block.min() < 0 else block.max())
        raise ValueError(f"token id {bad} is outside the vocabulary of {target.vocab_size}")
    if stop_ids is None:
        stop_ids = getattr(target, "stop_ids", ())
    capacity = -(-(longest + max_new_tokens) // SLOTS) * SLOTS
    key = jax.random.key(key) if isinstance(key, int) else key
    return Job(
        target=target,
        drafter=drafter,
        prompts_BxS=jnp.asarray(block),
        prompt_lengths_B=jnp.asarray(lengths, jnp.int32),
        limits_B=jnp.asarray(lengths, jnp.int32) + max_new_tokens,
        stops_E=jnp.asarray(list(stop_ids), jnp.int32),
        random=Keys.of(key, len(prompts)),
        sampling=sampling,
        capacity=min(capacity, getattr(target, "max_positions", capacity)),
    )


def models_of(drafter: Any) -> list[tuple[str, Any]]:
    """The draft models inside a drafter, with a name for messages."""
    found = []
    if hasattr(drafter, "model"):
        found.append(("draft", drafter.model))
    if hasattr(drafter, "below"):
        found += models_of(drafter.below)
    return found


def generate(
    target: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    policy: Policy = Autoregressive(),  # noqa: B008 (frozen)
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    max_new_tokens: int = 128,
    key: jax.Array | int = 0,
    stop_ids: Sequence[int] | None = None,
    kernels: str = "auto",
) -> Generation:
    """Decodes a batch of prompts; the output law is the target's, whatever the policy.

    target: a Llama or any `Target`. drafter: a draft model or a draft head for the policy
    (`build_drafter`), a ready `Drafter`, or None for autoregression. prompts: token ids, lengths
    may differ. stop_ids: ids that end a row (kept in the output); None is the model's own, () is
    none.
    kernels: "auto" (the platform's best), "reference", "triton" or "tpu", for attention, cache
    writes and verification alike; where a kernel cannot be compiled it is interpreted (slow).

    Raises ValueError on bad input: ids outside the vocabulary, prompts and generation beyond the
    model's positions, a policy without its drafter, temperature < 0.
    """
    job = prepare(
        target, drafter, prompts, policy, sampling, max_new_tokens, key, stop_ids, kernels
    )
    begun = time.perf_counter()
    state = jax.block_until_ready(job.start())
    read = time.perf_counter()
    state = jax.block_until_ready(job.advance(state))
    done = time.perf_counter()
    return Generation(
        tokens=new_tokens(job, state),
        statistics=jax.tree.map(np.asarray, state.statistics),
        rounds=int(state.rounds),
        prompt_seconds=read - begun,
        seconds=done - read,
        policy=policy,
        sampling=sampling,
    )


def stream(
    target: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    policy: Policy = Autoregressive(),  # noqa: B008 (frozen)
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    max_new_tokens: int = 128,
    key: jax.Array | int = 0,
    stop_ids: Sequence[int] | None = None,
    rounds: int = 1,
    kernels: str = "auto",
) -> Iterator[list[list[int]]]:
    """Like `generate`, but yields the newly decided tokens of every prompt, first after the
    prompts were read and then after every `rounds` rounds. Joined, they are `generate`'s tokens
    for the same key."""
    rounds = whole("rounds", rounds, 1)
    job = prepare(
        target, drafter, prompts, policy, sampling, max_new_tokens, key, stop_ids, kernels
    )
    state, seen = job.start(), [0] * len(prompts)
    while True:
        tokens = new_tokens(job, state)
        yield [row[n:] for row, n in zip(tokens, seen, strict=True)]
        seen = [len(row) for row in tokens]
        if bool(state.finished_B.all()):
            return
        state = job.advance(state, int(state.rounds) + rounds)


def new_tokens(job: Job, state: State) -> list[list[int]]:
    """The decoded ids of every row, prompts left out."""
    tokens, lengths = map(np.asarray, (state.sequence.tokens_BxL, state.sequence.lengths_B))
    starts = np.asarray(job.prompt_lengths_B)
    return [
        row[begin:end].tolist() for row, begin, end in zip(tokens, starts, lengths, strict=True)
    ]
