"""Tree attention in plain JAX: the truth the kernels are held against, and the CPU's own form."""

import functools

import jax
import jax.numpy as jnp
from jax import lax


def tree_attention(problem, *, scale, window, interpret, config):
    """See `api.tree_attention`; returns out [B, K, M, D] in q's dtype and lse [B, K, M] float32."""
    del interpret, config  # nothing to interpret, no tiles
    return _tree_attention(problem, scale, window)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _tree_attention(p, scale, window):
    t, s = p.bits_BxTxW.shape[1], p.k_BxKxSxD.shape[2]
    m = p.q_BxKxMxD.shape[2]
    in_cache, in_tree = visible(p, s, window)
    rows = jnp.arange(m) % t  # row r is node r % T of head r // T of the group
    sees = jnp.concatenate([in_cache, in_tree], -1)[:, rows][:, None]
    # Zero times NaN is NaN: values that nobody sees are cleared, not just given no weight.
    live = sees.any(2)[..., None]
    keys = jnp.concatenate([p.k_BxKxSxD, p.draft_k_BxKxUxD], 2).astype(jnp.float32)
    values = jnp.concatenate([p.v_BxKxSxD, p.draft_v_BxKxUxD], 2).astype(jnp.float32)
    values = jnp.where(live, values, 0.0)
    q = p.q_BxKxMxD.astype(jnp.float32)
    logits = scale * jnp.einsum("bkmd,bksd->bkms", q, keys, precision=lax.Precision.HIGHEST)
    logits = jnp.where(sees, logits, -jnp.inf)
    top = jnp.max(logits, -1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)  # a row that sees nothing: exp(-inf - 0) = 0
    weights = jnp.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("bkms,bksd->bkmd", weights, values, precision=lax.Precision.HIGHEST)
    out = out / jnp.where(total > 0, total, 1.0)
    return out.astype(p.q_BxKxMxD.dtype), (top + jnp.log(total))[..., 0]


def visible(p, slots: int, window: int | None):
    """Boolean masks [B, T, S] over the cache and [B, T, U] over the nodes."""
    node, slot = jnp.arange(p.depths_BxU.shape[1]), jnp.arange(slots)
    in_tree = (p.bits_BxTxW[:, :, node // 32] >> (node % 32)) & 1 == 1
    in_cache = jnp.broadcast_to(slot < p.lengths_B[:, None, None], (*in_tree.shape[:2], slots))
    if window is not None:
        own = (p.lengths_B[:, None] + p.row_depths_BxT)[..., None]
        in_cache = in_cache & (slot > own - window)
        in_tree = in_tree & (p.depths_BxU[:, None, :] > p.row_depths_BxT[..., None] - window)
    return in_cache, in_tree
