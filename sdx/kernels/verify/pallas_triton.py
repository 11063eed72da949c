"""The three streams of verify for NVIDIA GPUs.

Grid (rows, splits): a program streams its share of one row in tiles and leaves a handful of
numbers, merged by a small XLA fusion. Rows are addressed through a row index, so that one row in
many is read in place. Tail tiles are masked: Triton does not bounds-check them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

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


class Config(NamedTuple):
    """Tokens per tile (a power of two), programs per row, warps per program."""

    block: int
    splits: int
    num_warps: int


def configure(rows: int, vocab: int, block: int) -> Config:
    """Four programs for each of 132 processors, but at least four tiles each."""
    splits = max(1, min(pl.cdiv(4 * 132, rows), vocab // (4 * block)))
    return Config(block, splits, 4)


def statistics(logits_RxV, inverse_temperature_R, *, interpret=None, config=None):
    """See `reference.statistics`."""
    r, v = logits_RxV.shape
    config = config or configure(r, v, 2048)
    return _statistics(logits_RxV, inverse_temperature_R, config, interpreted("triton", interpret))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _statistics(logits_RxV, inverse_temperature_R, config, interpret):
    top, best, total = _stream(
        _statistics_body,
        "verify_statistics_triton",
        config,
        interpret,
        logits_RxV.shape,
        [((), jnp.float32), ((), jnp.int32), ((), jnp.float32)],
        [_row(logits_RxV.shape[1]), _row(1)],
        logits_RxV,
        inverse_temperature_R[:, None],
    )
    highest = top.max(1)
    shrink = jnp.exp((top - highest[:, None]) * inverse_temperature_R[:, None])
    # Splits are in token order: the first of equal maxima has the lowest token.
    return Statistics(highest, _first_best(top, best), (total * shrink).sum(1))


def _statistics_body(x_ref, scale_ref, top_ref, best_ref, total_ref, *, tiles, block, vocab):
    scale, begin = scale_ref[0], pl.program_id(1) * tiles

    def tile(i, carry):
        top, best, total = carry
        start, index, inside = _tile(begin + i, block, vocab)
        x = _load(x_ref.at[pl.ds(start, block)], inside)
        high = jnp.max(x)
        new_top = jnp.maximum(top, high)
        total = total * jnp.exp((top - new_top) * scale) + jnp.sum(jnp.exp((x - new_top) * scale))
        first = jnp.min(jnp.where(x == high, index, BIG))
        return new_top, jnp.where(high > top, first, best), total

    start = (jnp.float32(NEGATIVE), jnp.int32(0), jnp.float32(0))
    top, best, total = lax.fori_loop(0, tiles, tile, start)
    top_ref[0], best_ref[0], total_ref[0] = top, best, total


def tails(logits_RxV, top_R, inverse_temperature_R, cuts_RxJ, *, interpret=None, config=None):
    """See `reference.tails`; J is 16."""
    if cuts_RxJ.shape[1] != BINS:
        raise NotImplementedError(f"verify triton: {cuts_RxJ.shape[1]} cuts, exactly {BINS} served")
    config = config or configure(*logits_RxV.shape, 512)
    interpret = interpreted("triton", interpret)
    return _tails(logits_RxV, top_R, inverse_temperature_R, cuts_RxJ, config, interpret)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _tails(logits_RxV, top_R, inverse_temperature_R, cuts_RxJ, config, interpret):
    counts, masses = _stream(
        _tails_body,
        "verify_tails_triton",
        config,
        interpret,
        logits_RxV.shape,
        [((BINS,), jnp.float32), ((BINS,), jnp.float32)],
        [_row(logits_RxV.shape[1]), _row(2), _row(BINS)],
        logits_RxV,
        jnp.stack([top_R, inverse_temperature_R], 1),
        cuts_RxJ,
    )
    return counts.sum(1), masses.sum(1)


def _tails_body(x_ref, row_ref, cuts_ref, counts_ref, masses_ref, *, tiles, block, vocab):
    top, scale = row_ref[0], row_ref[1]
    cuts, begin = cuts_ref[pl.ds(0, BINS)], pl.program_id(1) * tiles

    def tile(i, carry):
        counts, masses = carry
        start, _, inside = _tile(begin + i, block, vocab)
        x = _load(x_ref.at[pl.ds(start, block)], inside)
        over = (x[None, :] >= cuts[:, None]) & inside[None, :]
        mass = jnp.broadcast_to(jnp.exp((x - top) * scale)[None, :], (BINS, block))
        counts += jnp.sum(jnp.where(over, 1.0, 0.0), axis=1)
        return counts, masses + jnp.sum(jnp.where(over, mass, 0.0), axis=1)

    zeros = jnp.zeros((BINS,), jnp.float32)
    counts, masses = lax.fori_loop(0, tiles, tile, (zeros, zeros))
    counts_ref[pl.ds(0, BINS)], masses_ref[pl.ds(0, BINS)] = counts, masses


def surplus(target, draft, request, seeds_Nx2, noise_NxV, *, interpret=None, config=None):
    """See `api.surplus`."""
    config = config or configure(len(request.c_N), target.logits_RxV.shape[1], 1024)
    interpret = interpreted("triton", interpret)
    return _surplus(target, draft, request, seeds_Nx2, noise_NxV, config, interpret)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _surplus(target, draft, request, seeds_Nx2, noise_NxV, config, interpret):
    n, v = len(request.c_N), target.logits_RxV.shape[1]
    scalars = lambda law, rows: jnp.stack(  # noqa: E731
        [law.inverse_temperature_R[rows], law.log_normaliser_R[rows], law.threshold_R[rows]], 1
    )
    operands = [target.logits_RxV, request.target_rows_N[:, None]]
    specs = [None, _row(1)]
    numbers = [request.weight_N[:, None], request.c_N[:, None]]
    numbers.append(scalars(target, request.target_rows_N))
    if draft is not None:
        operands += [draft.logits_RxV, request.draft_rows_N[:, None]]
        specs += [None, _row(1)]
        numbers.append(scalars(draft, request.draft_rows_N))
    numbers = jnp.concatenate(numbers, 1).astype(jnp.float32)
    operands += [numbers, request.excluded_NxK]
    specs += [_row(numbers.shape[1]), _row(request.excluded_NxK.shape[1])]
    if seeds_Nx2 is not None:
        operands.append(seeds_Nx2.astype(jnp.uint32))
        specs.append(_row(2))
    elif noise_NxV is not None:
        operands.append(noise_NxV)
        specs.append(_row(v))
    body = functools.partial(
        _surplus_body,
        drafted=draft is not None,
        seeded=seeds_Nx2 is not None,
        noisy=noise_NxV is not None,
    )
    float32, int32 = ((), jnp.float32), ((), jnp.int32)
    outputs = [float32, float32, float32, float32, int32, float32, int32]
    mass, left, undrawn, score, token, left_score, left_token = _stream(
        body, "verify_surplus_triton", config, interpret, (n, v), outputs, specs, *operands
    )
    return Surplus(
        mass_N=mass.sum(1),
        left_N=left.sum(1),
        undrawn_N=undrawn.sum(1),
        token_N=_first_best(score, token),
        score_N=score.max(1),
        left_token_N=_first_best(left_score, left_token),
        left_score_N=left_score.max(1),
    )


def _surplus_body(*refs, tiles, block, vocab, drafted, seeded, noisy):
    refs = list(refs)
    p_ref, p_row = refs.pop(0), refs.pop(0)[0]
    if drafted:
        q_ref, q_row = refs.pop(0), refs.pop(0)[0]
    numbers, excluded_ref = refs.pop(0), refs.pop(0)
    noise_ref = refs.pop(0) if seeded or noisy else None
    weight, c, begin = numbers[0], numbers[1], pl.program_id(1) * tiles

    def tile(i, carry):
        mass, left, undrawn, best, left_best = carry
        start, index, inside = _tile(begin + i, block, vocab)
        keep = inside
        for k in range(excluded_ref.shape[0]):
            keep &= index != excluded_ref[k]
        span = pl.ds(start, block)
        x = _load(p_ref.at[p_row, span], inside)
        p = jnp.where(keep, probability(x, numbers[2], numbers[3], numbers[4]), 0.0)
        r = weight * p
        if drafted:
            y = _load(q_ref.at[q_row, span], inside)
            q = jnp.where(keep, probability(y, numbers[5], numbers[6], numbers[7]), 0.0)
            r, undrawn = r - c * q, undrawn + jnp.sum(q)
        r = jnp.maximum(r, 0.0)
        mass, left = mass + jnp.sum(r), left + jnp.sum(p)
        if seeded or noisy:
            if seeded:
                noise = gumbel(noise_ref[0], noise_ref[1], index)
            else:
                noise = _load(noise_ref.at[span], inside)
            best = _better(best, jnp.where(inside, log_or_least(r) + noise, 2 * NEGATIVE), index)
            left_best = _better(
                left_best, jnp.where(inside, log_or_least(p) + noise, 2 * NEGATIVE), index
            )
        return mass, left, undrawn, best, left_best

    zero, none = jnp.float32(0), (jnp.float32(4 * NEGATIVE), jnp.int32(0))
    found = lax.fori_loop(0, tiles, tile, (zero, zero, zero, none, none))
    for out_ref, value in zip(refs, jax.tree.leaves(found), strict=True):
        out_ref[0] = value


def _better(best, scores, index):
    """The larger of the best so far and a tile's best, lowest token among equals."""
    score, token = best
    high = jnp.max(scores)
    first = jnp.min(jnp.where(scores == high, index, BIG))
    return jnp.maximum(score, high), jnp.where(high > score, first, token)


def _stream(body, name, config, interpret, rows_vocab, outputs, specs, *operands):
    """Runs `body` for every row and split; outputs come as [rows, splits, ...]."""
    rows, vocab = rows_vocab
    block, splits, num_warps = config
    tiles = pl.cdiv(pl.cdiv(vocab, block), splits)
    out_spec = lambda s: pl.BlockSpec(  # noqa: E731
        (pl.squeezed, pl.squeezed, *(s or (1,))), lambda i, j: (i, j, *(0 for _ in s or (1,)))
    )
    whole = pl.BlockSpec(memory_space=pl.ANY)
    found = pl.pallas_call(
        functools.partial(body, tiles=tiles, block=block, vocab=vocab),
        out_shape=[jax.ShapeDtypeStruct((rows, splits, *(s or (1,))), d) for s, d in outputs],
        grid=(rows, splits),
        in_specs=[whole if s is None else s for s in specs],
        out_specs=[out_spec(s) for s, _ in outputs],
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=3),
        interpret=interpret,
        name=name,
    )(*operands)
    return [f.reshape(rows, splits, *s) for f, (s, _) in zip(found, outputs, strict=True)]


def _row(width):
    return pl.BlockSpec((pl.squeezed, width), lambda i, j: (i, 0))


def _tile(i, block, vocab):
    """Start, tokens and bounds mask of tile i of a row."""
    index = i * block + lax.broadcasted_iota(jnp.int32, (block,), 0)
    return i * block, index, index < vocab


def _load(ref, inside):
    return plt.load(ref, mask=inside, other=-jnp.inf).astype(jnp.float32)


def _first_best(scores_RxS, tokens_RxS):
    at = scores_RxS.argmax(1)
    return jnp.take_along_axis(tokens_RxS, at[:, None], 1)[:, 0]
