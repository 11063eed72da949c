"""Tree attention: T draft nodes attend to a committed cache and to their ancestors.

    committed cache   [........ live ........|  dead  ]   lengths_B says where live ends
    draft nodes                                 [0 1 2 .. U-1]   tree bits say who sees whom

The draft's keys and values are operands of their own: nothing is written to the cache before
verification has decided which path survives (models.cache commits it). A chain is the tree whose
node i sees nodes 0..i (`tree_bits=None`). Queries are the last T of U nodes: U > T when nodes of
earlier passes of the same round are not committed yet.

Shape letters: B sequences, H query heads, K key-value heads (H = K * G), T query nodes, U draft
nodes (usually U = T), S cache slots, D head size, W = ceil(U / 32) words of 32 mask bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdx.kernels.dispatch import dispatch
from sdx.kernels.tree_attention import pallas_tpu, pallas_triton, reference

TABLE = {
    "reference": reference.tree_attention,
    "triton": pallas_triton.tree_attention,
    "tpu": pallas_tpu.tree_attention,
}
DTYPES = ("bfloat16", "float16", "float32")


class Problem(NamedTuple):
    """The operands as every implementation gets them.

    q_BxKxMxD: rows r = g * T + t of the G * T (head of the group, node) pairs, so that one key
    tile serves a whole group. Depth: ancestors of a node, itself not counted; its position is
    lengths + depth. In depths_BxU -1 marks a node that no query sees.
    """

    q_BxKxMxD: jax.Array
    k_BxKxSxD: jax.Array
    v_BxKxSxD: jax.Array
    draft_k_BxKxUxD: jax.Array
    draft_v_BxKxUxD: jax.Array
    lengths_B: jax.Array
    bits_BxTxW: jax.Array
    row_depths_BxT: jax.Array
    depths_BxU: jax.Array


def tree_attention(
    q_BxHxTxD,
    k_BxKxSxD,
    v_BxKxSxD,
    draft_k_BxKxUxD,
    draft_v_BxKxUxD,
    lengths_B,
    tree_bits_BxTxW=None,
    *,
    draft_depths_BxU=None,
    scale: float | None = None,
    window: int | None = None,
    return_log_sum_exp: bool = False,
    implementation: str | None = None,
    interpret: bool | None = None,
    config=None,
):
    """Softmax attention of the nodes over live cache and visible nodes.

    Args:
      q_BxHxTxD: queries, rotary embedding applied; heads h of one group are consecutive
        (h // G is the key-value head). bfloat16, float16 or float32.
      k_BxKxSxD, v_BxKxSxD: committed cache. Slots >= lengths_B may hold anything, NaN included.
      draft_k_BxKxUxD, draft_v_BxKxUxD: the nodes' own keys and values. A node that no query sees
        may hold anything.
      lengths_B: live slots per sequence, 0..S, int32.
      tree_bits_BxTxW: bit j % 32 of word j // 32 of row i is set iff node i sees node j (ancestors
        and itself: `ancestor_bits`, `pack_tree_mask`); leading axis 1 is broadcast. None: a chain.
      draft_depths_BxU: ancestors of each node; needed for a window if U > T.
      scale: of the logits; 1 / sqrt(D) by default.
      window: sliding window: a node sees positions p with 0 <= own position - p < window.
      return_log_sum_exp: also return the natural log-sum-exp of the scaled logits.
      implementation: None or "auto", "reference", "triton", "tpu".
      interpret: interpret a Pallas body; None: exactly where it cannot be compiled.
      config: an implementation's own tile sizes; None: its heuristic.

    Returns:
      out_BxHxTxD in q's dtype, and if asked lse_BxHxT float32. A node that sees nothing gets 0 and
      -inf.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      NotImplementedError: a named implementation cannot serve them.
    """
    b, h, t, d = q_BxHxTxD.shape
    _check(q_BxHxTxD, k_BxKxSxD, v_BxKxSxD, draft_k_BxKxUxD, draft_v_BxKxUxD, lengths_B, window)
    kv_heads, u = draft_k_BxKxUxD.shape[1:3]
    bits = _mask_bits(tree_bits_BxTxW, b, t, u)
    if window is not None and u != t and draft_depths_BxU is None:
        raise ValueError(f"{t} queries among {u} nodes and a window: give draft_depths_BxU")
    problem = Problem(
        q_BxHxTxD.reshape(b, kv_heads, h // kv_heads * t, d),
        k_BxKxSxD,
        v_BxKxSxD,
        draft_k_BxKxUxD,
        draft_v_BxKxUxD,
        jnp.asarray(lengths_B, jnp.int32),
        bits,
        *_depths(bits, u, draft_depths_BxU),
    )
    out, lse = dispatch(
        "tree_attention",
        TABLE,
        implementation,
        problem,
        scale=1 / math.sqrt(d) if scale is None else float(scale),
        window=window,
        interpret=interpret,
        config=config,
    )
    out = out.reshape(b, h, t, d)
    return (out, lse.reshape(b, h, t)) if return_log_sum_exp else out


def words(nodes: int) -> int:
    """32-bit words that hold `nodes` mask bits."""
    return max(1, -(-nodes // 32))


def ancestor_bits(parents) -> np.ndarray:
    """Mask bits `[T, W]` int32 of a tree in topological order; parent -1: a root.

    Raises ValueError if a parent does not come before its child.
    """
    parents = list(parents)
    t = len(parents)
    sees = np.eye(t, dtype=bool)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"parent {parent} of node {node} does not come before it: "
                "list the nodes in topological order, -1 for a root"
            )
        if parent >= 0:
            sees[node] |= sees[parent]
    padded = np.zeros((t, words(t) * 32), np.uint64)
    padded[:, :t] = sees
    packed = (padded.reshape(t, -1, 32) << np.arange(32, dtype=np.uint64)).sum(-1)
    return packed.astype(np.uint32).view(np.int32)


def pack_tree_mask(sees_TxU) -> jax.Array:
    """Mask bits `[..., T, W]` int32 of a boolean `[..., T, U]` (row sees column); traceable."""
    sees = jnp.asarray(sees_TxU, bool)
    t = sees.shape[-1]
    pad = [(0, 0)] * (sees.ndim - 1) + [(0, words(t) * 32 - t)]
    grouped = jnp.pad(sees, pad).reshape(*sees.shape[:-1], words(t), 32).astype(jnp.uint32)
    # Distinct powers of two: the sum is the bitwise or.
    packed = (grouped << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(packed, jnp.int32)


def _mask_bits(tree_bits_BxTxW, b: int, t: int, u: int):
    """`[B, T, W]`; of None, the last t nodes of a chain of u."""
    if tree_bits_BxTxW is None:
        bits = jnp.asarray(ancestor_bits(range(-1, u - 1))[u - t :])[None]
    else:
        bits = jnp.asarray(tree_bits_BxTxW)
        if bits.shape[1:] != (t, words(u)) or bits.shape[0] not in (1, b):
            raise ValueError(
                f"tree bits have shape {bits.shape}, {t} of {u} nodes of {b} sequences need "
                f"({b} or 1, {t}, {words(u)}): build them with pack_tree_mask or ancestor_bits"
            )
    return jnp.broadcast_to(bits.astype(jnp.int32), (b, t, words(u)))


def _depths(bits_BxTxW, u: int, draft_depths_BxU):
    """Depths of the queries and of all nodes, -1 for nodes that no query sees."""
    node = np.arange(u)
    seen_BxU = (lax.reduce_or(bits_BxTxW, (1,))[:, node // 32] >> (node % 32)) & 1 == 1
    rows_BxT = lax.population_count(bits_BxTxW).sum(-1).astype(jnp.int32) - 1
    rows_BxT = jnp.maximum(rows_BxT, 0)
    if draft_depths_BxU is None:
        # Without a window depths only mark who is seen, so any number >= 0 will do for U > T.
        same = rows_BxT.shape[1] == u
        draft_depths_BxU = rows_BxT if same else jnp.zeros(seen_BxU.shape, jnp.int32)
    return rows_BxT, jnp.where(seen_BxU, draft_depths_BxU, -1).astype(jnp.int32)


def _check(q, k, v, dk, dv, lengths, window):
    b, h, t, d = q.shape
    kv_heads = k.shape[1]
    shapes = {"keys": k.shape, "draft keys": dk.shape}
    if k.shape != v.shape or dk.shape != dv.shape:
        raise ValueError(
            f"keys and values differ in shape: {k.shape} {v.shape} {dk.shape} {dv.shape}"
        )
    u = dk.shape[2]
    if k.shape[0] != b or k.shape[3] != d or dk.shape != (b, kv_heads, u, d) or u < t:
        raise ValueError(f"queries {q.shape} do not fit {shapes}: expected [B, heads, slots, D]")
    if h % kv_heads:
        raise ValueError(f"{h} query heads are not a multiple of {kv_heads} key-value heads")
    if q.dtype.name not in DTYPES or len({x.dtype for x in (q, k, v, dk, dv)}) > 1:
        raise ValueError(
            f"dtypes {[x.dtype.name for x in (q, k, v, dk, dv)]}: all five operands need the same, "
            f"one of {', '.join(DTYPES)}"
        )
    if jnp.shape(lengths) != (b,):
        raise ValueError(f"lengths have shape {jnp.shape(lengths)}, expected ({b},)")
    if window is not None and window < 1:
        raise ValueError(f"window {window} hides every key: give at least 1, or None")
