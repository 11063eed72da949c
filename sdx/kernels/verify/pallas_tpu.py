"""The three streams of verify for TPUs.

Grid (blocks of 8 rows, tiles of the vocabulary), the second axis sequential: running statistics
stay in the output block, one number per row broadcast over 128 lanes. Rows that are not in order
are gathered by XLA first (one row per sequence: small). Padded tails of rows and tokens are masked.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sdx.kernels.dispatch import interpreted
from sdx.kernels.verify.laws import (
    BINS,
    NEGATIVE,
    Statistics,
    Surplus,
    log_or_least,
    probability,
)
from sdx.kernels.verify.noise import gumbel

BIG = 2**31 - 1
LANES = 128


class Config(NamedTuple):
    """Rows and tokens of one tile."""

    rows: int = 8
    block: int = 4096


def statistics(logits_RxV, inverse_temperature_R, *, interpret=None, config=None):
    """See `reference.statistics`."""
    interpret = interpreted("tpu", interpret)
    return _statistics(logits_RxV, inverse_temperature_R, config or Config(), interpret)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _statistics(logits_RxV, inverse_temperature_R, config, interpret):
    top, best, total = _stream(
        _statistics_body,
        "verify_statistics_tpu",
        config,
        interpret,
        [jnp.float32, jnp.int32, jnp.float32],
        [logits_RxV],
        [inverse_temperature_R[:, None]],
    )
    return Statistics(top[:, 0], best[:, 0], total[:, 0])


def _statistics_body(x_ref, scale_ref, top_ref, best_ref, total_ref, *, vocab):
    @pl.when(pl.program_id(1) == 0)
    def _():
        top_ref[...] = jnp.full(top_ref.shape, NEGATIVE, jnp.float32)
        best_ref[...] = jnp.zeros(best_ref.shape, jnp.int32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    index, inside = _tile(x_ref.shape, vocab)
    x = jnp.where(inside, x_ref[...].astype(jnp.float32), -jnp.inf)
    scale = scale_ref[...]
    high = jnp.max(x, axis=1, keepdims=True)
    top = top_ref[...]
    new_top = jnp.maximum(top, high)
    terms = jnp.where(inside, jnp.exp((x - new_top[:, :1]) * scale), 0.0)
    shrink = jnp.exp((top - new_top) * scale)
    total_ref[...] = total_ref[...] * shrink + jnp.sum(terms, axis=1, keepdims=True)
    first = jnp.min(jnp.where(x == high, index, BIG), axis=1, keepdims=True)
    best_ref[...] = jnp.where(high > top, first, best_ref[...])
    top_ref[...] = new_top


def tails(logits_RxV, top_R, inverse_temperature_R, cuts_RxJ, *, interpret=None, config=None):
    """See `reference.tails`; J is 16."""
    if cuts_RxJ.shape[1] != BINS:
        raise NotImplementedError(f"verify tpu: {cuts_RxJ.shape[1]} cuts, exactly {BINS} served")
    interpret = interpreted("tpu", interpret)
    return _tails(logits_RxV, top_R, inverse_temperature_R, cuts_RxJ, config or Config(), interpret)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _tails(logits_RxV, top_R, inverse_temperature_R, cuts_RxJ, config, interpret):
    row = jnp.stack([top_R, inverse_temperature_R], 1)
    counts, masses = _stream(
        _tails_body,
        "verify_tails_tpu",
        config,
        interpret,
        [jnp.float32, jnp.float32],
        [logits_RxV],
        [row, cuts_RxJ],
    )
    return counts[:, :BINS], masses[:, :BINS]


def _tails_body(x_ref, row_ref, cuts_ref, counts_ref, masses_ref, *, vocab):
    @pl.when(pl.program_id(1) == 0)
    def _():
        counts_ref[...] = jnp.zeros(counts_ref.shape, jnp.float32)
        masses_ref[...] = jnp.zeros(masses_ref.shape, jnp.float32)

    _, inside = _tile(x_ref.shape, vocab)
    x = x_ref[...].astype(jnp.float32)
    mass = jnp.exp((x - row_ref[:, :1]) * row_ref[:, 1:2])
    lane = lax.broadcasted_iota(jnp.int32, counts_ref.shape, 1)
    counts, masses = counts_ref[...], masses_ref[...]
    for j in range(BINS):  # bin j's result goes to lane j
        over = inside & (x >= cuts_ref[:, j : j + 1])
        count = jnp.sum(jnp.where(over, 1.0, 0.0), axis=1, keepdims=True)
        share = jnp.sum(jnp.where(over, mass, 0.0), axis=1, keepdims=True)
        counts += jnp.where(lane == j, count, 0.0)
        masses += jnp.where(lane == j, share, 0.0)
    counts_ref[...], masses_ref[...] = counts, masses


def surplus(target, draft, request, seeds_Nx2, noise_NxV, *, interpret=None, config=None):
    """See `api.surplus`."""
    interpret = interpreted("tpu", interpret)
    return _surplus(target, draft, request, seeds_Nx2, noise_NxV, config or Config(), interpret)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _surplus(target, draft, request, seeds_Nx2, noise_NxV, config, interpret):
    wide = [target.logits_RxV[request.target_rows_N]]
    numbers = [request.weight_N, request.c_N]

    def scalars(law, rows):
        return [law.inverse_temperature_R[rows], law.log_normaliser_R[rows], law.threshold_R[rows]]

    numbers += scalars(target, request.target_rows_N)
    if draft is not None:
        wide.append(draft.logits_RxV[request.draft_rows_N])
        numbers += scalars(draft, request.draft_rows_N)
    narrow = [jnp.stack(numbers, 1).astype(jnp.float32), request.excluded_NxK]
    if seeds_Nx2 is not None:
        narrow.append(lax.bitcast_convert_type(seeds_Nx2.astype(jnp.uint32), jnp.int32))
    elif noise_NxV is not None:
        wide.append(noise_NxV)
    body = functools.partial(
        _surplus_body,
        drafted=draft is not None,
        seeded=seeds_Nx2 is not None,
        noisy=noise_NxV is not None,
    )
    outputs = [jnp.float32] * 3 + [jnp.float32, jnp.int32] * 2
    found = _stream(body, "verify_surplus_tpu", config, interpret, outputs, wide, narrow)
    mass, left, undrawn, score, token, left_score, left_token = (f[:, 0] for f in found)
    return Surplus(mass, left, undrawn, token, score, left_token, left_score)


def _surplus_body(*refs, vocab, drafted, seeded, noisy):
    refs = list(refs)
    p_ref = refs.pop(0)
    q_ref = refs.pop(0) if drafted else None
    noise_ref = refs.pop(0) if noisy else None
    numbers, excluded_ref = refs.pop(0), refs.pop(0)
    seed_ref = refs.pop(0) if seeded else None
    mass_ref, left_ref, undrawn_ref, score_ref, token_ref, left_score_ref, left_token_ref = refs

    @pl.when(pl.program_id(1) == 0)
    def _():
        for ref in (mass_ref, left_ref, undrawn_ref):
            ref[...] = jnp.zeros(ref.shape, jnp.float32)
        for ref in (score_ref, left_score_ref):
            ref[...] = jnp.full(ref.shape, 4 * NEGATIVE, jnp.float32)
        for ref in (token_ref, left_token_ref):
            ref[...] = jnp.zeros(ref.shape, jnp.int32)

    index, inside = _tile(p_ref.shape, vocab)
    keep = inside
    for k in range(excluded_ref.shape[1]):
        keep &= index != excluded_ref[:, k : k + 1]

    def law(ref, first):
        columns = (numbers[:, first + i : first + i + 1] for i in range(3))
        return jnp.where(keep, probability(ref[...].astype(jnp.float32), *columns), 0.0)

    p = law(p_ref, 2)
    r = numbers[:, 0:1] * p
    if drafted:
        q = law(q_ref, 5)
        r -= numbers[:, 1:2] * q
        undrawn_ref[...] += jnp.sum(q, axis=1, keepdims=True)
    r = jnp.maximum(r, 0.0)
    mass_ref[...] += jnp.sum(r, axis=1, keepdims=True)
    left_ref[...] += jnp.sum(p, axis=1, keepdims=True)
    if not seeded and not noisy:
        return
    if seeded:
        seeds = lax.bitcast_convert_type(seed_ref[...], jnp.uint32)
        noise = gumbel(seeds[:, 0:1], seeds[:, 1:2], index)
    else:
        noise = noise_ref[...]
    for weights, best_ref, at_ref in (
        (r, score_ref, token_ref),
        (p, left_score_ref, left_token_ref),
    ):
        scores = jnp.where(inside, log_or_least(weights) + noise, 2 * NEGATIVE)
        high = jnp.max(scores, axis=1, keepdims=True)
        first = jnp.min(jnp.where(scores == high, index, BIG), axis=1, keepdims=True)
        at_ref[...] = jnp.where(high > best_ref[...], first, at_ref[...])
        best_ref[...] = jnp.maximum(best_ref[...], high)


def _stream(body, name, config, interpret, outputs, wide, narrow):
    """Runs `body` over [rows, V] operands in tiles; `narrow` operands are whole per row block."""
    rows, vocab = wide[0].shape
    height, block = config.rows, min(config.block, vocab)
    tile = pl.BlockSpec((height, block), lambda i, j: (i, j))
    per_row = lambda width: pl.BlockSpec((height, width), lambda i, j: (i, 0))  # noqa: E731
    # Whole row blocks: padded rows hold zeros, are computed and dropped (small operands only;
    # the wide ones are padded by the pipeline).
    extra = -rows % height
    narrow = [jnp.pad(x, ((0, extra), (0, 0))) for x in narrow]
    found = pl.pallas_call(
        functools.partial(body, vocab=vocab),
        out_shape=[jax.ShapeDtypeStruct((rows + extra, LANES), d) for d in outputs],
        grid=(pl.cdiv(rows, height), pl.cdiv(vocab, block)),
        in_specs=[tile] * len(wide) + [per_row(x.shape[1]) for x in narrow],
        out_specs=[per_row(LANES)] * len(outputs),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name=name,
    )(*wide, *narrow)
    return [f[:rows] for f in found]


def _tile(shape, vocab):
    index = pl.program_id(1) * shape[1] + lax.broadcasted_iota(jnp.int32, shape, 1)
    return index, index < vocab
