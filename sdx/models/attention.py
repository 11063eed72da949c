"""Attention of a decoder, to the cache and without one.

Legend: B batch, T fresh tokens, S cache slots, H query heads, K key heads, G = H / K, E head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sdx.kernels import pack_tree_mask, tree_attention, wanted

MAX_NODES = 256  # what the kernels serve; longer passes are prompts, not verification
NEGATIVE = -1e30  # a masked score; finite, so that a fully masked row has no NaN


def cached_attention(
    q_BxTxHxE: jax.Array,
    fresh_key_BxKxTxE: jax.Array,
    fresh_value_BxKxTxE: jax.Array,
    key: jax.Array,
    value_BxKxSxE: jax.Array,
    lengths_B: jax.Array,
    mask_BxTxT: jax.Array,
    positions_BxT: jax.Array,
    window: int = 0,
    *,
    slots_last: bool = False,
    kernels: str = "auto",
) -> jax.Array:
    """Fresh tokens attend to the live cache slots and to the fresh tokens that `mask` allows.

    With a `window` a token sees that many positions only, its own included (0: all). Slot s holds
    position s. `key` is `[B, K, S, E]`, or `[B, K, E, S]` with `slots_last`.
    kernels: which implementation of `sdx.kernels.tree_attention` runs; "auto" on a CPU is the form
    below, which is faster there.
    """
    B, T, H, E = q_BxTxHxE.shape
    K, S = value_BxKxSxE.shape[1:3]
    if wanted(kernels) and fresh_key_BxKxTxE.shape[2] <= MAX_NODES:
        out_BxHxTxE = tree_attention(
            jnp.moveaxis(q_BxTxHxE, 2, 1),
            jnp.swapaxes(key, 2, 3) if slots_last else key,
            value_BxKxSxE,
            fresh_key_BxKxTxE,
            fresh_value_BxKxTxE,
            lengths_B,
            pack_tree_mask(mask_BxTxT),
            window=window or None,
            implementation=kernels,
        )
        return jnp.moveaxis(out_BxHxTxE, 1, 2).reshape(B, T, H * E)
    q = jnp.moveaxis(q_BxTxHxE.reshape(B, T, K, H // K, E) * E**-0.5, 1, 3)  # B K G T E
    stored = "bkes" if slots_last else "bkse"
    old = jnp.einsum(f"bkgte,{stored}->bkgts", q, key)
    new = jnp.einsum("bkgte,bkue->bkgtu", q, fresh_key_BxKxTxE)
    live_BxS = jnp.arange(S) < lengths_B[:, None]
    live = live_BxS[:, None, None, None, :]
    if window:
        first_BxT = positions_BxT - window + 1
        live &= jnp.arange(S) >= first_BxT[:, None, None, :, None]
        mask_BxTxT &= positions_BxT[:, None, :] >= first_BxT[:, :, None]
    old = jnp.where(live, old, NEGATIVE)
    new = jnp.where(mask_BxTxT[:, None, None], new, NEGATIVE)
    top = jnp.maximum(old.max(-1, keepdims=True), new.max(-1, keepdims=True))
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = old.sum(-1, keepdims=True) + new.sum(-1, keepdims=True)
    out = jnp.einsum("bkgts,bkse->bkgte", old, value_BxKxSxE)
    out = out + jnp.einsum("bkgtu,bkue->bkgte", new, fresh_value_BxKxTxE)
    return jnp.moveaxis(out / total, 3, 1).reshape(B, T, H * E)


def causal_attention(
    q_BxTxHxE: jax.Array,
    k_BxTxKxE: jax.Array,
    v_BxTxKxE: jax.Array,
    block: int = 64,
    window: int = 0,
) -> jax.Array:
    """Attention of a whole sequence to itself, without a cache (training).

    In blocks of queries that see only the keys up to their end: half the work of a masked square,
    and a block of scores fits in the processor's cache.
    """
    B, T, H, E = q_BxTxHxE.shape
    K = k_BxTxKxE.shape[2]
    q_BxKxGxTxE = jnp.moveaxis(q_BxTxHxE.reshape(B, T, K, H // K, E) * E**-0.5, 1, 3)
    k_BxKxExT = jnp.moveaxis(k_BxTxKxE, 1, 3)
    v_BxKxTxE = jnp.moveaxis(v_BxTxKxE, 1, 2)
    blocks = []
    for start in range(0, T, block):
        stop = min(start + block, T)
        scores = jnp.einsum(
            "bkgte,bkes->bkgts", q_BxKxGxTxE[:, :, :, start:stop], k_BxKxExT[..., :stop]
        )
        seen = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
        if window:
            seen &= jnp.arange(start, stop)[:, None] - jnp.arange(stop) < window
        scores = jnp.where(seen, scores, NEGATIVE)
        # The shift cancels between numerator and sum: no gradient needs to pass through it.
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        attended = jnp.einsum("bkgts,bkse->bkgte", weights, v_BxKxTxE[:, :, :stop])
        blocks.append(attended / weights.sum(-1, keepdims=True))
    return jnp.moveaxis(jnp.concatenate(blocks, axis=3), 3, 1).reshape(B, T, H * E)
