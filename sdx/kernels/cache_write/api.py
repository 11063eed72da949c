"""Cache write: the accepted path's keys and values move from the round into the cache, in place.

    fresh  [node 0 .. T-1]  --path[b, :counts[b]]-->  slots lengths[b] .. lengths[b] + counts[b]

B sequences, K key-value heads, S slots, T nodes, P longest path, D head size.
"""

from __future__ import annotations

from sdx.kernels.cache_write import pallas_triton, reference
from sdx.kernels.dispatch import dispatch

TABLE = {"reference": reference.cache_write, "triton": pallas_triton.cache_write}


def cache_write(
    keys_BxKxSxD,
    values_BxKxSxD,
    fresh_keys_BxKxTxD,
    fresh_values_BxKxTxD,
    path_BxP,
    counts_B,
    lengths_B,
    *,
    implementation: str | None = None,
    interpret: bool | None = None,
):
    """One layer's cache with fresh tokens `path[b, :counts[b]]` appended to sequence b.

    Writes past the last slot are dropped; sequences with count 0 are untouched. Under `jit` with
    donated caches nothing is copied. "auto" is XLA's scatter on every platform: the fused kernel
    (one launch for keys and values) has to be named until a measurement prefers it.

    Args:
      keys_BxKxSxD, values_BxKxSxD: the cache. fresh_*_BxKxTxD: the round's keys and values.
      path_BxP: node indices, int32; entries from counts_B on are ignored.
      counts_B, lengths_B: int32.

    Returns: (keys, values). Raises ValueError on shapes that do not fit.
    """
    b, k, _, d = keys_BxKxSxD.shape
    fresh = fresh_keys_BxKxTxD.shape
    if (fresh[0], fresh[1], fresh[3]) != (b, k, d) or fresh != fresh_values_BxKxTxD.shape:
        raise ValueError(f"fresh keys {fresh} do not fit a cache of shape {keys_BxKxSxD.shape}")
    if keys_BxKxSxD.shape != values_BxKxSxD.shape or path_BxP.shape[0] != b:
        raise ValueError(
            f"keys {keys_BxKxSxD.shape}, values {values_BxKxSxD.shape} and path {path_BxP.shape} "
            "do not describe the same sequences"
        )
    return dispatch(
        "cache_write",
        TABLE,
        "reference" if implementation in (None, "auto") else implementation,
        keys_BxKxSxD,
        values_BxKxSxD,
        fresh_keys_BxKxTxD.astype(keys_BxKxSxD.dtype),
        fresh_values_BxKxTxD.astype(values_BxKxSxD.dtype),
        path_BxP,
        counts_B,
        lengths_B,
        interpret=interpret,
    )
