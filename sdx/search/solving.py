"""Solving a posed problem: ascent, rounding, exact neighbourhood; and the certificate of a find."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sdx.search.ascent import ascend, evaluations_of_ascent, polish
from sdx.search.exact import (
    branch_and_bound,
    climb_lattice,
    exhaustive,
    lattice_points,
    score_chunks,
)
from sdx.search.problems import Common, design_parts
from sdx.search.space import from_lattice, round_to_lattice, starts

# Lattice points per cell up to which the certificate is enumeration. A threshold design costs as
# much as fifty chains (convolutions): there branch and bound is the cheaper one much earlier.
_ENUMERATE = {"chain": 50_000, "tree": 50_000, "threshold": 2_000}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One compiled structure with its numbers: what ascent and exact search work on."""

    space: tuple
    profiles: np.ndarray
    cells: jax.Array
    owners: np.ndarray  # which workload a cell belongs to
    common: Common


def solve(problem: Problem, start_count: int = 6, rounds: int = 4, inner: int = 6, top: int = 2):
    """Ascent from every start in every cell, rounding, exact neighbourhood of the best cells.

    Returns (cell, x, profile row, ln score, evaluations) per workload; only the `top` best cells of
    a workload by the ascent's own score are rounded and climbed.
    """
    space, profiles, cells = problem.space, problem.profiles, problem.cells
    if not space:
        return _looked_at(problem)
    z0 = jnp.asarray(starts(space, start_count))
    arguments = (jnp.asarray(profiles), cells, problem.common, z0)
    x, _, score = ascend(design_parts, space, *arguments, rounds=rounds, inner=inner)
    x, score = np.asarray(x), np.nan_to_num(np.asarray(score), nan=-np.inf)
    per_start = evaluations_of_ascent(len(profiles), rounds, inner)
    solutions = []
    for owner in np.unique(problem.owners):
        mine = np.flatnonzero(problem.owners == owner)
        order = mine[np.argsort(-score[mine].max(axis=1), kind="stable")][:top]
        begin = x[order, score[order].argmax(axis=1)]
        index, extra = _best_rounding(problem, order, begin, top)
        index, rows, scores, exact = climb_lattice(
            design_parts, space, profiles, [cells[c] for c in order], problem.common, index
        )
        k = int(scores.argmax())
        evaluations = exact + extra + len(mine) * len(z0) * per_start
        solutions.append(
            (order[k], from_lattice(space, index[k]), int(rows[k]), float(scores[k]), evaluations)
        )
    return solutions


def _looked_at(problem: Problem):
    """As `solve` where only integers are designed: the profile table is the problem."""
    arguments = (design_parts, problem.space, problem.profiles)
    tops = [
        (c, *exhaustive(*arguments, cell, problem.common)) for c, cell in enumerate(problem.cells)
    ]
    solutions = []
    for owner in np.unique(problem.owners):
        mine = [top for top in tops if problem.owners[top[0]] == owner]
        best = max(mine, key=lambda top: top[3])
        solutions.append((*best[:4], sum(top[4] for top in mine)))
    return solutions


def _best_rounding(problem: Problem, order, x, top, rows=10, steps=12):
    """Lattice indices [p, n] for cells `order` and their ascents' points x [p, n]: polished once
    per likely profile row, rounded, the best by exact score. Also the evaluations spent."""
    space, common = problem.space, problem.common
    profiles, cells = jnp.asarray(problem.profiles), problem.cells[order]
    tables = np.concatenate(
        [
            score_chunks(design_parts, x[k][None], profiles, cell, common)
            for k, cell in enumerate(cells)
        ]
    )
    likely = np.argsort(-tables, axis=1, kind="stable")[:, :rows]
    # Workloads differ in how many cells they have: filled up to `top`, polish compiles once.
    filled = np.resize(np.arange(len(order)), top)
    polished, _ = polish(
        design_parts,
        space,
        profiles,
        cells[filled],
        common,
        x[filled],
        jnp.asarray(likely[filled]),
        steps=steps,
    )
    index = round_to_lattice(space, np.asarray(polished))
    best = []
    for k, cell in enumerate(cells):
        candidates = np.concatenate([index[k], round_to_lattice(space, x[k])[None]])
        values = from_lattice(space, candidates)
        table = score_chunks(design_parts, values, profiles, cell, common)[:, likely[k]]
        best.append(candidates[table.max(axis=1).argmax()])
    spent = tables.size + likely.size * (3 * steps + 1) + len(cells) * table.size
    return np.stack(best), spent


def certify(problem: Problem, owner: int, found: float):
    """(certificate gap, ascent gap, better (cell, x, row, score) or None) of one workload."""
    mine = np.flatnonzero(problem.owners == owner)
    space, profiles, common = problem.space, jnp.asarray(problem.profiles), problem.common
    if lattice_points(space, profiles) <= _ENUMERATE[common.kind.policy]:
        tops = [
            (c, *exhaustive(design_parts, space, profiles, problem.cells[c], common)[:3])
            for c in mine
        ]
        best = max(tops, key=lambda t: t[3])
        gap = float(np.expm1(max(best[3] - found, 0.0)))
        return 0.0, gap, best if best[3] > found else None
    if problem.common.kind.batching == "static":
        return None, None, None  # what a static batch loses has no known sign: no box bounds
    gaps = [
        branch_and_bound(design_parts, space, profiles, problem.cells[c], common, found)[0]
        for c in mine
    ]
    return (None if None in gaps else max(gaps)), None, None
