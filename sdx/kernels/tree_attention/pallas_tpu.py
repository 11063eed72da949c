"""Tree attention for TPUs: flash decoding with the running softmax in VMEM scratch.

Grid (B, K, row tiles, key blocks), the last axis sequential. Lengths are prefetched scalars: the
index map of the cache stops at the last live block, and a block that was already fetched is not
fetched again, so dead slots cost neither bandwidth nor (`pl.when`) compute. The draft nodes are
taken after the last key block. Tail blocks are padded with garbage and masked.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sdx.kernels.dispatch import interpreted

NEGATIVE = -1e30
LOG2E = 1.4426950408889634
LANES = 128
MAX_NODES = 256


class Config(NamedTuple):
    """Rows and keys of one tile."""

    block_rows: int
    block_keys: int


def configure(rows: int, slots: int) -> Config:
    """512 x 512 logits in float32 are 1 MB of VMEM, keys and values of 512 x 256 another 2 MB."""
    return Config(min(512, pl.cdiv(rows, 16) * 16), min(512, slots))


def tree_attention(problem, *, scale, window, interpret, config):
    """See `api.tree_attention`; returns out [B, K, M, D] in q's dtype and lse [B, K, M] float32.

    Raises NotImplementedError above 256 nodes.
    """
    u = problem.draft_k_BxKxUxD.shape[2]
    if u > MAX_NODES:
        raise NotImplementedError(f"tree_attention tpu: {u} nodes, at most {MAX_NODES} are served")
    if problem.q_BxKxMxD.dtype == jnp.float16:
        raise NotImplementedError("tree_attention tpu: no float16 on the matrix unit, use bfloat16")
    config = config or configure(problem.q_BxKxMxD.shape[2], problem.k_BxKxSxD.shape[2])
    return _tree_attention(problem, scale, window, config, interpreted("tpu", interpret))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _tree_attention(problem, scale, window, config, interpret):
    p = problem
    b, kv_heads, m, d = p.q_BxKxMxD.shape
    s, u = p.k_BxKxSxD.shape[2], p.draft_k_BxKxUxD.shape[2]
    _, t, w = p.bits_BxTxW.shape
    bm, bk = config
    # Blocks of a tile's own rows must be whole: pad the queries (small), never the cache.
    pad = -m % bm
    row = (jnp.arange(m + pad)) % t
    q = jnp.pad(p.q_BxKxMxD, ((0, 0), (0, 0), (0, pad), (0, 0)))
    # Nodes to whole tiles of 16 rows (a contraction over one row does not lower); -1: unseen.
    more = -u % 16
    draft = [
        jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))
        for x in (p.draft_k_BxKxUxD, p.draft_v_BxKxUxD)
    ]
    col_depths = jnp.pad(p.depths_BxU, ((0, 0), (0, more)), constant_values=-1)
    blocks = pl.cdiv(s, bk)
    reach = blocks if window is None else min(blocks, pl.cdiv(window, bk) + 1)

    def cache_block(b, h, r, j, lengths):
        first, last = _live_blocks(lengths[b], bk, window)
        return b, h, jnp.minimum(first + j, jnp.maximum(last - 1, 0)), 0

    squeezed = pl.squeezed
    of_rows = lambda *shape: pl.BlockSpec(  # noqa: E731
        (squeezed, bm, *shape), lambda b, h, r, j, _: (b, r, *(0 for _ in shape))
    )
    per_head_rows = lambda n: pl.BlockSpec(  # noqa: E731
        (squeezed, squeezed, bm, n), lambda b, h, r, j, _: (b, h, r, 0)
    )
    nodes = pl.BlockSpec((squeezed, squeezed, u + more, d), lambda b, h, r, j, _: (b, h, 0, 0))
    out, lse = pl.pallas_call(
        functools.partial(_body, scale=scale * LOG2E, window=window, block_keys=bk, words=w),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((*q.shape[:3], LANES), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, kv_heads, (m + pad) // bm, reach),
            in_specs=[
                per_head_rows(d),
                pl.BlockSpec((squeezed, squeezed, bk, d), cache_block),
                pl.BlockSpec((squeezed, squeezed, bk, d), cache_block),
                nodes,
                nodes,
                of_rows(w),
                of_rows(1),
                pl.BlockSpec((squeezed, 1, u + more), lambda b, h, r, j, _: (b, 0, 0)),
                pl.BlockSpec((squeezed, u + more, 1), lambda b, h, r, j, _: (b, 0, 0)),
            ],
            out_specs=[per_head_rows(d), per_head_rows(LANES)],
            scratch_shapes=[
                pltpu.VMEM((bm, LANES), jnp.float32),
                pltpu.VMEM((bm, LANES), jnp.float32),
                pltpu.VMEM((bm, d), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="tree_attention_tpu",
    )(
        p.lengths_B,
        q,
        p.k_BxKxSxD,
        p.v_BxKxSxD,
        *draft,
        p.bits_BxTxW[:, row],
        p.row_depths_BxT[:, row, None],
        col_depths[:, None, :],
        col_depths[:, :, None],
    )
    return out[:, :, :m], lse[:, :, :m, 0]


def _live_blocks(length, block_keys, window):
    """First block that any node sees and the end (exclusive) of the live ones."""
    bk = jnp.int32(block_keys)
    first = 0 if window is None else lax.div(jnp.maximum(length - window + 1, 0), bk)
    return first, lax.div(length + (bk - 1), bk)


def _body(
    lengths_ref, q_ref, k_ref, v_ref, dk_ref, dv_ref, bits_ref, row_depth_ref, col_depth_ref,
    seen_ref, out_ref, lse_ref, top_ref, total_ref, sum_ref, *, scale, window, block_keys, words,
):  # fmt: skip
    j = pl.program_id(3)
    bm = q_ref.shape[0]
    length = lengths_ref[pl.program_id(0)]

    @pl.when(j == 0)
    def _():
        top_ref[...] = jnp.full(top_ref.shape, NEGATIVE, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    def attend(keys, values, sees):
        _online_softmax(q_ref[...], keys, values, sees, top_ref, total_ref, sum_ref, scale)

    first, last = _live_blocks(length, block_keys, window)

    @pl.when(first + j < last)
    def _():
        start = (first + j) * block_keys
        slot = start + lax.broadcasted_iota(jnp.int32, (bm, block_keys), 1)
        slot_of_value = start + lax.broadcasted_iota(jnp.int32, (block_keys, 1), 0)
        sees, live = slot < length, slot_of_value < length
        if window is not None:
            sees &= slot > length - window + row_depth_ref[...]
            live &= slot_of_value > length - window
        attend(k_ref[...], _cleared(v_ref[...], live), sees)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        u = dk_ref.shape[0]
        col = lax.broadcasted_iota(jnp.int32, (bm, u), 1)
        sees = jnp.zeros((bm, u), jnp.int32)
        for word in range(words):  # static: TPUs have no gather
            bits = jnp.broadcast_to(bits_ref[:, word : word + 1], (bm, u))
            here = lax.shift_right_logical(bits, col & 31) & 1
            sees |= jnp.where(col >> 5 == word, here, 0)
        sees = sees == 1
        if window is not None:
            sees &= col_depth_ref[...] > row_depth_ref[...] - window
        attend(dk_ref[...], _cleared(dv_ref[...], seen_ref[...] >= 0), sees)
        total = total_ref[...]
        some = total > 0
        out_ref[...] = (sum_ref[...] / jnp.where(some, total, 1.0)[:, :1]).astype(out_ref.dtype)
        lse = top_ref[...] / LOG2E + jnp.log(jnp.where(some, total, 1.0))
        lse_ref[...] = jnp.where(some, lse, -jnp.inf)


def _cleared(values, live):
    """Values with dead rows zeroed: zero weight times NaN would be NaN."""
    return jnp.where(live, values.astype(jnp.float32), 0.0).astype(values.dtype)


def _online_softmax(q, keys, values, sees, top_ref, total_ref, sum_ref, scale):
    """One step of the running softmax in base 2; statistics are broadcast over 128 lanes."""
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = functools.partial(lax.dot_general, precision=exact, preferred_element_type=jnp.float32)
    logits = jnp.where(sees, dot(q, keys, (((1,), (1,)), ((), ()))) * scale, NEGATIVE)
    top = top_ref[...]
    new_top = jnp.maximum(top, jnp.max(logits, axis=1, keepdims=True))
    weights = jnp.where(sees, jnp.exp2(logits - new_top[:, :1]), 0.0)
    shrink = jnp.exp2(top - new_top)
    top_ref[...] = new_top
    total_ref[...] = total_ref[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    update = dot(weights.astype(values.dtype), values, (((1,), (0,)), ((), ())))
    sum_ref[...] = sum_ref[...] * shrink[:, :1] + update
