"""Trees: exact against enumeration, the soft tree against the exact one, AAT laws and fits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.theory import trees


@functools.cache
def ordered_trees(nodes):
    """Every ordered tree (parents tuples, depth first) of exactly `nodes` nodes."""

    def forests(count, root, first):
        # Forests of `count` nodes under `root`, numbered from `first`.
        if count == 0:
            yield ()
            return
        for size in range(1, count + 1):
            for below in forests(size - 1, first, first + 1):
                for right in forests(count - size, root, first + size):
                    yield (root, *below, *right)

    return tuple(forests(nodes, -1, 0))


def plain_value(parents, q):
    """Expected tokens by a loop over nodes; q [depths, ranks, vectors]."""
    score, depth, children, total = {-1: 1.0}, {-1: 0}, {}, 1.0
    for i, parent in enumerate(parents):
        rank = children[parent] = children.get(parent, -1) + 1
        depth[i] = depth[parent] + 1
        score[i] = score[parent] * q[depth[i] - 1, rank]
        total = total + score[i]
    return total, max(depth.values())


def tables(count, depths, ranks, monotone, seed):
    rng = np.random.default_rng(seed)
    q = rng.dirichlet(np.full(ranks, 0.7), size=(count, depths)) * rng.uniform(
        0.3, 1.0, (count, depths, 1)
    )
    return -np.sort(-q, axis=-1) if monotone else q


@pytest.mark.parametrize("monotone", [True, False])
@pytest.mark.parametrize("max_depth", [3, 8])
def test_optimal_tree_equals_exhaustive_enumeration(monotone, max_depth):
    q = tables(200, 8, 8, monotone, seed=int(monotone) + max_depth)
    by_vector = np.moveaxis(q, 0, -1)
    best = np.ones((9, 200))
    for nodes in range(1, 9):
        best[nodes] = best[nodes - 1]
        for parents in ordered_trees(nodes):
            value, depth = plain_value(parents, by_vector)
            if depth <= max_depth:
                best[nodes] = np.maximum(best[nodes], value)
    for i in range(200):
        budget = 8 if i % 2 else 1 + i % 8
        tree = trees.optimal_tree(q[i], budget, max_depth)
        assert tree.nodes <= budget and tree.depth <= max_depth
        np.testing.assert_allclose(tree.expected_tokens, best[budget, i], rtol=1e-13)
        np.testing.assert_allclose(
            plain_value(tree.parents, q[i][..., None])[0], best[budget, i], rtol=1e-13
        )


def plain_programme(q, budget):
    """Left child, right sibling: an independent float64 programme, [budget + 1] values."""
    depths, ranks = q.shape
    below = np.zeros(budget + 1)
    for d in reversed(range(depths)):
        forest = np.zeros(budget + 1)
        for r in reversed(range(ranks)):
            taken = [
                max(q[d, r] * (1 + below[:n]) + forest[n - 1 :: -1][:n])
                for n in range(1, budget + 1)
            ]
            forest = np.array([0.0, *taken])
        below = forest
    return 1 + below


@pytest.mark.parametrize("max_depth", [2, 6, 16])
@pytest.mark.parametrize("monotone", [True, False])
def test_optimal_tree_equals_a_plain_programme_to_128_nodes(monotone, max_depth):
    q = tables(1, max_depth, 5, monotone, seed=max_depth)[0]
    values = plain_programme(q, 128)
    for budget in (1, 17, 64, 128):
        tree = trees.optimal_tree(q, budget, max_depth)
        np.testing.assert_allclose(tree.expected_tokens, values[budget], rtol=1e-13)
        if monotone:
            greedy = trees.greedy_tree(q, budget, max_depth)
            np.testing.assert_allclose(greedy.expected_tokens, values[budget], rtol=1e-13)
    np.testing.assert_allclose(trees.tree_profile(q, 128, max_depth), values, rtol=1e-13)


def test_greedy_is_strictly_worse_without_monotone_ranks():
    # Behind a useless second sibling hides a good third one; greedy takes the child (0.09).
    q = [0.3, 0.01, 0.6]
    best = trees.optimal_tree(q, 3, 2)
    assert best.parents == (-1, -1, -1)
    np.testing.assert_allclose(best.expected_tokens, 1.91)
    greedy = trees.greedy_tree(q, 3, 2)
    np.testing.assert_allclose(greedy.expected_tokens, 1.40)
    assert not trees.is_monotone(np.array([q]))


def test_a_tree_of_many_nodes_and_of_none():
    q = tables(1, 16, 32, monotone=True, seed=3)[0]
    many = trees.optimal_tree(q, 10_000, 16)
    assert many.nodes == 10_000 and np.isfinite(many.expected_tokens)
    assert trees.optimal_tree(q, 0, 16).expected_tokens == 1
    assert trees.optimal_tree(q, 5, 0).parents == ()
    one = trees.optimal_tree(q, 1, 16)
    np.testing.assert_allclose(one.expected_tokens, 1 + q[0, 0])


def test_a_chain_is_a_tree():
    np.testing.assert_allclose(
        trees.expected_tokens_of_tree((-1, 0, 1), [[0.9], [0.8], [0.5]]), 1 + 0.9 + 0.72 + 0.36
    )


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: trees.expected_tokens_of_tree((0,), [0.5]), "topological"),
        (lambda: trees.expected_tokens_of_tree((-1, 0), [[0.5]]), "depths"),
        (lambda: trees.expected_tokens_of_tree((-1, -1), [0.5]), "ranks"),
        (lambda: trees.optimal_tree([0.5, 1.2], 3, 2), "probabilities"),
        (lambda: trees.optimal_tree([0.5], -1, 2), "budget"),
        (lambda: trees.fit_aat([2, 3], [1.7, 2.0]), "3 different"),
        (lambda: trees.prior_score_tree((-1, 0), (3, 4), 10, 1), "accepted"),
    ],
)
def test_errors_name_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---------------------------------------------------------------------------- the soft tree

Q = tables(1, 6, 5, monotone=True, seed=7)[0]
CANDIDATES = trees.candidate_tree(Q, 120, 6)


@pytest.mark.parametrize("budget", [5, 20, 40])
def test_cooled_soft_tree_is_the_optimal_tree(budget):
    tree, more = (trees.optimal_tree(Q, n, 6) for n in (budget, budget + 1))
    soft = trees.soft_tree(Q, budget + 0.5, 6, 1e-5, CANDIDATES)
    halfway = 0.5 * (tree.expected_tokens + more.expected_tokens)
    np.testing.assert_allclose(soft.expected_tokens, halfway, rtol=1e-6)
    np.testing.assert_allclose(soft.nodes, budget + 0.5, rtol=1e-9)
    assert tree.depth <= float(soft.depth) + 1e-6 <= more.depth + 1e-5


def test_cooled_gradients_are_the_envelope_gradients():
    budget = 20
    with jax.enable_x64(True):
        q = jnp.asarray(Q)

        def soft(q, budget):
            return trees.soft_tree(q, budget, 6, 1e-5, CANDIDATES).expected_tokens

        tree, more = (trees.optimal_tree(Q, n, 6) for n in (budget, budget + 1))
        in_q, in_budget = jax.grad(soft, (0, 1))(q, budget + 0.5)
        envelope = [
            np.asarray(jax.grad(lambda q, t=t: trees.expected_tokens_of_tree(t.parents, q))(q))
            for t in (tree, more)
        ]
        profile = jax.grad(lambda q: trees.tree_profile(q, budget, 6)[-1])(q)
    np.testing.assert_allclose(in_q, 0.5 * (envelope[0] + envelope[1]), atol=1e-6)
    np.testing.assert_allclose(in_budget, more.expected_tokens - tree.expected_tokens, rtol=1e-6)
    np.testing.assert_allclose(profile, envelope[0], rtol=1e-12, atol=1e-14)


def test_soft_weights_respect_what_a_node_requires():
    q = tables(1, 6, 5, monotone=False, seed=1)[0]
    parents = trees.candidate_tree(q, 60, 6)
    weights = np.append(trees.soft_tree(q, 15.0, 4.5, 0.2, parents).weights, 1.0)
    s = trees.structure(parents)
    assert (weights[:-1] <= weights[s.requires] + 1e-12).all()
    assert weights[:-1][s.depth > 5].max(initial=0) == 0


AAT_X = np.array([2.0, 3, 5, 9, 14, 30, 69])
AAT_Y = np.array([1.62, 1.95, 2.3, 2.66, 2.95, 3.3, 3.58])
GRADIENTS = {
    "expected_tokens_of_tree": (
        lambda v: trees.expected_tokens_of_tree((-1, -1, 0, 2, 1, 3), v.reshape(4, 2)),
        np.linspace(0.2, 0.45, 8),
    ),
    "tree_profile": (
        lambda v: jnp.sum(trees.tree_profile(v.reshape(3, 3), 8, 3)),
        np.linspace(0.5, 0.05, 9) ** 1.1,
    ),
    "soft_tree": (
        lambda v: trees.soft_tree(v[3:], v[0], v[1], v[2], CANDIDATES).expected_tokens,
        np.array([17.3, 4.6, 0.3, 0.5, 0.22, 0.1, 0.06, 0.03]),
    ),
    "soft_tree depth": (
        lambda v: trees.soft_tree(v[3:], v[0], v[1], v[2], CANDIDATES).depth,
        np.array([17.3, 4.6, 0.3, 0.5, 0.22, 0.1, 0.06, 0.03]),
    ),
    "LogAAT": (
        lambda v: trees.LogAAT(A=v[0], B=v[1], C=v[2]).expected_tokens(v[3]),
        np.array([1.3, 0.6, 0.4, 11.5]),
    ),
    "StretchedAAT": (
        lambda v: trees.StretchedAAT(gain=v[0], scale=v[1], exponent=v[2]).survival(v[3]),
        np.array([2.3, 9.0, 0.6, 7.5]),
    ),
    "fit_aat log": (lambda v: trees.fit_aat(AAT_X, v).aat(20.0), AAT_Y),
    "fit_aat stretched": (lambda v: trees.fit_aat(AAT_X, v, "stretched").aat(20.0), AAT_Y),
    "r_squared": (
        lambda v: trees.r_squared(trees.LogAAT(A=v[0], B=v[1], C=v[2]), AAT_X, AAT_Y),
        np.array([1.3, 0.55, 0.4]),
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_against_central_differences(name):
    function, point = GRADIENTS[name]
    n, h = len(point), 1e-5 * np.maximum(1.0, np.abs(point))
    with jax.enable_x64(True):
        both = jax.vmap(jax.value_and_grad(function))  # fits look at x: not under jit
        batch = np.concatenate([[point], point + np.diag(h), point - np.diag(h)])
        value, slope = (np.asarray(part) for part in both(jnp.asarray(batch)))
    expected = (value[1 : n + 1] - value[n + 1 :]) / (2 * h)
    np.testing.assert_allclose(slope[0], expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_limits_are_finite():
    def everything(v):
        q = jnp.stack([v[0], (1 - v[0]) * 0.5])
        soft = trees.soft_tree(q, v[1], 6.0, 0.05, CANDIDATES_2)
        laws = (
            trees.LogAAT(A=1.2, B=0.5, C=0.3),
            trees.StretchedAAT(gain=2.0, scale=5.0, exponent=0.6),
        )
        return (
            soft.expected_tokens
            + soft.depth
            + trees.tree_profile(q, 4, 6)[-1]
            + sum(law.expected_tokens(v[1] - 1) + law.survival(v[1]) for law in laws)
        )

    points = [[level, n] for level in (0.0, 1e-12, 1 - 1e-12) for n in (1.0, 1e4)]
    with jax.enable_x64(True):
        value, slope = jax.jit(jax.vmap(jax.value_and_grad(everything)))(jnp.array(points))
    assert np.isfinite(np.asarray(value)).all() and np.isfinite(np.asarray(slope)).all()


CANDIDATES_2 = trees.candidate_tree([0.6, 0.3], 40, 6)


# ---------------------------------------------------------------------------- AAT, builders


@pytest.mark.parametrize(
    "law, form",
    [
        (trees.LogAAT(A=1.2, B=0.6, C=0.5), "log"),
        (trees.StretchedAAT(gain=2.5, scale=10.0, exponent=0.6), "stretched"),
    ],
)
def test_fit_recovers_the_law_that_made_the_points(law, form):
    fitted = trees.fit_aat(AAT_X, law.aat(AAT_X), form)
    for name, value in vars(law).items():
        np.testing.assert_allclose(getattr(fitted, name), value, rtol=1e-6)
    np.testing.assert_allclose(trees.r_squared(fitted, AAT_X, law.aat(AAT_X)), 1, rtol=1e-12)


def test_aat_counts_the_root_and_is_bounded_by_it():
    law = trees.LogAAT(A=1.2, B=0.6, C=0.5)
    assert float(law.aat(1.0)) == 1 and float(law.aat(1.01)) <= 1.01
    np.testing.assert_allclose(law.expected_tokens(13), law.aat(14.0))
    total = sum(float(law.survival(k)) for k in range(14))
    np.testing.assert_allclose(total, law.aat(14.0), rtol=1e-12)


def test_width_and_depth_baselines_by_hand():
    shape = trees.maximal_tree((2, 4, 4))
    assert shape == (-1, -1, 0, 0, 1, 1, 2, 3, 4, 5)
    assert trees.width_based_tree(shape, 5) == (-1, -1, 0, 0, 1)
    # Levels 1, 2, 3, 1, 2: two short chains.
    assert trees.depth_based_tree(shape, 5) == (-1, -1, 0, 0, 2)


def test_prior_scores_find_the_optimal_tree_of_a_simulated_drafter():
    q = np.array([0.55, 0.2, 0.08])
    shape = trees.maximal_tree((3, 9, 27), children=3)
    s = trees.structure(shape)
    rng = np.random.default_rng(5)
    rounds, counts = 40_000, np.zeros(len(shape))
    rank = rng.choice(4, size=(rounds, 3), p=[*q, 1 - q.sum()])  # 3: nothing of this parent
    for node in range(len(shape)):
        path, at = [], node
        while at < len(shape):
            path, at = [s.rank[at], *path], s.parent[at]
        counts[node] = (rank[:, : len(path)] == path).all(axis=1).sum()
    for budget in (1, 4, 9):
        found = trees.prior_score_tree(shape, counts, rounds, budget)
        best = trees.optimal_tree(q, budget, 3)
        tokens = trees.expected_tokens_of_tree(found.parents, q)
        np.testing.assert_allclose(tokens, best.expected_tokens, rtol=1e-2)
        np.testing.assert_allclose(found.expected_tokens, tokens, rtol=2e-2)
