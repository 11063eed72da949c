"""Ascent, neighbourhood, enumeration and branch and bound on problems with a known answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.search.ascent import Parts, ascend
from sdx.search.exact import branch_and_bound, climb_lattice, exhaustive, score_table
from sdx.search.space import (
    Variable,
    from_lattice,
    lattice,
    lattice_size,
    neighbourhood,
    ratio_moves,
    round_to_lattice,
    starts,
    to_unit,
    to_values,
)
from sdx.theory.trees import optimal_tree
from sdx.theory.trees.geometric import GeometricRanks

SPACE = (
    Variable(name="a", low=1.0, high=40.0, gain=1, seconds=1),
    Variable(name="b", low=8.0, high=512.0, step=8.0, gain=1, seconds=1),
)
PROFILES = np.arange(1.0, 9.0)[:, None]


def toy_parts(x, profile, cell, common):
    """A drafter of size a * b: acceptance saturates, cost grows; a / b is limited."""
    size = x[0] * x[1] / common["scale"]
    alpha = size / (1.0 + size)
    tokens = (1.0 - alpha ** (profile[0] + 1.0)) / (1.0 - alpha)
    seconds = 1.0 + cell[0] * profile[0] * (0.02 + 0.05 * size + 0.02 * x[0])
    slack = jnp.stack([jnp.log(x[1] / x[0]) - jnp.log(4.0), jnp.asarray(1.0)])
    return Parts(gain=tokens, seconds=seconds, price=jnp.ones(()), slack=slack)


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def solved():
    """(cells, common, ascent, exhaustive optima) of several toy problems."""
    cells = jnp.array([[0.3], [1.0], [3.0]])
    common = {"scale": jnp.asarray(300.0)}
    z0 = jnp.asarray(starts(SPACE, 4))
    ascent = ascend(toy_parts, SPACE, jnp.asarray(PROFILES), cells, common, z0)
    best = [exhaustive(toy_parts, SPACE, PROFILES, cell, common) for cell in cells]
    return cells, common, ascent, best


def test_ascent_and_neighbourhood_reach_the_optimum(solved):
    cells, common, (x, _, score), best = solved
    x, score = np.asarray(x), np.asarray(score)
    index = round_to_lattice(SPACE, x[np.arange(3), score.argmax(axis=1)])
    _, _, found, evaluations = climb_lattice(toy_parts, SPACE, PROFILES, cells, common, index)
    np.testing.assert_allclose(found, [b[2] for b in best], atol=1e-3)
    assert evaluations < 3 * lattice_size(SPACE) * len(PROFILES) / 10


def test_certificates_are_never_below_the_true_gap(solved):
    cells, common, _, best = solved
    rng = np.random.default_rng(0)
    points = lattice(SPACE)
    for cell, (_, _, optimum, _) in zip(cells, best, strict=True):
        some = jnp.asarray(points[rng.integers(0, len(points), 40)])
        scores = np.asarray(score_table(toy_parts, some, jnp.asarray(PROFILES), cell, common))
        for found in [optimum, *np.sort(scores[np.isfinite(scores)])[-3:]]:
            gap, _ = branch_and_bound(toy_parts, SPACE, jnp.asarray(PROFILES), cell, common, found)
            true = np.expm1(optimum - found)
            assert gap >= true - 1e-12
            assert gap <= max(true, 1e-3) + 1e-9


def test_no_certificate_without_monotone_bounds(solved):
    cells, common, _, best = solved
    unknown = (SPACE[0], Variable(name="b", low=8.0, high=512.0, step=8.0))
    gap, boxes = branch_and_bound(
        toy_parts, unknown, jnp.asarray(PROFILES), cells[0], common, best[0][2]
    )
    assert gap is None and boxes == 0


def test_a_budget_that_runs_out_loosens_the_certificate(solved):
    cells, common, _, best = solved
    arguments = (toy_parts, SPACE, jnp.asarray(PROFILES), cells[1], common, best[1][2])
    tight, _ = branch_and_bound(*arguments)
    loose, _ = branch_and_bound(*arguments, max_boxes=8)
    assert loose > tight >= 0


def test_infeasible_points_score_minus_infinity(solved):
    cells, common, _, _ = solved
    table = score_table(
        toy_parts, jnp.array([[40.0, 8.0]]), jnp.asarray(PROFILES), cells[0], common
    )
    assert np.all(np.isneginf(np.asarray(table)))


# ---------------------------------------------------------------------------- space


def test_unit_cube_and_lattice_round_trip():
    rng = np.random.default_rng(1)
    z = rng.uniform(0, 1, (20, 2))
    values = np.asarray(to_values(SPACE, jnp.asarray(z)))
    np.testing.assert_allclose(np.asarray(to_unit(SPACE, jnp.asarray(values))), z, atol=1e-12)
    points = lattice(SPACE)
    np.testing.assert_array_equal(from_lattice(SPACE, round_to_lattice(SPACE, points)), points)
    assert len(points) == lattice_size(SPACE) == 40 * 64
    assert np.all((starts(SPACE, 9) > 0) & (starts(SPACE, 9) < 1))


def test_neighbourhoods_stay_inside_and_ratio_moves_keep_the_ratio():
    corner = neighbourhood(SPACE, np.array([0, 63]), 2)
    assert len(corner) == 9 and corner.min() >= 0 and corner[:, 1].max() == 63
    index = np.array([9, 19])  # a = 10, b = 160
    moves = from_lattice(SPACE, ratio_moves(SPACE, index))
    assert len(moves) and np.all(np.abs(moves[:, 1] / 16 - moves[:, 0]) <= 1.0)


def test_a_variable_without_a_range_is_refused():
    with pytest.raises(ValueError, match="is no log range"):
        Variable(name="x", low=0.0, high=1.0)


# ---------------------------------------------------------------------------- tree law


@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.9])
def test_geometric_ranks_are_optimal_trees(alpha):
    law = GeometricRanks(alpha=alpha, rank_ratio=0.25)
    masses = np.asarray(law.masses(8))
    for budget, depth in ((1, 1), (5, 2), (16, 4), (40, 8)):
        exact = float(optimal_tree(masses, budget, depth).expected_tokens)
        assert float(law.expected_tokens(budget, depth)) == pytest.approx(exact, rel=1e-12)


def test_tokens_of_geometric_ranks_rise_with_alpha():
    """Box bounds rely on it."""
    alphas = jnp.linspace(0.01, 0.999, 200)
    for ratio in (0.1, 0.3, 0.6, 0.95):
        for budget, depth in ((2.0, 1.0), (8.0, 2.0), (24.0, 4.0), (64.0, 8.0)):
            tokens = jax.vmap(
                lambda a: GeometricRanks(alpha=a, rank_ratio=ratio).expected_tokens(budget, depth)  # noqa: B023
            )(alphas)
            assert np.all(np.diff(np.asarray(tokens)) >= -1e-12), (ratio, budget, depth)
