"""Draft heads at work: identity, what their caches hold, what is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import NO_STOPS, table

from sdx.decoding import loop
from sdx.decoding.chains import NoDrafter
from sdx.decoding.generation import generate
from sdx.decoding.heads import HeadModel, bind
from sdx.decoding.llama_target import LlamaTarget
from sdx.decoding.policies import build_drafter
from sdx.decoding.random import Keys
from sdx.models.config import ModelConfig
from sdx.models.heads import HeadConfig, create_head
from sdx.models.llama import Llama
from sdx.records import (
    Cascade,
    Chain,
    DynamicTree,
    Sampling,
    StaticTree,
    ThresholdChain,
)

TARGET = ModelConfig(
    vocab_size=7, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn_width=8, max_positions=64
)
HEADS = {
    "eagle": {"kind": "eagle", "layers": 2},
    "eagle3": {"kind": "eagle3", "kept": (1, 2, 5, 6)},
    "poss": {"kind": "poss", "specialists": 2, "positions_per_specialist": 1},
    "medusa": {"kind": "medusa", "steps": 3},
}
POLICIES = {
    "chain": Chain(lookahead=3),
    "static": StaticTree(parents=(-1, -1, 0, 0, 1, 2), children="top"),
    "dynamic": DynamicTree(budget=9, depth=3, branching=2),
}
SLOTS, CAPACITY, NEW = 24, 32, 16
PROMPTS = [[1, 2, 3, 1, 5], [4, 6]]


@pytest.fixture(scope="module")
def target():
    """A random Llama in which the last token counts most, so that a head can learn it by hand."""
    model = Llama(TARGET, jax.random.key(0))
    model.embedding_VxD[...] = 30 * model.embedding_VxD[...]
    for block in model.blocks:
        block.out_NxD[...] = 0.3 * block.out_NxD[...]
        block.down_FxD[...] = 0.3 * block.down_FxD[...]
    return LlamaTarget(model=model)


def make_head(name, config=TARGET):
    """Random weights; EAGLE and PosS pass the embedding on, which is most of the next feature."""
    head = create_head(HeadConfig.for_target(config, **HEADS[name]), jax.random.key(3))
    if name in ("eagle", "poss"):
        passing = jnp.concatenate([jnp.eye(config.width), jnp.zeros((config.width, config.width))])
        head.fc_2DxD[...] = passing + 0.1 * head.fc_2DxD[...]
        for block in head.blocks:
            block.out_NxD[...] = 0.3 * block.out_NxD[...]
            block.down_FxD[...] = 0.3 * block.down_FxD[...]
    if name == "medusa":
        for i, block in enumerate(head.blocks):
            block.weight_DxD[...] = jax.random.normal(jax.random.key(i), block.weight_DxD.shape)
    return head


class Run:
    """The compiled loop of one drafter: `start` at a text, `advance` to a round."""

    def __init__(self, target, drafter):
        self.parts = (target, drafter)
        begin = functools.partial(loop.begin, sampling=Sampling(), capacity=CAPACITY)
        self._begin = jax.jit(begin)
        state = jax.eval_shape(self._begin, *self._arguments(PROMPTS, NEW))
        lowered = loop.advance.lower(
            *self.parts, NO_STOPS, state, jnp.int32(0), sampling=Sampling()
        )
        self.compiled = lowered.compile()

    def _arguments(self, texts, new):
        block = np.zeros((len(texts), SLOTS), np.int32)
        for row, text in zip(block, texts, strict=True):
            row[: len(text)] = text
        lengths = jnp.asarray([len(text) for text in texts])
        random = Keys.of(jax.random.key(0), len(texts))
        return *self.parts, jnp.asarray(block), lengths, lengths + new, NO_STOPS, random

    def start(self, texts=PROMPTS, new=NEW):
        return self._begin(*self._arguments(texts, new))

    def advance(self, state, until=10**6):
        copied = jax.tree.map(jnp.copy, state)  # the compiled loop consumes its state
        return self.compiled(*self.parts, NO_STOPS, copied, jnp.int32(until))


def texts_of(state):
    lengths = np.asarray(state.sequence.lengths_B)
    tokens = np.asarray(state.sequence.tokens_BxL)
    return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]


@pytest.fixture(scope="module")
def plain(target):
    run = Run(target, NoDrafter())
    return texts_of(run.advance(run.start()))


@pytest.fixture(scope="module", params=[(h, p) for h in HEADS for p in POLICIES], ids="-".join)
def run(request, target):
    head, policy = request.param
    model = HeadModel(head=make_head(head), parts=target.model.parts())
    found = Run(target, build_drafter(POLICIES[policy], model))
    found.head = head
    return found


def test_greedy_equals_autoregression_in_a_ragged_batch(run, plain):
    end = run.advance(run.start())
    assert texts_of(end) == plain
    accepted_P = np.asarray(end.statistics.accepted_P)
    assert accepted_P.sum() > 0
    if run.head in ("eagle", "poss"):
        # Paths of every length were accepted, and rejected.
        assert (accepted_P > 0).all() and accepted_P[-1] < end.statistics.rounds_B.sum()


def test_after_rounds_a_head_knows_what_a_fresh_prompt_tells_it(run):
    """Texts of some rounds, read again as prompts: the same drafts, keys and features follow."""
    later = run.advance(run.start(), 2)
    texts = texts_of(later)
    fresh = run.start([text[:-1] for text in texts], NEW)  # its first token is the text's last
    assert texts_of(fresh) == texts
    a, b = run.advance(later, 3), run.advance(fresh, 1)
    assert texts_of(a) == texts_of(b)
    np.testing.assert_array_equal(a.draft.known_B, [len(text) - 1 for text in texts])
    np.testing.assert_array_equal(a.draft.known_B, b.draft.known_B)
    np.testing.assert_allclose(a.draft.hidden_BxD, b.draft.hidden_BxD, atol=1e-4)
    for row, known in enumerate(np.asarray(a.draft.known_B)):
        for x, y in zip(values_of(a), values_of(b), strict=True):
            np.testing.assert_allclose(x[row, :, :known], y[row, :, :known], atol=1e-4)
        count = len(texts_of(a)[row]) - 1 - known
        x, y = a.draft.features_BxQxF[row, :count], b.draft.features_BxQxF[row, :count]
        np.testing.assert_allclose(x, y, atol=1e-4)


def values_of(state):
    return state.draft.cache.values


def poisoned(state, dead_BxS, dead_BxQ):
    """The state with huge keys, values and features in these slots, and no own feature."""
    cache = state.draft.cache
    last = dead_BxS[:, None, None, :] if cache.slots_last else dead_BxS[:, None, :, None]
    cache = cache.replace(
        keys=tuple(jnp.where(last, 1e9, key) for key in cache.keys),
        values=tuple(jnp.where(dead_BxS[:, None, :, None], 1e9, v) for v in cache.values),
    )
    draft = dataclasses.replace(
        state.draft,
        cache=cache,
        features_BxQxF=jnp.where(dead_BxQ[..., None], 1e9, state.draft.features_BxQxF),
        hidden_BxD=jnp.full_like(state.draft.hidden_BxD, jnp.nan),
    )
    return dataclasses.replace(state, draft=draft)


def test_rejected_drafts_never_leak(run, plain):
    """What lies outside the accepted tokens' slots may be anything."""
    state = run.advance(run.start(), 3)
    known_B = state.draft.known_B[:, None]
    slots_S = jnp.arange(CAPACITY)
    count_B = state.sequence.lengths_B[:, None] - 1 - known_B
    dead_BxQ = jnp.arange(state.draft.features_BxQxF.shape[1]) >= count_B
    dead = poisoned(state, slots_S >= known_B, dead_BxQ)
    clean, dirty = run.advance(state, 5), run.advance(dead, 5)
    assert texts_of(clean) == texts_of(dirty)
    np.testing.assert_array_equal(clean.statistics.nodes_N, dirty.statistics.nodes_N)
    np.testing.assert_allclose(clean.draft.hidden_BxD, dirty.draft.hidden_BxD, atol=1e-5)
    # The test sees it: one live slot, or one live feature, changes the drafts.
    live = poisoned(state, slots_S == known_B - 1, dead_BxQ & False)
    if run.head == "medusa":
        live = poisoned(state, slots_S < 0 * known_B, dead_BxQ | True)
    clean, changed = run.advance(state, 4), run.advance(live, 4)
    assert float(jnp.abs(clean.draft.hidden_BxD - changed.draft.hidden_BxD).max()) > 1e-3
    assert texts_of(run.advance(live)) == plain  # lossless whatever the drafts are


def test_the_loop_copies_no_cache(run):
    state = run.start()
    caches = (state.cache, state.draft.cache)
    sizes = {int(np.prod(x.shape)) for x in jax.tree.leaves(caches) if x.ndim == 4}
    text = run.compiled.as_text()
    found = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|copy-start|transpose)\(", text)
    assert sizes and not sizes & {int(np.prod(list(map(int, x.split(","))))) for x in found}


# ---------------------------------------------------------------------------- the door


def test_generate_takes_a_head(target, plain):
    """Sampled from the same seed twice; thresholds too; block verification."""
    head = make_head("eagle3")
    result = generate(
        target, head, PROMPTS, ThresholdChain(threshold=0.05, max_lookahead=2), max_new_tokens=NEW
    )
    whole = [prompt + new for prompt, new in zip(PROMPTS, result.tokens, strict=True)]
    assert whole == plain
    assert int(result.statistics.passed_C.sum()) == int(result.statistics.accepted_P.sum())


@pytest.mark.parametrize(
    "head, policy, message",
    [
        ("medusa", Chain(lookahead=4), "4 drafts in a row from a head with 3 positions"),
        ("medusa", DynamicTree(budget=4, depth=4), "4 drafts in a row"),
        ("poss", ThresholdChain(), "a poss head has its own network per position"),
        ("eagle", Cascade(lengths=(1,)), "no place in a cascade"),
    ],
)
def test_what_a_head_cannot_draft_is_refused(head, policy, message, target):
    draft = [make_head(head)] if isinstance(policy, Cascade) else make_head(head)
    with pytest.raises(ValueError, match=message):
        generate(target, draft, PROMPTS, policy, max_new_tokens=4)


def test_a_head_of_another_target_is_refused(target):
    with pytest.raises(ValueError, match="target of width 4, this one has 8"):
        bind(make_head("eagle", dataclasses.replace(TARGET, width=4)), target)
    deep = HeadConfig.for_target(TARGET, kind="eagle3", feature_layers=(1, 2, 9))
    with pytest.raises(ValueError, match="the target has 2"):
        bind(create_head(deep, jax.random.key(0)), target)
    with pytest.raises(ValueError, match="features of a Llama target"):
        bind(make_head("eagle"), table(0, 3))
