"""Temperature, top-k and top-p as adjusted log-probabilities, without sorting.

Both filters are thresholds on the logit, and a threshold is found by bisection over the ordered
integer image of float32: 32 passes of counting are exact for any vocabulary, where sorting
[17, 128256] logits takes hundreds of milliseconds on a CPU. Ties at the threshold stay together:
the law does not depend on the order of equal logits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from sdx.records import Sampling

_SIGN = np.int32(-(2**31))


def ordered_bits(x: jax.Array) -> jax.Array:
    """int32 with the order of float32 (-inf lowest, +0 and -0 alike)."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.int32)
    return jnp.where(bits < 0, _SIGN - bits, bits)


def smallest(holds, shape: tuple[int, ...]) -> jax.Array:
    """The smallest int32 for which the monotone predicate `holds` (elementwise over `shape`).

    `holds` is false below and true from some integer on; it must hold at the largest int32.
    """
    low = jnp.full(shape, -(2**31), jnp.int32)
    high = jnp.full(shape, 2**31 - 1, jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        # The mean rounded down, without overflow: (low & high) + (low ^ high) / 2.
        middle = (low & high) + ((low ^ high) >> 1)
        true = holds(middle)
        return jnp.where(true, low, middle + 1), jnp.where(true, middle, high)

    return jax.lax.fori_loop(0, 32, halve, (low, high))[1]


def keep_top_k(logits: jax.Array, top_k: int) -> jax.Array:
    """True for the `top_k` largest of the last axis, and what ties with the last of them."""
    if top_k >= logits.shape[-1]:
        return jnp.ones(logits.shape, bool)
    keys = ordered_bits(logits)
    # The smallest key with fewer than k keys above it is the k-th largest.
    kth = smallest(lambda t: (keys > t[..., None]).sum(-1) < top_k, logits.shape[:-1])
    return keys >= kth[..., None]


def keep_top_p(logits: jax.Array, top_p: float) -> jax.Array:
    """True for the smallest set of likeliest tokens that holds at least mass `top_p` (nucleus,
    Holtzman et al. 2020): a token stays if the mass strictly above it is below `top_p`."""
    keys = ordered_bits(logits)
    mass = jax.nn.softmax(logits, axis=-1)
    above = lambda t: jnp.where(keys > t[..., None], mass, 0.0).sum(-1)  # noqa: E731
    threshold = smallest(lambda t: above(t) < top_p, logits.shape[:-1])
    return keys >= threshold[..., None]


def log_probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Adjusted, normalised log-probabilities over the last axis; filtered tokens are -inf.

    Temperature first, then top-k, then top-p on what is left. Temperature must be positive:
    greedy decoding needs no law (`logits.argmax`).
    """
    scaled = logits.astype(jnp.float32) / sampling.temperature
    if sampling.top_k:
        scaled = jnp.where(keep_top_k(scaled, sampling.top_k), scaled, -jnp.inf)
    if sampling.top_p < 1:
        scaled = jnp.where(keep_top_p(scaled, sampling.top_p), scaled, -jnp.inf)
    return jax.nn.log_softmax(scaled, axis=-1)


def best_token(logits: jax.Array) -> jax.Array:
    """int32 argmax over the last axis, the first of equals.

    As a maximum and the least index that attains it: two plain reductions, which a CPU vectorises;
    XLA's argmax carries value and index together and took four times as long.
    """
    V = logits.shape[-1]
    top = logits.max(-1, keepdims=True)
    index = jnp.where(logits == top, jnp.arange(V, dtype=jnp.int32), V)
    return jnp.minimum(index.min(-1), V - 1)  # a row of NaN must not leave the vocabulary


def best_tokens(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of the last axis, values and int32 indices, in falling order.

    A few rounds of `best_token`: `lax.top_k` sorts several rows on a CPU, 1 to 2 ms for
    [3, 2048]. Beyond 8, or elsewhere than on a CPU, it is the better choice.
    """
    if count > 8 or jax.default_backend() != "cpu":
        values, tokens = jax.lax.top_k(logits, count)
        return values, tokens.astype(jnp.int32)
    values, tokens = [], []
    for _ in range(count):
        token = best_token(logits)
        values.append(logits.max(-1))
        tokens.append(token)
        taken = jnp.arange(logits.shape[-1]) == token[..., None]
        logits = jnp.where(taken, -jnp.inf, logits)
    return jnp.stack(values, axis=-1), jnp.stack(tokens, axis=-1)


def check_sampling(sampling: Sampling) -> None:
    """Raises ValueError for a temperature, top-k or top-p that means nothing."""
    if not sampling.temperature >= 0:
        raise ValueError(f"temperature = {sampling.temperature}: must be 0 (greedy) or positive")
    if sampling.top_k < 0:
        raise ValueError(f"top_k = {sampling.top_k}: must be positive, or 0 to switch it off")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p = {sampling.top_p}: must lie in (0, 1]; 1 switches it off")
