"""Gumbel noise from a counter: the same bits in every implementation, made where they are used.

Threefry-2x32 with 20 rounds (Salmon et al. 2011): additions, shifts and exclusive ors only, so it
lowers inside any kernel. Noise at token x of a row depends on that row's seed and on x alone: not
on the tile, the split, the batch.
"""

import jax.numpy as jnp
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(key0, key1, counter0, counter1):
    """20 rounds on uint32 arrays of one shape; returns two uint32 arrays."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(_PARITY))
    x0, x1 = counter0 + keys[0], counter1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def gumbel(seed0, seed1, index):
    """Standard Gumbel noise, float32, at `index` (int32); the seeds are uint32 and broadcast.

    -ln E with E = -ln(1 - v), v uniform on multiples of 2**-31: small E, which decides rare
    tokens, keeps its relative precision (a uniform near 1 would have 24 bits in all).
    """
    seed0, seed1 = (jnp.broadcast_to(seed, index.shape) for seed in (seed0, seed1))
    counter = lax.convert_element_type(index, jnp.uint32)
    bits, _ = threefry(seed0, seed1, counter, jnp.zeros(index.shape, jnp.uint32))
    whole = lax.convert_element_type(bits >> jnp.uint32(1), jnp.int32)
    v = (lax.convert_element_type(whole, jnp.float32) + 0.5) * jnp.float32(2.0**-31)
    v = jnp.minimum(v, jnp.float32(1 - 2.0**-24))  # the conversion may have rounded up to 1
    return -jnp.log(-jnp.log1p(-v))
