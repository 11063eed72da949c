"""What to improve next, and how sure we are: elasticities and intervals of a design."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sdx.records import Interval, Number, record
from sdx.search.ascent import log_score
from sdx.search.problems import design_parts, draft_of, values_of
from sdx.theory.numerics import float64
from sdx.theory.scaling import student_t
from sdx.theory.transformers import parameters
from sdx.theory.trees import candidate_tree, soft_tree


def _label(path) -> str:
    parts = []
    for key in path:
        parts.append(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))))
    return ".".join(parts)


def elasticities(gradient, arguments, *rest) -> dict[str, float]:
    """d ln score / d ln theta for every positive number in the pytree `arguments`, largest first.

    `gradient(arguments, *rest)` is the gradient of ln score, a pytree like `arguments`. +0.5 on
    "hardware.memory_bandwidth_bytes_per_second": one percent more of it gives half a percent more.
    """
    slopes = gradient(arguments, *rest)
    leaves, _ = jax.tree_util.tree_flatten_with_path(arguments)
    found = {}
    for (path, leaf), slope in zip(leaves, jax.tree.leaves(slopes), strict=True):
        value = np.asarray(leaf)
        if value.ndim or not np.issubdtype(np.asarray(slope).dtype, np.floating):
            continue
        share = float(slope) * float(value)
        if np.isfinite(share) and share != 0.0:
            found[_label(path)] = share
    return dict(sorted(found.items(), key=lambda item: -abs(item[1])))


def scalars_to_float64(tree):
    """Numbers of a pytree as float64 scalars, so that every one of them can be differentiated."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)


@record
class TreeElasticities:
    """d ln tokens / d ln of a tree's budget, depth limit and acceptance q[d, r] (same shape)."""

    budget: Number
    depth: Number
    acceptance: Number


@float64
def tree_elasticities(acceptance, budget, depth, temperature=0.05) -> TreeElasticities:
    """How the best tree's expected tokens would grow: the gradients of the soft tree.

    acceptance: [ranks] or [depths, ranks] of numbers; budget, depth: real, as `theory.soft_tree`.
    Budget and depth of a design are integers and looked at one by one, which is exact; this is
    what those integers are worth. As the temperature falls the budget's is the next node's score.
    """
    q = np.asarray(acceptance, float)
    # One level and some nodes more than the limits: what these keep out is among the candidates.
    levels = int(np.ceil(depth)) + 1
    if q.ndim == 1:
        q = np.broadcast_to(q, (levels, len(q)))
    levels = min(levels, len(q))
    candidates = candidate_tree(q, int(4 * np.ceil(budget)) + 32, levels)

    def log_tokens(budget, depth, q):
        return jnp.log(soft_tree(q, budget, depth, temperature, candidates).expected_tokens)

    point = (jnp.asarray(budget, float), jnp.asarray(depth, float), jnp.asarray(q[:levels]))
    slopes = jax.jit(jax.grad(log_tokens, argnums=(0, 1, 2)))(*point)
    shares = [slope * value for slope, value in zip(slopes, point, strict=True)]
    return TreeElasticities(budget=shares[0], depth=shares[1], acceptance=shares[2])


@record
class DesignIntervals:
    """95 % intervals from the covariance of the fitted acceptance law (delta method).

    `score`: what the design yields, tokens per second or the chosen objective. `draft_parameters`:
    the optimal draft size at the design's width-to-layers ratio and policy; (0, inf) where a
    constraint and not the law decides it.
    """

    score: Interval
    draft_parameters: Interval


def _scaled(x, log_scale, names):
    """Layers and width scaled together: the draft's size along its shape."""
    grow = jnp.array([1.0 if n in ("layers", "width") else 0.0 for n in names])
    return x * jnp.exp(grow * log_scale)


@jax.jit
def _law_derivatives(x, profile, cell, common):
    """ln score, its gradient in the law's coefficients, and d t*/d coefficients and d ln N/d t for
    the log scale t* of the draft that maximises it (implicit function theorem)."""
    names = common.kind.variables

    def score(t, coefficients):
        law = dataclasses.replace(common.law, coefficients=coefficients)
        changed = dataclasses.replace(common, law=law)
        return log_score(design_parts(_scaled(x, t, names), profile, cell, changed))

    def log_size(t):
        return jnp.log(parameters(draft_of(values_of(_scaled(x, t, names), common), cell, common)))

    zero, coefficients = jnp.zeros(()), jnp.asarray(common.law.coefficients, float)
    value, slope = jax.value_and_grad(score, argnums=1)(zero, coefficients)
    curvature = jax.grad(jax.grad(score))(zero, coefficients)
    mixed = jax.jacrev(jax.grad(score), argnums=1)(zero, coefficients)
    return value, slope, -mixed / curvature, curvature, jax.grad(log_size)(zero)


@float64
def intervals(result) -> DesignIntervals:
    """Intervals of a `DesignResult` of a draft by scaling law, carried on the logarithms.

    Raises ValueError for designs whose acceptance was given and not fitted here.
    """
    if result.source is None:
        raise ValueError("a cascade's acceptance rates were given: they carry their own intervals")
    problem, cell, x, row = result.source
    common = problem.common
    if common.acceptance is not None or common.kind.family != "independent":
        raise ValueError("this design's acceptance was measured: its law carries its own interval")
    value, slope, shift, curvature, growth = _law_derivatives(
        jnp.asarray(x), jnp.asarray(problem.profiles[row]), problem.cells[cell], common
    )
    covariance = np.asarray(common.law.covariance)
    t = student_t(common.law.freedom)

    def interval(centre, gradient):
        deviation = np.sqrt(max(float(gradient @ covariance @ gradient), 0.0))
        return Interval(
            value=centre, low=centre * np.exp(-t * deviation), high=centre * np.exp(t * deviation)
        )

    size: Number = float(result.draft_parameters)
    around = Interval(value=size, low=0.0, high=np.inf)
    if float(curvature) < 0:
        around = interval(size, float(growth) * np.asarray(shift))
    return DesignIntervals(
        score=interval(float(np.exp(value)), np.asarray(slope)), draft_parameters=around
    )
