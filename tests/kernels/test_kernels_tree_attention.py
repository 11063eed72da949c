"""Every implementation of tree attention against a float64 loop over rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdx.kernels import ancestor_bits, pack_tree_mask, tree_attention
from sdx.kernels.dispatch import kernels_in
from sdx.kernels.tree_attention import pallas_tpu, pallas_triton
from sdx.kernels.tree_attention.shapes import CHECKED, Shape, llama_8b

IMPLEMENTATIONS = ("reference", "triton", "tpu")
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
CALLS = {"triton": r"(__gpu\$xla\.gpu\.triton|triton_kernel_call)", "tpu": "tpu_custom_call"}
KERNELS = {"reference": (), "triton": ("tree_attention_triton",), "tpu": ("tree_attention_tpu",)}


def operands(shape: Shape, seed=0):
    rng = np.random.default_rng(seed)
    b, k, g, t, s, d = shape[:6]
    draw = lambda *n: jnp.asarray(rng.standard_normal(n), jnp.float32).astype(shape.dtype)  # noqa: E731
    if shape.tree == "chain":
        bits = None
    else:
        parents = [[-1] + [int(rng.integers(0, i)) for i in range(1, t)] for _ in range(b)]
        bits = np.stack([ancestor_bits(p) for p in parents])
    lengths = jnp.asarray(shape.lengths or (s,) * b, jnp.int32)
    return (
        draw(b, k * g, t, d), draw(b, k, s, d), draw(b, k, s, d),
        draw(b, k, t, d), draw(b, k, t, d), lengths, bits,
    )  # fmt: skip


def float64_rows(q, k, v, dk, dv, lengths, bits, window=None):
    """The definition, one row at a time; nothing shared with the implementations."""
    q, k, v, dk, dv = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v, dk, dv))
    b, heads, t, d = q.shape
    g = heads // k.shape[1]
    out, lse = np.zeros_like(q), np.full(q.shape[:3], -np.inf)
    for i, h, n in np.ndindex(b, heads, t):
        if bits is None:
            seen = list(range(n + 1))
        else:
            seen = [c for c in range(t) if int(bits[i, n, c // 32]) >> (c % 32) & 1]
        depth = {c: len([a for a in range(t) if sees(bits, i, c, a)]) - 1 for c in (*seen, n)}
        length = int(lengths[i])
        lo = 0 if window is None else max(0, length + depth[n] - window + 1)
        if window is not None:
            seen = [c for c in seen if depth[n] - depth[c] < window]
        keys = np.concatenate([k[i, h // g, lo:length], dk[i, h // g, seen]])
        values = np.concatenate([v[i, h // g, lo:length], dv[i, h // g, seen]])
        if len(keys):
            logits = keys @ q[i, h, n] / np.sqrt(d)
            weights = np.exp(logits - logits.max())
            lse[i, h, n] = np.log(weights.sum()) + logits.max()
            out[i, h, n] = weights @ values / weights.sum()
    return out, lse


def sees(bits, i, node, other):
    return other <= node if bits is None else int(bits[i, node, other // 32]) >> (other % 32) & 1


def row_error(got, want):
    got = np.asarray(got.astype(jnp.float32), np.float64)
    scale = np.abs(want).max(-1)
    return (np.abs(got - want).max(-1) / np.where(scale > 0, scale, 1)).max()


def small_tiles(implementation, window=None):
    """Several key blocks, splits and row tiles even at small shapes."""
    if implementation == "triton":
        return pallas_triton.Config(16, 64, 3, 4, 3)
    return pallas_tpu.Config(16, 64) if implementation == "tpu" else None


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_agrees_with_float64_row_by_row(implementation, name):
    shape = CHECKED[name]
    if implementation == "tpu" and shape.dtype == "float16":
        with pytest.raises(NotImplementedError, match="float16"):
            tree_attention(*operands(shape), implementation="tpu")
        return
    args = operands(shape)
    want, want_lse = float64_rows(*args, window=shape.window)
    out, lse = tree_attention(
        *args, window=shape.window, return_log_sum_exp=True, implementation=implementation
    )
    assert out.dtype == shape.dtype
    assert row_error(out, want) <= TOLERANCE[shape.dtype]
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=TOLERANCE[shape.dtype])


@pytest.mark.parametrize("implementation", ("triton", "tpu"))
@pytest.mark.parametrize("name", ["ragged", "window", "no_multiples"])
def test_split_and_tiled_agrees(implementation, name):
    shape = CHECKED[name]
    args = operands(shape, seed=1)
    want, _ = float64_rows(*args, window=shape.window)
    config = small_tiles(implementation)
    out = tree_attention(*args, window=shape.window, implementation=implementation, config=config)
    assert row_error(out, want) <= 1e-5


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dead_slots_and_unseen_nodes_may_hold_nan(implementation, window):
    shape = CHECKED["ragged"]._replace(window=window)
    q, k, v, dk, dv, lengths, _ = operands(shape)
    tree = np.array(np.eye(5, dtype=bool) | np.tri(5, dtype=bool))
    tree[3] = tree[:, 3] = False  # node 3 is padding: it sees nothing and nothing sees it
    bits = pack_tree_mask(tree)[None]
    clean = tree_attention(
        q, k, v, dk, dv, lengths, bits, window=window, implementation=implementation
    )
    slot = np.arange(shape.slots)[None, None, :, None]
    dead = slot >= np.asarray(lengths)[:, None, None, None]
    if window:
        dead |= slot <= np.asarray(lengths)[:, None, None, None] - window
    poison = lambda x: jnp.where(dead, jnp.nan, x)  # noqa: E731
    unseen = lambda x: x.at[:, :, 3].set(jnp.nan)  # noqa: E731
    dirty = tree_attention(
        q, poison(k), poison(v), unseen(dk), unseen(dv), lengths, bits,
        window=window, implementation=implementation,
    )  # fmt: skip
    np.testing.assert_array_equal(dirty, clean)
    assert (np.asarray(clean)[:, :, 3][lengths == 0] == 0).all()


@settings(
    max_examples=3, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(data=st.data())
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_shape(implementation, data):
    pick = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    slots, batch = pick(1, 150), pick(1, 2)
    shape = Shape(
        batch=batch, kv_heads=pick(1, 2), group=pick(1, 8), nodes=pick(1, 70), slots=slots,
        head_size=data.draw(st.sampled_from([64, 72, 128])),
        lengths=tuple(pick(0, slots) for _ in range(batch)),
        tree=data.draw(st.sampled_from(["chain", "random"])),
        window=data.draw(st.sampled_from([None, 1, 17])),
    )  # fmt: skip
    args = operands(shape, seed=pick(0, 9))
    want, _ = float64_rows(*args, window=shape.window)
    out = tree_attention(*args, window=shape.window, implementation=implementation)
    assert row_error(out, want) <= 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_named_implementation_runs(implementation):
    args = operands(CHECKED["chain"])
    assert (
        kernels_in(tree_attention, *args, implementation=implementation) == KERNELS[implementation]
    )


@pytest.mark.parametrize("platform, kernel", [("cuda", "triton"), ("tpu", "tpu")])
@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("nodes", [1, 40, 256])
def test_lowers_for_the_device(lower, platform, kernel, window, nodes):
    shape = llama_8b(4, 16384, nodes)._replace(window=window)
    b, k, g, t, s, d = shape[:6]
    struct = lambda *n, dtype=shape.dtype: jax.ShapeDtypeStruct(n, dtype)  # noqa: E731
    text = lower(
        lambda *a: tree_attention(*a, window=window, implementation=kernel, interpret=False),
        platform,
        struct(b, k * g, t, d), struct(b, k, s, d), struct(b, k, s, d), struct(b, k, t, d),
        struct(b, k, t, d), struct(b, dtype="int32"), struct(b, t, -(-t // 32), dtype="int32"),
    )  # fmt: skip
    assert f"tree_attention_{kernel}" in text
    assert re.search(r"custom_call @" + CALLS[kernel], text)


def test_packed_masks_are_the_ancestors():
    parents = [-1, 0, 0, 1, 3, 2, -1] + [4] * 40
    bits = ancestor_bits(parents)
    mask = np.zeros((len(parents),) * 2, bool)
    for node in range(len(parents)):
        at = node
        while at >= 0:
            mask[node, at] = True
            at = parents[at]
    np.testing.assert_array_equal(bits, pack_tree_mask(mask))
    with pytest.raises(ValueError, match="topological"):
        ancestor_bits([1, -1])


def test_bad_operands_are_named():
    q, k, v, dk, dv, lengths, bits = operands(CHECKED["ragged"])
    with pytest.raises(ValueError, match="tree bits"):
        tree_attention(q, k, v, dk, dv, lengths, bits[:, :3])
    with pytest.raises(ValueError, match="multiple"):
        tree_attention(q[:, :3], k, v, dk, dv, lengths, bits)
    with pytest.raises(ValueError, match="dtypes"):
        tree_attention(q, k, v, dk.astype("bfloat16"), dv, lengths, bits)
    with pytest.raises(ValueError, match="lengths"):
        tree_attention(q, k, v, dk, dv, lengths[:2], bits)
    with pytest.raises(ValueError, match="window"):
        tree_attention(q, k, v, dk, dv, lengths, bits, window=0)
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        tree_attention(q, k, v, dk, dv, lengths, bits, implementation="cuda")
