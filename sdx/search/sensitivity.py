"""What to improve next, and how sure we are: elasticities and intervals of a design."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def _label(path) -> str:
    parts = []
    for key in path:
        parts.append(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))))
    return ".".join(parts)


def elasticities(gradient, arguments, *rest) -> dict[str, float]:
    """d ln score / d ln theta for every positive number in the pytree `arguments`, largest first.

    `gradient(arguments, *rest)` is the gradient of ln score, a pytree like `arguments`. +0.5 on
    "hardware.memory_bandwidth_bytes_per_second": one percent more of it gives half a percent more.
    """
    slopes = gradient(arguments, *rest)
    leaves, _ = jax.tree_util.tree_flatten_with_path(arguments)
    found = {}
    for (path, leaf), slope in zip(leaves, jax.tree.leaves(slopes), strict=True):
        value = np.asarray(leaf)
        if value.ndim or not np.issubdtype(np.asarray(slope).dtype, np.floating):
            continue
        share = float(slope) * float(value)
        if np.isfinite(share) and share != 0.0:
            found[_label(path)] = share
    return dict(sorted(found.items(), key=lambda item: -abs(item[1])))


def scalars_to_float64(tree):
    """Numbers of a pytree as float64 scalars, so that every one of them can be differentiated."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)
