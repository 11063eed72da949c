"""Exact evaluation on the lattice: neighbourhoods, exhaustive optima, branch and bound.

The yardstick and the certificate of the ascent. A certificate is a number >= the true relative gap
(score of the best design / score of the found one - 1), or None.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from sdx.search.ascent import exact_score
from sdx.search.space import (
    Space,
    from_lattice,
    lattice,
    lattice_size,
    neighbourhood,
    ratio_moves,
)

_CHUNK, _SMALL_CHUNK = 40_960, 256


@partial(jax.jit, static_argnames=("parts",))
def score_table(parts, xs, profiles, cell, common):
    """ln score of designs `xs` [m, n] x `profiles` [q, k]: [m, q], -inf where not allowed."""
    rows = lambda x: jax.vmap(  # noqa: E731
        lambda row: exact_score(parts(x, row, cell, common))
    )(profiles)
    return jax.vmap(rows)(xs)


def score_chunks(parts, xs, profiles, cell, common):
    """`score_table` in chunks of one of two shapes, so that it compiles at most twice; the large
    one keeps a chunk's intermediates in cache."""
    profiles = jnp.asarray(profiles)
    large = max(_SMALL_CHUNK, _CHUNK // len(profiles))
    size = large if len(xs) > 4 * _SMALL_CHUNK else _SMALL_CHUNK
    if not xs.shape[1]:  # nothing but the profile table
        size = 1
    tables = []
    for begin in range(0, len(xs), size):
        chunk = _pad(xs[begin : begin + size], size)
        tables.append(score_table(parts, jnp.asarray(chunk), profiles, cell, common))
    return np.concatenate([np.asarray(t) for t in tables])[: len(xs)]


def climb_lattice(
    parts, space: Space, profiles, cells, common, index, *, radius=2, moves=4, rows=8
):
    """Exact hill climb from lattice `index` [p, n]: the best design of the neighbourhood, again
    until it stays. Returns (index [p, n], profile row [p], ln score [p], evaluations).

    The neighbours are tried with the `rows` best profile rows of the point they surround, the point
    itself with all.
    """
    found = [
        _climb_one(parts, space, profiles, cell, common, i, radius, moves, rows)
        for i, cell in zip(np.array(index), cells, strict=True)
    ]
    index, row, score, evaluations = zip(*found, strict=True)
    return np.stack(index), np.array(row), np.array(score), sum(evaluations)


def _climb_one(parts, space, profiles, cell, common, index, radius, moves, rows):
    seen, evaluations = {}, 0

    def look(indices, chosen):
        xs = from_lattice(space, np.stack(indices))
        # A short table is filled up with copies of its first row: one shape, one compilation.
        shape = len(profiles) if len(profiles) <= 32 else len(chosen)
        table = score_chunks(parts, xs, _pad(profiles[chosen], shape), cell, common)
        table = table[:, : len(chosen)]
        for i, scores in zip(indices, table, strict=True):
            best = int(scores.argmax())
            seen[tuple(i)] = max(
                seen.get(tuple(i), (-np.inf, 0)), (float(scores[best]), int(chosen[best]))
            )
        return table

    every, profiles = np.arange(len(profiles)), np.asarray(profiles)
    for _ in range(moves):
        table = look([index], every)
        evaluations += table.size
        likely = np.sort(np.argsort(-table[0], kind="stable")[:rows])
        near = np.concatenate([neighbourhood(space, index, radius), ratio_moves(space, index)])
        new = [np.array(i) for i in {tuple(i) for i in near} if i not in seen]
        if new:
            evaluations += look(new, likely).size
        best = max(seen, key=lambda i: seen[i][0])
        if best == tuple(index):
            break
        index = np.array(best, int)
    score, row = seen[tuple(index)]
    return index, row, score, evaluations


def exhaustive(parts, space: Space, profiles, cell, common):
    """The best of all lattice points x profiles: (x [n], profile row, ln score, points)."""
    xs = lattice(space)
    table = score_chunks(parts, xs, profiles, cell, common)
    point, row = np.unravel_index(table.argmax(), table.shape)
    return xs[point], int(row), float(table[point, row]), table.size


def lattice_points(space: Space, profiles) -> int:
    return lattice_size(space) * len(profiles)


# ---------------------------------------------------------------------------- branch and bound


def monotone(space: Space) -> bool:
    """Every variable's influence on gain, seconds and price has a known sign."""
    return all(None not in (v.gain, v.seconds, v.price) for v in space)


def _corner(space, low, high, sign_of):
    """The corner of a box where the quantity is largest (gain) or smallest (a cost: negate)."""
    return jnp.stack([high[k] if sign_of(v) > 0 else low[k] for k, v in enumerate(space)])


@partial(jax.jit, static_argnames=("parts", "space"))
def _box_bounds(parts, space, low, high, rows, profiles, cell, common):
    """Upper bounds of ln score over boxes [m, n] at profile rows [m], and the scores of centres.

    Gain at its best corner over seconds and price at theirs: valid because each is monotone in
    every variable. -inf where no corner satisfies one of the monotone constraints: then no point
    inside does.
    """
    corners = np.array(list(itertools.product((False, True), repeat=len(space))))

    def bound(low, high, row):
        profile = profiles[row]
        at = lambda sign: parts(  # noqa: E731
            _corner(space, low, high, sign), profile, cell, common
        )
        gain = at(lambda v: v.gain).gain
        seconds = at(lambda v: -v.seconds).seconds
        price = at(lambda v: -v.price).price
        slacks = jax.vmap(lambda up: parts(jnp.where(up, high, low), profile, cell, common).slack)(
            corners
        )
        possible = jnp.all(jnp.max(slacks, axis=0) >= 0)
        score = jnp.log(gain) - jnp.log(seconds) - jnp.log(price)
        return jnp.where(possible, score, -jnp.inf)

    return jax.vmap(bound)(low, high, rows)


def branch_and_bound(
    parts, space: Space, profiles, cell, common, found, *, tolerance=1e-3, max_boxes=60_000
):
    """A certificate for `found` (ln score): an upper bound of (true optimum / found) - 1.

    Boxes of lattice indices per profile row are split along their longest side; a box is dropped
    when its bound is below found * (1 + tolerance). Returns (certificate, boxes bounded), or
    (None, 0) where a variable's influence has no known sign.
    """
    if not monotone(space):
        return None, 0
    counts = np.array([v.count for v in space], int)
    rows = np.arange(len(profiles))
    low = np.zeros((len(rows), len(space)), int)
    high = np.repeat(counts[None] - 1, len(rows), axis=0)
    bounded, worst = 0, found
    limit = found + np.log1p(tolerance)
    while len(rows):
        bounds = _padded_bounds(parts, space, low, high, rows, profiles, cell, common)
        bounded += len(rows)
        keep = bounds > limit
        worst = max(worst, bounds[~keep].max(initial=-np.inf))
        if bounded > max_boxes:
            worst = max(worst, bounds.max())
            break
        low, high, rows, bounds = low[keep], high[keep], rows[keep], bounds[keep]
        single = np.all(low == high, axis=1)
        if single.any():  # a lattice point: exact, constraints included
            xs = from_lattice(space, low[single])
            table = _padded_scores(parts, xs, rows[single], profiles, cell, common)
            worst = max(worst, table.max())
            bounded += int(single.sum())
        low, high, rows = low[~single], high[~single], rows[~single]
        low, high, rows = _split(low, high, rows, counts)
    return float(np.expm1(max(worst - found, 0.0))), bounded


def _split(low, high, rows, counts):
    """Halves every box along the side that is longest relative to the whole range."""
    if not len(rows):
        return low, high, rows
    side = ((high - low) / np.maximum(counts - 1, 1)).argmax(axis=1)
    i = np.arange(len(rows))
    middle = (low[i, side] + high[i, side]) // 2
    left_high, right_low = high.copy(), low.copy()
    left_high[i, side], right_low[i, side] = middle, middle + 1
    return (
        np.concatenate([low, right_low]),
        np.concatenate([left_high, high]),
        np.concatenate([rows, rows]),
    )


def _pad(array, size):
    """Repeats the first row."""
    return np.concatenate([array, np.repeat(array[:1], size - len(array), axis=0)])


def _padded_bounds(parts, space, low, high, rows, profiles, cell, common):
    box = [from_lattice(space, b) for b in (low, high)]
    return _in_chunks(
        lambda *columns: _box_bounds(parts, space, *columns, profiles, cell, common), *box, rows
    )


def _in_chunks(function, *columns):
    """`function` of columns [m, ...], in chunks of one of two sizes: two compilations for all."""
    size = 4096 if len(columns[0]) > 512 else 256
    out = []
    for begin in range(0, len(columns[0]), size):
        chunk = [jnp.asarray(_pad(c[begin : begin + size], size)) for c in columns]
        out.append(np.asarray(function(*chunk)))
    return np.concatenate(out)[: len(columns[0])]


@partial(jax.jit, static_argnames=("parts",))
def _scores(parts, xs, rows, profiles, cell, common):
    one = lambda x, row: exact_score(parts(x, profiles[row], cell, common))  # noqa: E731
    return jax.vmap(one)(xs, rows)


def _padded_scores(parts, xs, rows, profiles, cell, common):
    return _in_chunks(lambda *columns: _scores(parts, *columns, profiles, cell, common), xs, rows)
