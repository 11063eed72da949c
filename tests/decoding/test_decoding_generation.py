"""The door and the loop on a small random Llama: identity, stopping, keys, statistics, copies."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import NO_STOPS, table
from optimised import OPTIMISED

from sdx.decoding import loop
from sdx.decoding.generation import ENDLESS, generate, prepare, stream
from sdx.decoding.llama_target import as_target
from sdx.decoding.loop import begin
from sdx.decoding.ngram import NgramDrafter
from sdx.decoding.random import Keys
from sdx.decoding.trees import StaticTreeDrafter
from sdx.models.config import ModelConfig
from sdx.models.llama import Llama
from sdx.records import (
    Autoregressive,
    Cascade,
    Chain,
    DynamicTree,
    Sampling,
    StaticTree,
    ThresholdChain,
    record,
)

SHAPE = {"vocab_size": 64, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn_width": 64}
TREE = StaticTree(parents=(-1, -1, 0, 0, 1), children="top")
NEW = 24


@pytest.fixture(scope="module")
def models():
    """A target, a draft that often agrees with it (the same weights, disturbed), and a third."""
    config = ModelConfig(width=32, layers=2, max_positions=96, tie_embedding=True, **SHAPE)
    target = Llama(config, jax.random.key(0))
    leaves, tree = jax.tree.flatten(target)
    keys = jax.random.split(jax.random.key(1), len(leaves))

    def disturbed(scale):
        noisy = [
            x + scale * x.std() * jax.random.normal(k, x.shape)
            for x, k in zip(leaves, keys, strict=True)
        ]
        return as_target(jax.tree.unflatten(tree, noisy))

    return as_target(target), disturbed(0.2), disturbed(0.1)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, n).tolist() for n in (9, 1, 14)]


def drafter_of(policy, models):
    _, small, medium = models
    if isinstance(policy, Cascade):
        return [small, medium]
    return None if isinstance(policy, Autoregressive) else small


@pytest.fixture(scope="module")
def plain(models, prompts):
    return generate(models[0], None, prompts, max_new_tokens=NEW).tokens


POLICIES = {
    "chain": Chain(lookahead=3),
    "tree": TREE,
    "dynamic": DynamicTree(budget=6, depth=3, branching=2),
    "threshold": ThresholdChain(threshold=0.01, max_lookahead=4, crossing="drop"),
    "cascade": Cascade(lengths=(1, 2)),
    "cascade-threshold": Cascade(thresholds=(0.02, 0.01)),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_equals_autoregression_in_a_ragged_batch(policy, models, prompts, plain):
    policy = POLICIES[policy]
    result = generate(models[0], drafter_of(policy, models), prompts, policy, max_new_tokens=NEW)
    assert result.tokens == plain
    assert result.rounds < NEW - 1  # something was accepted
    counts = result.statistics
    assert int(counts.accepted_P.sum()) == int(counts.nodes_N.sum())
    assert (counts.accepted_P <= counts.drafted_P).all()


def test_ngram_drafts_need_no_model(models, prompts, plain):
    result = generate(models[0], NgramDrafter(lookahead=3), prompts, max_new_tokens=NEW)
    assert result.tokens == plain


def test_batch_composition_does_not_change_a_row(models, prompts, plain):
    alone = generate(models[0], models[1], prompts[2:], Chain(lookahead=3), max_new_tokens=NEW)
    assert alone.tokens[0] == plain[2]


def test_a_stop_id_inside_an_accepted_run_cuts_it(models, prompts, plain):
    stop = plain[0][7]
    first = plain[0].index(stop)
    for policy in (Autoregressive(), Chain(lookahead=3)):
        drafter = drafter_of(policy, models)
        cut = generate(models[0], drafter, prompts, policy, max_new_tokens=NEW, stop_ids=[stop, 63])
        for row, whole in zip(cut.tokens, plain, strict=True):
            ends = [i for i, token in enumerate(whole) if token in (stop, 63)]
            assert row == whole[: ends[0] + 1 if ends else NEW]
        assert len(cut.tokens[0]) <= first + 1


@pytest.mark.parametrize("new", [1, 2, 5])
def test_the_length_is_never_overrun(new, models, prompts, plain):
    result = generate(models[0], models[1], prompts, Chain(lookahead=3), max_new_tokens=new)
    assert result.tokens == [row[:new] for row in plain]


def test_streaming_yields_what_generate_returns(models, prompts):
    request = (models[0], models[1], prompts, Chain(lookahead=3), Sampling(temperature=1.0), NEW, 7)
    pieces = list(stream(*request))
    assert len(pieces) > 3
    joined = [sum(rows, []) for rows in zip(*pieces, strict=True)]
    assert joined == generate(*request).tokens


def test_the_same_seed_gives_the_same_text(models, prompts):
    def text(key):
        sampled = Sampling(temperature=1.0, top_p=0.95)
        return generate(models[0], models[1], prompts, Chain(lookahead=3), sampled, NEW, key).tokens

    assert text(3) == text(3) != text(4)


def test_no_key_is_used_twice():
    """Every key that a whole run consumes, reported from inside the compiled loop."""
    used = []

    @record
    class Recording(Keys):
        def _next(self):
            keys, source = Keys._next(self)
            jax.debug.callback(
                lambda x: used.extend(map(tuple, x.tolist())), jax.random.key_data(keys)
            )
            return keys, Recording(keys_B=source.keys_B, count=source.count)

    target, sampling = table(0, 5), Sampling(temperature=1.0)
    drafter = StaticTreeDrafter(model=table(1, 5), parents=(-1, -1, 0))
    random = Keys.of(jax.random.key(0), 2)
    random = Recording(keys_B=random.keys_B, count=random.count)
    prompts, lengths, limits = jnp.array([[1, 2], [3, 0]]), jnp.array([2, 1]), jnp.array([12, 12])
    state = begin(
        target, drafter, prompts, lengths, limits, NO_STOPS, random, sampling=sampling, capacity=12
    )
    rounds = int(loop.run(target, drafter, NO_STOPS, state, ENDLESS, sampling=sampling).rounds)
    jax.effects_barrier()
    # Per row: the first token; then in each round two levels of draws (the first has two), two
    # tests at each of two depths, and the final draw.
    assert len(used) == 2 * (1 + rounds * (3 + 4 + 1)) and rounds > 3
    assert max(collections.Counter(used).values()) == 1


def test_statistics_add_up(models, prompts):
    result = generate(models[0], models[1], prompts, TREE, max_new_tokens=NEW)
    counts = result.statistics
    assert (counts.taken_PxK.sum(1) == counts.accepted_P).all()
    assert (counts.taken_PxK <= counts.offered_PxK).all()
    assert int(counts.offered_PxK[0, 0]) == int(counts.rounds_B.sum())
    record = result.measurement()
    assert record.tokens == 3 * (NEW - 1) and record.rounds == int(counts.rounds_B.sum())
    confident = generate(
        models[0], models[1], prompts, ThresholdChain(threshold=1e-3), max_new_tokens=NEW
    ).statistics
    assert int(confident.passed_C.sum()) == int(confident.accepted_P.sum())
    assert int(confident.tested_C.sum()) >= int(confident.passed_C.sum())


@pytest.mark.parametrize(
    "policy",
    [Autoregressive(), Chain(lookahead=2), TREE, POLICIES["threshold"], POLICIES["cascade"]],
    ids=lambda p: type(p).__name__,
)
def test_the_loop_copies_no_cache(policy, models, prompts):
    """The compiled loop holds no copy of the size of a cache."""
    drafter = drafter_of(policy, models)
    job = prepare(models[0], drafter, prompts, policy, Sampling(), NEW, 0, ())
    state = jax.eval_shape(job.start)
    text = loop.advance.lower(
        job.target, job.drafter, job.stops_E, state, ENDLESS, sampling=job.sampling
    ).compile(OPTIMISED)
    sizes = {int(np.prod(x.shape)) for x in jax.tree.leaves(state.cache) if x.ndim == 4}
    found = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|copy-start|transpose)\(", text.as_text())
    copied = {int(np.prod(list(map(int, shape.split(","))))) for shape in found}
    assert sizes and not sizes & copied


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompts": [[64]]}, "token id 64 is outside"),
        ({"prompts": [[-1]]}, "token id -1 is outside"),
        ({"prompts": []}, "at least one token"),
        ({"prompts": [[1] * 80]}, "exceed the 96 positions"),
        ({"sampling": Sampling(temperature=-1.0)}, "temperature = -1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"drafter": None}, "needs a draft model"),
        ({"policy": Chain(lookahead=1.5)}, "lookahead = 1.5"),
        ({"policy": StaticTree(parents=(0,))}, r"parents\[0\] = 0"),
        ({"policy": Cascade(lengths=(1,), thresholds=(0.5,))}, "either lengths or thresholds"),
        ({"policy": ThresholdChain(threshold=0.0)}, "threshold = 0.0"),
        ({"drafter": table(0, 3)}, "the draft model has 3 tokens, the target 64"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_requests_are_refused(change, message, models):
    request = {"drafter": models[1], "prompts": [[1, 2]], "policy": Chain(lookahead=2)}
    with pytest.raises(ValueError, match=message):
        generate(models[0], **{**request, "max_new_tokens": 24, **change})
