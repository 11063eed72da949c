"""Rows of any size in Triton, whose blocks are powers of two."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


def padded_lanes(size: int):
    """The slice from 0 over the next power of two: the caller masks what lies beyond `size`.

    JAX 0.12 refuses a constant slice that leaves the array, so its start is no constant then.
    """
    width = pl.next_power_of_2(size)
    return pl.ds(0 if width == size else lax.full((), 0, jnp.int32), width)
