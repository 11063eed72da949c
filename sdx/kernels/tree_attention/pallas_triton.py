"""Tree attention for NVIDIA GPUs: flash decoding, split over the cache.

Grid (B * K, splits, row tiles). A program owns a tile of rows (all heads of a group times nodes, so
each key is read once per tile, not once per head) and a contiguous share of the *live* blocks of
its sequence; the last split also takes the draft nodes. It leaves (weighted sum, maximum, total) in
float32, and a small XLA fusion merges the splits by log-sum-exp.

Tail tiles: Triton does not bounds-check tiles that stick out, so every load and store is masked.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from sdx.kernels.dispatch import interpreted
from sdx.kernels.lanes import padded_lanes

NEGATIVE = -1e30  # finite: (-inf) - (-inf) is NaN in the running maximum
LOG2E = 1.4426950408889634
MAX_NODES = 256
MAX_HEAD_SIZE = 256


class Config(NamedTuple):
    """Tile sizes; powers of two. `splits` programs share one sequence's cache."""

    block_rows: int
    block_keys: int
    splits: int
    num_warps: int
    num_stages: int


def configure(batch_heads: int, rows: int, slots: int, head_size: int, itemsize: int) -> Config:
    """The heuristic. 132 processors (H100): aim at two waves of programs.

    A split gets at least 256 slots, so that merging stays small beside reading. Shared memory per
    program is about stages * 2 * keys * head_size * itemsize and must leave room for two programs
    in 228 KB. Row tiles of 64 keep a warp's share of the accumulator in registers (docs/kernels.md
    lists registers and spills per configuration).
    """
    # float32 products run outside the tensor cores and keep operands in registers.
    tallest, warps = (16, 8) if itemsize == 4 else (64, 4)
    block_rows = min(tallest, max(16, pl.next_power_of_2(rows)))
    wide = head_size > 128
    block_keys = 32 if wide or itemsize == 4 else 64
    row_tiles = pl.cdiv(rows, block_rows)
    wanted = pl.cdiv(2 * 132, batch_heads * row_tiles)
    splits = max(1, min(wanted, slots // 256, 64))
    return Config(block_rows, block_keys, splits, warps, 2 if wide or itemsize == 4 else 3)


def tree_attention(problem, *, scale, window, interpret, config):
    """See `api.tree_attention`; returns out [B, K, M, D] in q's dtype and lse [B, K, M] float32.

    Raises NotImplementedError above 256 nodes or head size 256.
    """
    b, kv_heads, m, d = problem.q_BxKxMxD.shape
    u, s = problem.draft_k_BxKxUxD.shape[2], problem.k_BxKxSxD.shape[2]
    if u > MAX_NODES or d > MAX_HEAD_SIZE:
        raise NotImplementedError(
            f"tree_attention triton: {u} nodes of head size {d}, at most {MAX_NODES} and "
            f"{MAX_HEAD_SIZE} are served"
        )
    config = config or configure(b * kv_heads, m, s, d, problem.q_BxKxMxD.dtype.itemsize)
    return _tree_attention(problem, scale, window, config, interpreted("triton", interpret))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _tree_attention(problem, scale, window, config, interpret):
    b, kv_heads, m, d = problem.q_BxKxMxD.shape
    splits = config.splits
    body = functools.partial(
        _body,
        config=config,
        scale=scale * LOG2E,
        window=window,
    )
    part = (b, kv_heads, splits, m)

    def owner(i):
        return lax.div(i, jnp.int32(kv_heads)), lax.rem(i, jnp.int32(kv_heads))

    per_head = lambda *shape: pl.BlockSpec(  # noqa: E731
        (pl.squeezed, pl.squeezed, *shape), lambda i, j, r: (*owner(i), 0, 0)
    )
    per_split = lambda *shape: pl.BlockSpec(  # noqa: E731
        (pl.squeezed, pl.squeezed, pl.squeezed, *shape),
        lambda i, j, r: (*owner(i), j, *(0 for _ in shape)),
    )
    of_sequence = lambda *shape: pl.BlockSpec(  # noqa: E731
        (pl.squeezed, *shape), lambda i, j, r: (owner(i)[0], *(0 for _ in shape))
    )
    out, top, total = pl.pallas_call(
        body,
        out_shape=[
            jax.ShapeDtypeStruct((*part, d), jnp.float32),
            jax.ShapeDtypeStruct(part, jnp.float32),
            jax.ShapeDtypeStruct(part, jnp.float32),
        ],
        grid=(b * kv_heads, splits, pl.cdiv(m, config.block_rows)),
        in_specs=[
            per_head(*problem.q_BxKxMxD.shape[2:]),
            per_head(*problem.k_BxKxSxD.shape[2:]),
            per_head(*problem.v_BxKxSxD.shape[2:]),
            per_head(*problem.draft_k_BxKxUxD.shape[2:]),
            per_head(*problem.draft_v_BxKxUxD.shape[2:]),
            of_sequence(1),
            of_sequence(*problem.bits_BxTxW.shape[1:]),
            of_sequence(*problem.row_depths_BxT.shape[1:]),
            of_sequence(*problem.depths_BxU.shape[1:]),
        ],
        out_specs=[per_split(m, d), per_split(m), per_split(m)],
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="tree_attention_triton",
    )(*problem._replace(lengths_B=problem.lengths_B[:, None]))
    return merge_splits(out, top, total, problem.q_BxKxMxD.dtype)


def merge_splits(out, top, total, dtype):
    """Merges partial softmaxes over axis 2; maxima and exponents are base 2."""
    highest = top.max(2, keepdims=True)
    weight = jnp.exp2(top - highest)
    sum_ = (total * weight).sum(2)
    merged = (out * weight[..., None]).sum(2) / jnp.where(sum_ > 0, sum_, 1.0)[..., None]
    lse = (highest[:, :, 0] + jnp.log2(sum_)) / LOG2E
    return merged.astype(dtype), jnp.where(sum_ > 0, lse, -jnp.inf)


def _body(
    q_ref, k_ref, v_ref, dk_ref, dv_ref, length_ref, bits_ref, row_depths_ref, depths_ref,
    out_ref, top_ref, total_ref, *, config, scale, window,
):  # fmt: skip
    m, d = q_ref.shape
    t, u = row_depths_ref.shape[0], depths_ref.shape[0]
    bm, bk = config.block_rows, config.block_keys
    lanes = padded_lanes(d)
    head_ok = (_iota((1, lanes.size), 1) < d) if lanes.size != d else True
    split = pl.program_id(1)
    first_row = pl.program_id(2) * bm
    length = length_ref[0]

    row = first_row + _iota((bm,), 0)
    row_ok = row < m
    node = lax.rem(row, jnp.int32(t))
    q = _load(q_ref, (pl.ds(first_row, bm), lanes), row_ok[:, None] & head_ok)
    if window:
        depth = plt.load(row_depths_ref.at[node], mask=row_ok, other=0)

    def attend(keys, values, sees, carry):
        return _online_softmax(q, keys, values, sees, carry, scale)

    def cache_block(j, carry):
        start = j * bk
        slot = start + _iota((bk,), 0)
        live = slot < length
        sees = jnp.broadcast_to(live[None, :], (bm, bk))
        if window:
            live &= slot > length - window  # what the root cannot see, nobody sees
            sees &= slot[None, :] > (length + depth - window)[:, None]
        keys = _load(k_ref, (pl.ds(start, bk), lanes), live[:, None] & head_ok)
        values = _load(v_ref, (pl.ds(start, bk), lanes), live[:, None] & head_ok)
        return attend(keys, values, sees, carry)

    def draft_block(j, carry):
        start = j * bk
        col = start + _iota((bk,), 0)
        col_depth = plt.load(depths_ref.at[col], mask=col < u, other=-1)
        col_ok = col_depth >= 0  # -1: a node that no query sees, whose value may be anything
        word = lax.div(col, jnp.int32(32))
        # One 32-bit word serves 32 columns: the repeated addresses are served by the L1 cache.
        bits = plt.load(
            bits_ref.at[
                jnp.broadcast_to(node[:, None], (bm, bk)), jnp.broadcast_to(word[None], (bm, bk))
            ],
            mask=row_ok[:, None] & col_ok[None, :],
            other=0,
        )
        bit = lax.shift_right_logical(bits, jnp.broadcast_to(lax.rem(col, jnp.int32(32)), (bm, bk)))
        sees = (bit & 1) == 1
        if window:
            sees &= col_depth[None, :] > (depth - window)[:, None]
        keys = _load(dk_ref, (pl.ds(start, bk), lanes), col_ok[:, None] & head_ok)
        values = _load(dv_ref, (pl.ds(start, bk), lanes), col_ok[:, None] & head_ok)
        return attend(keys, values, sees, carry)

    carry = (
        jnp.full((bm,), NEGATIVE, jnp.float32),
        jnp.zeros((bm,), jnp.float32),
        jnp.zeros((bm, lanes.size), jnp.float32),
    )
    begin, end = _share(length, split, config, window)
    carry = lax.fori_loop(begin, end, cache_block, carry)
    # Only the last split sees the nodes; the others run this loop zero times. (A division, since
    # select(p, 1, 0) of scalars becomes an i1 loop bound, which lowers but does not compile.)
    draft_blocks = lax.div(split + 1, jnp.int32(config.splits)) * pl.cdiv(u, bk)
    top, total, out = lax.fori_loop(0, draft_blocks, draft_block, carry)
    plt.store(out_ref.at[pl.ds(first_row, bm), lanes], out, mask=row_ok[:, None] & head_ok)
    plt.store(top_ref.at[pl.ds(first_row, bm)], top, mask=row_ok)
    plt.store(total_ref.at[pl.ds(first_row, bm)], total, mask=row_ok)


def _share(length, split, config, window):
    """First and last block (exclusive) of the cache that this split reads."""
    bk = config.block_keys
    blocks = lax.div(length + (bk - 1), jnp.int32(bk))
    skipped = lax.div(jnp.maximum(length - window + 1, 0), jnp.int32(bk)) if window else 0
    per_split = lax.div(blocks - skipped + (config.splits - 1), jnp.int32(config.splits))
    begin = skipped + split * per_split
    return begin, jnp.minimum(begin + per_split, blocks)


def _online_softmax(q, keys, values, sees, carry, scale):
    """One step of the running softmax in base 2; masked entries get exactly no weight."""
    top, total, out = carry
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None  # no TF32
    dot = functools.partial(lax.dot_general, precision=exact, preferred_element_type=jnp.float32)
    logits = jnp.where(sees, dot(q, keys, (((1,), (1,)), ((), ()))) * scale, NEGATIVE)
    new_top = jnp.maximum(top, jnp.max(logits, axis=1))
    weights = jnp.where(sees, jnp.exp2(logits - new_top[:, None]), 0.0)
    shrink = jnp.exp2(top - new_top)
    total = total * shrink + jnp.sum(weights, axis=1)
    update = dot(weights.astype(values.dtype), values, (((1,), (0,)), ((), ())))
    return new_top, total, out * shrink[:, None] + update


def _load(ref, index, mask):
    return plt.load(ref.at[index], mask=jnp.broadcast_to(mask, [i.size for i in index]), other=0)


def _iota(shape, axis):
    return lax.broadcasted_iota(jnp.int32, shape, axis)
