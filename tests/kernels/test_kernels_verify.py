"""Every implementation of verify: laws against sorting in float64, proofs by enumeration, large
vocabularies, lowering."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.kernels import Request, known_law, law, surplus, verification_rules
from sdx.kernels.dispatch import kernels_in
from sdx.kernels.verify import pallas_tpu, pallas_triton
from sdx.kernels.verify.noise import gumbel, threefry

IMPLEMENTATIONS = ("reference", "triton", "tpu")
CALLS = {"triton": r"(__gpu\$xla\.gpu\.triton|triton_kernel_call)", "tpu": "tpu_custom_call"}
FILTERS = {
    "plain": dict(temperature=0.7),
    "both": dict(temperature=1.3, top_k=50, top_p=0.9),
}


def rows(r, v, dtype="float32", seed=0, scale=3.0):
    x = np.random.default_rng(seed).standard_normal((r, v)) * scale
    return jnp.asarray(x, jnp.float32).astype(dtype)


def sorted_law(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The definition by sorting, in float64; equal logits stay together."""
    x = np.asarray(logits.astype(jnp.float32), np.float64) / temperature
    keep = np.ones(x.shape, bool)
    if top_k:
        keep &= x >= np.sort(x, -1)[:, -top_k][:, None]
    if top_p < 1:
        for row, kept in zip(x, keep, strict=True):
            mass = np.where(kept, np.exp(row - row.max()), 0)
            mass /= mass.sum()
            above = np.array([mass[row > value].sum() for value in row])
            kept &= above < top_p
    p = np.where(keep, np.exp(x - x.max(-1, keepdims=True)), 0)
    return p / p.sum(-1, keepdims=True)


def dense(found):
    values = found.logits_RxV.astype(jnp.float32) * found.inverse_temperature_R[:, None]
    p = jnp.exp(values - found.log_normaliser_R[:, None])
    return np.asarray(jnp.where(found.logits_RxV >= found.threshold_R[:, None], p, 0.0))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_laws_are_those_of_sorting(implementation, dtype, filters):
    logits = rows(5, 333, dtype).at[2, ::3].set(-jnp.inf)
    found = law(logits, **FILTERS[filters], implementation=implementation)
    want = sorted_law(logits, **FILTERS[filters])
    np.testing.assert_array_equal(dense(found) > 0, want > 0)
    np.testing.assert_allclose(dense(found), want, rtol=2e-5, atol=1e-9)
    np.testing.assert_array_equal(found.best_R, np.asarray(logits).argmax(-1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equal_logits_stay_together(implementation):
    logits = jnp.asarray([[2.0, 1.0, 1.0, 1.0, -0.0, 0.0, -jnp.inf]])
    keep = lambda **f: (dense(law(logits, **f, implementation=implementation)) > 0).sum()  # noqa: E731
    assert keep(top_k=2) == 4 and keep(top_k=5) == 6 and keep(top_p=0.5) == 4
    assert keep(top_k=1) == 1 and keep(top_p=1e-6) == 1 and keep(top_k=7) == 6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_surplus_sums_and_scores(implementation):
    target = law(rows(4, 700), top_k=300, implementation=implementation)
    draft = law(rows(3, 700, seed=1), implementation=implementation)
    weight, c = np.array([1.0, 0.4, 1.0]), np.array([0.0, 1.0, 1.7])
    excluded = np.array([[-1, -1], [5, 699], [0, -1]], np.int32)
    request = Request(
        jnp.array([3, 0, 2]), jnp.array([0, 2, 1]), jnp.asarray(weight, jnp.float32),
        jnp.asarray(c, jnp.float32), jnp.asarray(excluded),
    )  # fmt: skip
    p, q = dense(target)[[3, 0, 2]].astype(float), dense(draft)[[0, 2, 1]].astype(float)
    for row, tokens in enumerate(excluded):
        p[row, tokens[tokens >= 0]] = q[row, tokens[tokens >= 0]] = 0
    r = np.maximum(weight[:, None] * p - c[:, None] * q, 0)
    seeds = jnp.asarray([[1, 2], [3, 4], [5, 6]], jnp.uint32)
    found = surplus(target, draft, request, seeds_Nx2=seeds, implementation=implementation)
    for got, want in ((found.mass_N, r), (found.left_N, p), (found.undrawn_N, q)):
        np.testing.assert_allclose(got, want.sum(-1), rtol=1e-5)
    index = jnp.broadcast_to(jnp.arange(700), (3, 700))
    noise = np.asarray(gumbel(seeds[:, :1], seeds[:, 1:], index), np.float64)
    for token, weights in ((found.token_N, r), (found.left_token_N, p)):
        scores = np.where(weights > 0, np.log(weights + 1e-99) + noise, -1e99)
        np.testing.assert_array_equal(token, scores.argmax(-1))


def test_the_noise_is_standard_gumbel_and_differs_by_seed_and_token():
    index = jnp.arange(200_000, dtype=jnp.int32)
    g = np.asarray(gumbel(jnp.uint32(7), jnp.uint32(8), index), np.float64)
    assert abs(g.mean() - 0.5772157) < 0.01 and abs(g.var() - np.pi**2 / 6) < 0.03
    assert len(np.unique(g)) > 198_000
    other = np.asarray(gumbel(jnp.uint32(7), jnp.uint32(9), index), np.float64)
    assert abs(np.corrcoef(g, other)[0, 1]) < 0.01
    # The published vector of threefry-2x32-20 for zero key and counter.
    zero = jnp.zeros((1,), jnp.uint32)
    assert [int(x[0]) for x in threefry(zero, zero, zero, zero)] == [0x6B200159, 0x99BA4EFE]


# ---------------------------------------------------------------------------- proofs


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_drawn_law_is_the_surplus(implementation):
    """Noise that singles out one token makes a draw name that token's own log-weight, so the law
    of a draw is read off the stream itself. (tests/decoding enumerates whole rounds with it.)"""
    target, draft = law(rows(2, 7), top_k=6), known_law(jax.nn.log_softmax(rows(2, 7, seed=1)))
    both, none = jnp.arange(2), jnp.full((2, 1), -1, jnp.int32)
    request = Request(both, both, jnp.array([1.0, 0.6]), jnp.array([1.0, 0.8]), none.at[1].set(3))
    stream = functools.partial(surplus, implementation=implementation)
    found, weights, left = verification_rules.log_weights(stream, target, draft, request)
    p, q = dense(target).astype(float), np.exp(np.asarray(draft.logits_RxV, np.float64))
    r = np.maximum(np.array([[1.0], [0.6]]) * p - np.array([[1.0], [0.8]]) * q, 0)
    r[1, 3] = p[1, 3] = 0
    np.testing.assert_allclose(np.exp(weights), r, atol=1e-6)
    np.testing.assert_allclose(np.exp(left), p, atol=1e-6)
    np.testing.assert_allclose(found.mass_N, r.sum(-1), rtol=1e-5)


# ---------------------------------------------------------------------------- large vocabularies

QWEN = 152_064


def decisions(implementation):
    """Chain, block and tree decisions on one set of bfloat16 logits of Qwen2.5's vocabulary."""
    key = jax.random.key(5)
    logits = rows(2 * 4, QWEN, "bfloat16", seed=2, scale=2.0)
    draft_logits = logits.reshape(2, 4, -1)[:, :3].reshape(6, -1) + rows(
        6, QWEN, "bfloat16", 3, 0.5
    )
    tile = {
        "triton": pallas_triton.Config(32768, 2, 4),
        "tpu": pallas_tpu.Config(8, 65536),
    }.get(implementation)
    options = dict(implementation=implementation, config=tile)
    found = []
    for filters in (dict(temperature=0.8), dict(top_p=0.95)):
        target, draft = law(logits, **filters, **options), law(draft_logits, **filters, **options)
        tokens = draft.best_R.reshape(2, 3)
        stream = functools.partial(surplus, **options)
        for rule in ("replacement", "block", "chosen"):
            source = Seeded(key)
            accepted, token, _ = verification_rules.chain(
                stream, source, target, None if rule == "chosen" else draft, tokens,
                jnp.ones((2, 3), bool), rule=rule,
            )  # fmt: skip
            found.append(np.stack([accepted, token]))
        found.append(np.stack([target.best_R, target.best_R]))
        if "top_p" in filters:
            continue  # the tree's own rules; filters act before them
        # Nodes 1 and 2 below the root, 3 below 1; the likeliest drafts, and the target's at 2.
        children = jnp.array([[1, 2], [3, -1], [-1, -1], [-1, -1]])
        nodes = jnp.stack([0 * tokens[:, 0], tokens[:, 0], target.best_R[::4], tokens[:, 1]], 1)
        for rule in ("without_replacement", "chosen"):
            accepted, path, ranks, token, _ = verification_rules.tree(
                stream, Seeded(key), target, None if rule == "chosen" else draft, nodes,
                jnp.ones((2, 4), bool), jnp.stack([children, children]), jnp.array([0, 1, 2, 0]),
                2, rule,
            )  # fmt: skip
            found.append(np.stack([accepted, path[:, 0], ranks[:, 0], token]))
    return found


@pytest.fixture(scope="module")
def reference_decisions():
    return decisions("reference")


@jax.tree_util.register_pytree_node_class
class Seeded:
    """The same uniforms and seeds for every implementation."""

    def __init__(self, key):
        self.key = key

    def tree_flatten(self):
        return (self.key,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    def next(self):
        self.key, use = jax.random.split(self.key)
        return use

    def accept(self, probability_BxK):
        return jax.random.uniform(self.next(), probability_BxK.shape) < probability_BxK, self

    def seeds(self):
        return jax.random.bits(self.next(), (2, 2), jnp.uint32), self


@pytest.mark.parametrize("implementation", ["triton", "tpu"])
def test_decisions_equal_the_references_at_a_large_vocabulary(reference_decisions, implementation):
    want, got = reference_decisions, decisions(implementation)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len({tuple(x.ravel()) for x in want}) > 4  # the cases differ from each other


# ---------------------------------------------------------------------------- devices


@pytest.mark.parametrize("platform, kernel", [("cuda", "triton"), ("tpu", "tpu")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lowers_for_the_device(lower, platform, kernel, dtype):
    def verify(logits, drafts, tokens, seeds):
        options = dict(implementation=kernel, interpret=False)
        target = law(logits, 0.8, 50, 0.9, **options)
        draft = law(drafts, **options)
        n = len(tokens)
        request = Request(jnp.arange(n), jnp.arange(n), jnp.ones(n), jnp.ones(n), tokens[:, None])
        return surplus(target, draft, request, seeds_Nx2=seeds, **options)

    struct = jax.ShapeDtypeStruct
    text = lower(
        verify, platform, struct((20, QWEN), dtype), struct((16, QWEN), dtype),
        struct((4,), "int32"), struct((4, 2), "uint32"),
    )  # fmt: skip
    for name in ("statistics", "tails", "surplus"):
        assert f"verify_{name}_{kernel}" in text
    assert re.search(r"custom_call @" + CALLS[kernel], text)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_named_implementation_runs(implementation):
    ran = set(kernels_in(lambda x: law(x, top_k=3, implementation=implementation), rows(2, 40)))
    names = {f"verify_{name}_{implementation}" for name in ("statistics", "tails")}
    assert ran == (set() if implementation == "reference" else names)


def test_bad_requests_are_named():
    with pytest.raises(ValueError, match="top_p 0"):
        law(rows(1, 8), top_p=0)
    with pytest.raises(ValueError, match="int32"):
        law(jnp.zeros((1, 8), jnp.int32))
    with pytest.raises(ValueError, match="one source"):
        noise = jnp.zeros((1, 8))
        surplus(known_law(noise), None, None, seeds_Nx2=jnp.zeros((1, 2)), noise_NxV=noise)
