"""Laws of the decoder: causality, the cache, trees, rollback, grouped queries."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.models.cache import empty_cache
from sdx.models.llama import Llama, rotate

TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}


def test_a_token_does_not_depend_on_later_ones(model, tokens):
    """The gradient of position 4's features in the embeddings of later tokens is exactly zero."""
    table = model.embedding_VxD[...]
    distinct = jnp.arange(12)[None]  # every position has its own row of the embedding

    def features_at_4(table):
        changed = jax.tree.map(lambda leaf: leaf, model)
        changed.embedding_VxD = type(model.embedding_VxD)(table)
        return changed.features(distinct)[0, 4].sum()

    slope = np.abs(jax.jit(jax.grad(features_at_4))(table)).sum(axis=1)
    assert (slope[:5] > 0).all()
    assert (slope[5:] == 0).all()


@pytest.mark.parametrize("slots_last", [False, True])
def test_cached_passes_equal_the_uncached_one(model, forward, whole, tokens, config, slots_last):
    expected = whole(model, tokens)
    cache, got = empty_cache(config, 2, 16, slots_last=slots_last), []
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 12)):
        output = forward(model, tokens[:, start:stop], cache)
        cache = cache.append(output.fresh)
        got.append(output.logits_BxTxV)
    np.testing.assert_allclose(jnp.concatenate(got, axis=1), expected, **TOLERANCE)
    assert cache.lengths_B.tolist() == [12, 12]


def test_a_tree_in_one_pass_equals_its_branches_one_by_one(model, forward, whole, tokens, config):
    """Root 0 with children 1, 2; 3 under 1, 4 under 2: every path as a chain of its own."""
    parents = [-1, 0, 0, 1, 2]
    paths = {i: [] for i in range(5)}
    for i, parent in enumerate(parents):
        paths[i] = [*(paths[parent] if parent >= 0 else []), i]
    mask = np.zeros((5, 5), bool)
    for i, path in paths.items():
        mask[i, path] = True
    depths = jnp.asarray([len(paths[i]) - 1 for i in range(5)])
    cache = empty_cache(config, 2, 16)
    cache = cache.append(forward(model, tokens[:, :4], cache).fresh)
    nodes = tokens[:, 4:9]
    output = forward(model, nodes, cache, jnp.asarray(mask), cache.lengths_B[:, None] + depths)
    for i, path in paths.items():
        chain = jnp.concatenate([tokens[:, :4], nodes[:, jnp.asarray(path)]], axis=1)
        expected = whole(model, chain)[:, -1]
        np.testing.assert_allclose(output.logits_BxTxV[:, i], expected, **TOLERANCE)
    # Committing the path 0, 2, 4 of row 0 and 0, 1 of row 1 leaves what those chains would have.
    path = jnp.asarray([[0, 2, 4], [0, 1, 1]])
    cache = cache.commit(output.fresh, path, jnp.asarray([3, 2]))
    assert cache.lengths_B.tolist() == [7, 6]
    after = forward(model, tokens[:, 9:10], cache).logits_BxTxV[:, 0]
    for row, chosen in enumerate(([0, 2, 4], [0, 1])):
        chain = jnp.concatenate([tokens[:, :4], nodes[:, jnp.asarray(chosen)], tokens[:, 9:10]], 1)
        np.testing.assert_allclose(after[row], whole(model, chain)[row, -1], **TOLERANCE)


def test_rolling_back_forgets(model, forward, tokens, config):
    empty = empty_cache(config, 2, 16)
    short = empty.append(forward(model, tokens[:, :5], empty).fresh)
    long = short.append(forward(model, tokens[:, 5:9], short).fresh)
    back = long.rollback(short.lengths_B)
    expected = forward(model, tokens[:, 9:10], short).logits_BxTxV
    np.testing.assert_array_equal(forward(model, tokens[:, 9:10], back).logits_BxTxV, expected)


def test_a_row_that_commits_nothing_is_untouched(model, forward, tokens, config):
    empty = empty_cache(config, 2, 16)
    cache = empty.append(forward(model, tokens[:, :5], empty).fresh)
    fresh = forward(model, tokens[:, 5:9], cache).fresh
    path = jnp.tile(jnp.arange(4), (2, 1))
    after = cache.commit(fresh, path, jnp.asarray([0, 3]))
    for old, new in zip(cache.keys + cache.values, after.keys + after.values, strict=True):
        np.testing.assert_array_equal(old[0], new[0])
        assert (old[1] != new[1]).any()
    assert after.lengths_B.tolist() == [5, 8]


def test_writing_past_the_capacity_is_dropped(model, forward, tokens, config):
    empty = empty_cache(config, 2, 6)
    cache = empty.append(forward(model, tokens[:, :5], empty).fresh)
    after = cache.append(forward(model, tokens[:, 5:9], cache).fresh)
    for old, new in zip(cache.values, after.values, strict=True):
        np.testing.assert_array_equal(old[:, :, :5], new[:, :, :5])


def test_grouped_queries_equal_repeated_key_heads(model, whole, tokens, config):
    """Sharing a key head is having it twice."""
    full = Llama(dataclasses.replace(config, kv_heads=config.heads), jax.random.key(2))
    e, h, k = config.head_dim, config.heads, config.kv_heads
    for ours, theirs in zip(full.blocks, model.blocks, strict=True):
        parts = jnp.split(theirs.qkv_DxN[...], [h * e, (h + k) * e], axis=1)
        doubled = [
            jnp.repeat(p.reshape(-1, k, e), h // k, axis=1).reshape(-1, h * e) for p in parts[1:]
        ]
        ours.qkv_DxN = type(theirs.qkv_DxN)(jnp.concatenate([parts[0], *doubled], axis=1))
        for name in ("out_NxD", "gate_up_Dx2F", "down_FxD", "attention_norm_D", "ffn_norm_D"):
            setattr(ours, name, getattr(theirs, name))
    for name in ("embedding_VxD", "norm_D", "head_DxV"):
        setattr(full, name, getattr(model, name))
    np.testing.assert_allclose(whole(full, tokens), whole(model, tokens), **TOLERANCE)


def test_rotary_scores_depend_on_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    score = [
        jnp.vdot(rotate(q, jnp.full((1, 1), a + 3), 1e4), rotate(k, jnp.full((1, 1), a), 1e4))
        for a in (0, 5, 17)
    ]
    np.testing.assert_allclose(score, score[0], rtol=1e-5)


def test_parameters_are_counted(model, config):
    assert config.parameters() == sum(leaf.size for leaf in jax.tree.leaves(model))


def test_too_large_a_cache_is_an_error(config):
    with pytest.raises(ValueError, match="cache of 65 positions: the model has 64"):
        empty_cache(config, 1, 65)
