"""Tree attention: T draft nodes attend to a committed cache and to their ancestors.

    committed cache   [........ live ........|  dead  ]   lengths_B says where live ends
    draft nodes                                 [0 1 2 .. T-1]   tree bits say who sees whom

The draft's keys and values are operands of their own: nothing is written to the cache before
verification has decided which path survives (models.cache commits it). A chain is the tree whose
node i sees nodes 0..i (`tree_bits=None`).

Shape letters: B sequences, H query heads, K key-value heads (H = K * G), T nodes, S cache slots,
D head size, W = ceil(T / 32) words of 32 mask bits.
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
    tile serves a whole group. depths_BxT: ancestors of each node, itself not counted (its position
    is lengths + depth); -1 marks a node that no node sees.
    """

    q_BxKxMxD: jax.Array
    k_BxKxSxD: jax.Array
    v_BxKxSxD: jax.Array
    draft_k_BxKxTxD: jax.Array
    draft_v_BxKxTxD: jax.Array
    lengths_B: jax.Array
    bits_BxTxW: jax.Array
    depths_BxT: jax.Array


def tree_attention(
    q_BxHxTxD,
    k_BxKxSxD,
    v_BxKxSxD,
    draft_k_BxKxTxD,
    draft_v_BxKxTxD,
    lengths_B,
    tree_bits_BxTxW=None,
    *,
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
      draft_k_BxKxTxD, draft_v_BxKxTxD: the nodes' own keys and values. A node that no node sees
        may hold anything.
      lengths_B: live slots per sequence, 0..S, int32.
      tree_bits_BxTxW: bit j % 32 of word j // 32 of row i is set iff node i sees node j (ancestors
        and itself: `ancestor_bits`, `pack_tree_mask`); leading axis 1 is broadcast. None: a chain.
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
    _check(q_BxHxTxD, k_BxKxSxD, v_BxKxSxD, draft_k_BxKxTxD, draft_v_BxKxTxD, lengths_B, window)
    kv_heads = k_BxKxSxD.shape[1]
    if tree_bits_BxTxW is None:
        bits = jnp.asarray(ancestor_bits(range(-1, t - 1)))[None]
    else:
        bits = jnp.asarray(tree_bits_BxTxW)
        if bits.shape[1:] != (t, words(t)) or bits.shape[0] not in (1, b):
            raise ValueError(
                f"tree bits have shape {bits.shape}, {t} nodes of {b} sequences need "
                f"({b} or 1, {t}, {words(t)}): build them with pack_tree_mask or ancestor_bits"
            )
    bits = jnp.broadcast_to(bits.astype(jnp.int32), (b, t, words(t)))
    problem = Problem(
        q_BxHxTxD.reshape(b, kv_heads, h // kv_heads * t, d),
        k_BxKxSxD,
        v_BxKxSxD,
        draft_k_BxKxTxD,
        draft_v_BxKxTxD,
        jnp.asarray(lengths_B, jnp.int32),
        bits,
        _depths(bits),
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


def pack_tree_mask(sees_TxT) -> jax.Array:
    """Mask bits `[..., T, W]` int32 of a boolean mask `[..., T, T]` (row sees column); traceable."""
    sees = jnp.asarray(sees_TxT, bool)
    t = sees.shape[-1]
    pad = [(0, 0)] * (sees.ndim - 1) + [(0, words(t) * 32 - t)]
    grouped = jnp.pad(sees, pad).reshape(*sees.shape[:-1], words(t), 32).astype(jnp.uint32)
    # Distinct powers of two: the sum is the bitwise or.
    packed = (grouped << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(packed, jnp.int32)


def _depths(bits_BxTxW):
    t = bits_BxTxW.shape[1]
    node = np.arange(t)
    seen = jax.lax.reduce_or(bits_BxTxW, (1,))[:, node // 32] >> (node % 32) & 1
    ancestors = lax.population_count(bits_BxTxW).sum(-1).astype(jnp.int32) - 1
    return jnp.where(seen == 1, jnp.maximum(ancestors, 0), -1)


def _check(q, k, v, dk, dv, lengths, window):
    b, h, t, d = q.shape
    kv_heads = k.shape[1]
    shapes = {"keys": k.shape, "draft keys": dk.shape}
    if k.shape != v.shape or dk.shape != dv.shape:
        raise ValueError(
            f"keys and values differ in shape: {k.shape} {v.shape} {dk.shape} {dv.shape}"
        )
    if k.shape[0] != b or k.shape[3] != d or dk.shape != (b, kv_heads, t, d):
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
