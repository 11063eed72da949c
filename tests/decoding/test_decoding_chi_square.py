"""A million samples of every policy on a ten-token model, with the runtime's own random keys.

The p-values are reported by `pytest -rP`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from enumeration import next_law, table
from optimised import OPTIMISED

from sdx.decoding.base import Sequence
from sdx.decoding.cascades import CascadeDrafter
from sdx.decoding.chains import ChainDrafter
from sdx.decoding.cross_vocabulary import CrossVocabulary
from sdx.decoding.ngram import NgramDrafter
from sdx.decoding.random import Keys
from sdx.decoding.thresholds import ThresholdDrafter
from sdx.decoding.trees import DynamicTreeDrafter, StaticTreeDrafter
from sdx.decoding.verify import emitted, judge, read_proposal
from sdx.records import Sampling

SIZE, ROWS, CHUNKS = 10, 62_500, 16
TARGET, DRAFT, MIDDLE = table(0, SIZE, 1.0), table(1, SIZE, 1.0), table(2, SIZE, 1.0)
SAMPLING = Sampling(temperature=0.8)  # filters: see the enumeration; here they only cost time
PROMPT = (3, 4, 7, 3, 4)
PARENTS = (-1, -1, 0, 1)
# The draft numbers its tokens the other way round and lacks two of the target's.
FOREIGN = CrossVocabulary(
    model=DRAFT,
    to_draft_V=jnp.arange(SIZE)[::-1],
    shared_V=jnp.arange(SIZE) % 5 != 2,
)


class Broken(StaticTreeDrafter):
    """Siblings without replacement, tested as if drawn with it."""

    def propose(self, state, sequence, sampling, random):
        proposal, *rest = super().propose(state, sequence, sampling, random)
        return type(proposal)(**{**proposal.__dict__, "rule": "replacement"}), *rest


DRAFTERS = {
    "chain": ChainDrafter(model=DRAFT, lookahead=2),
    "block": ChainDrafter(model=DRAFT, lookahead=2, rule="block"),
    "tree-replacement": StaticTreeDrafter(model=DRAFT, parents=PARENTS, children="replacement"),
    "tree-without-replacement": StaticTreeDrafter(model=DRAFT, parents=PARENTS),
    "tree-top": StaticTreeDrafter(model=DRAFT, parents=PARENTS, children="top"),
    "tree-dynamic": DynamicTreeDrafter(model=DRAFT, budget=4, depth=2, branching=2),
    "threshold-keep": ThresholdDrafter(model=DRAFT, threshold=0.1, max_lookahead=2),
    "threshold-drop": ThresholdDrafter(
        model=DRAFT, threshold=0.1, max_lookahead=2, crossing="drop"
    ),
    "ngram": NgramDrafter(lookahead=2),
    "cross-vocabulary": ChainDrafter(model=FOREIGN, lookahead=2),
    "cascade": CascadeDrafter(model=MIDDLE, below=ChainDrafter(model=DRAFT, lookahead=1), length=1),
    "cascade-threshold": CascadeDrafter(
        model=MIDDLE,
        below=ThresholdDrafter(model=DRAFT, threshold=0.1, max_lookahead=1),
        length=2,
        threshold=0.05,
    ),
    "cascade-tree": CascadeDrafter(
        model=MIDDLE, below=StaticTreeDrafter(model=DRAFT, parents=(-1, -1)), length=1
    ),
}


def p_value(drafter) -> float:
    """Of the first two tokens after the prompt; a row whose round emits one gets its second from
    the target's law."""
    size = len(PROMPT)
    following = jnp.asarray(next_law(TARGET, SAMPLING), jnp.float32)

    # Compiled once, run on a million rows.
    @functools.partial(jax.jit, compiler_options=OPTIMISED)
    def sample(key):
        random = Keys.of(key, ROWS)
        prompt = jnp.pad(jnp.array(PROMPT), (0, drafter.height + 4))
        sequence = Sequence(
            tokens_BxL=jnp.broadcast_to(prompt, (ROWS, prompt.size)),
            lengths_B=jnp.full((ROWS,), size),
        )
        cache = TARGET.empty_cache(ROWS, size + 4)
        fresh = TARGET(sequence.tokens_BxL[:, :size], cache).fresh
        every = jnp.broadcast_to(jnp.arange(size), (ROWS, size))
        cache = cache.commit(fresh, every, sequence.lengths_B - 1)
        state = drafter.prepare(sequence, size, size + 4)
        proposal, _, random = drafter.propose(state, sequence, SAMPLING, random)
        output = read_proposal(TARGET, cache, sequence, proposal, lag=1)
        verdict, _, random = judge(output.logits_BxTxV, proposal, SAMPLING, random)
        tokens = emitted(proposal, verdict)
        first = tokens[:, 0]
        extra, _ = random.draw(jnp.log(following[PROMPT[-1], first]))
        second = jnp.where(verdict.accepted_B > 0, tokens[:, 1], extra)
        return jnp.bincount(first * SIZE + second, length=SIZE * SIZE)

    counts = sum(np.asarray(sample(key)) for key in jax.random.split(jax.random.key(5), CHUNKS))
    P = next_law(TARGET, SAMPLING)
    law = (P[PROMPT[-2], PROMPT[-1]][:, None] * P[PROMPT[-1]]).ravel()
    assert counts.sum() == ROWS * CHUNKS >= 10**6
    expected = law / law.sum() * counts.sum()
    return float(scipy.stats.chisquare(counts, expected).pvalue)


@functools.lru_cache
def reported(policy: str) -> float:
    value = p_value(DRAFTERS[policy])
    print(f"chi-square, {policy}: p = {value:.3f}")
    return value


@pytest.mark.parametrize("policy", DRAFTERS)
def test_a_million_samples_follow_the_target(policy):
    assert reported(policy) > 1e-3


def test_a_broken_sampler_is_caught():
    assert p_value(Broken(model=DRAFT, parents=PARENTS)) < 1e-9
