"""Cache write for NVIDIA GPUs: keys and values of one layer in one launch, in place.

Grid (B * K, P): a program moves one token of one head. The caches are aliased to the outputs, so
only the accepted tokens are touched.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from sdx.kernels.dispatch import interpreted
from sdx.kernels.lanes import padded_lanes


def cache_write(
    keys, values, fresh_keys, fresh_values, path_BxP, counts_B, lengths_B, *, interpret
):
    """See `api.cache_write`."""
    arrays = (keys, values, fresh_keys, fresh_values, path_BxP, counts_B, lengths_B)
    return _cache_write(arrays, interpreted("triton", interpret))


@functools.partial(jax.jit, static_argnums=1)
def _cache_write(arrays, interpret):
    keys, values, fresh_keys, fresh_values, path_BxP, counts_B, lengths_B = arrays
    b, heads, slots, d = keys.shape
    p = path_BxP.shape[1]

    def owner(i):
        return lax.div(i, jnp.int32(heads)), lax.rem(i, jnp.int32(heads))

    head = lambda n: pl.BlockSpec(  # noqa: E731
        (pl.squeezed, pl.squeezed, n, d), lambda i, j: (*owner(i), 0, 0)
    )
    row = lambda n: pl.BlockSpec((pl.squeezed, n), lambda i, j: (owner(i)[0], 0))  # noqa: E731
    t = fresh_keys.shape[2]
    out = pl.pallas_call(
        functools.partial(_body, head_size=d, slots=slots),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)],
        grid=(b * heads, p),
        in_specs=[head(slots), head(slots), head(t), head(t), row(p), row(1), row(1)],
        out_specs=[head(slots), head(slots)],
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="cache_write_triton",
    )(
        keys, values, fresh_keys, fresh_values,
        path_BxP.astype(jnp.int32), counts_B[:, None], lengths_B[:, None],
    )  # fmt: skip
    return tuple(out)


def _body(
    keys_ref, values_ref, fresh_keys_ref, fresh_values_ref, path_ref, count_ref, length_ref,
    out_keys_ref, out_values_ref, *, head_size, slots,
):  # fmt: skip
    del keys_ref, values_ref  # the same memory as the outputs
    step = pl.program_id(1)
    slot = length_ref[0] + step
    live = (step < count_ref[0]) & (slot < slots)
    lanes = padded_lanes(head_size)
    lane_ok = lax.broadcasted_iota(jnp.int32, (lanes.size,), 0) < head_size
    # Masked programs address slot 0 and write nothing.
    node, slot = jnp.where(live, path_ref[step], 0), jnp.where(live, slot, 0)
    for fresh_ref, out_ref in ((fresh_keys_ref, out_keys_ref), (fresh_values_ref, out_values_ref)):
        token = plt.load(fresh_ref.at[node, lanes], mask=lane_ok & live, other=0)
        plt.store(out_ref.at[slot, lanes], token, mask=lane_ok & live)
