"""Drafting until the product of confidences falls under a threshold: chains and trees.

A drafted token of confidence s is accepted with probability s; confidences are independent draws
from a law f on [0, 1]. With x = -ln p (p the threshold) and y = -ln s the expectations are renewal
equations, solved by `numerics.renewal` (multi-level slides, p. 'Scary math', put right: the slide
leaves out the token that crosses, the algorithm keeps it):

    keep   V(p) = E[s] + int_p^1 f(s) s V(p/s) ds          accepted drafts
    drop   V(p) = int_p^1 f(s) s (1 + V(p/s)) ds
    drafts D(p) = 1 + int_p^1 f(s) D(p/s) ds               drafted tokens, the crossing one included

A threshold tree keeps every node whose path product is >= p. Accepted tokens and nodes follow from
the same equations with f replaced by the intensity of siblings, mu(s) = sum over ranks of their
densities; the depth does not, it needs the joint law of siblings:

    G_0(p) = P(no child >= p),    G_d(p) = P(depth <= d) = E[prod_{r: s_r >= p} G_{d-1}(p / s_r)]
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from sdx.records import Number, record, static
from sdx.theory.numerics import float64, renewal

# Gauss-Legendre on [0, 1]: 8 points make a cell's quadrature error far smaller than the solver's.
_NODES = (np.polynomial.legendre.leggauss(8)[0] + 1.0) / 2.0
_WEIGHTS = np.polynomial.legendre.leggauss(8)[1] / 2.0
_HALVINGS = 20  # of the first cell, towards s = 1, where a law of high confidence has all its mass
_SMALLEST_X = 1e-9  # -ln p is kept above it: a grid without extent has no cells


@record
class BetaConfidence:
    """Confidence ~ (1 - atom) Beta(a, b) + atom at s = 1. Beta(1, 1) is the uniform law."""

    a: Number
    b: Number
    atom: Number = 0.0

    def mean(self):
        """E[s]: the acceptance rate of one draft."""
        return self.atom + (1.0 - self.atom) * self.a / (self.a + self.b)

    def cells(self, edges, power):
        """Integrals of f s^power over the cells of y = -ln s, and the mean positions within.

        edges [n + 1] of y, ascending from 0. The atom is not in them. In z = (1 - s)^min(b, 1) the
        density has no singularity at s = 1 for any b > 0.
        """
        kappa = jnp.minimum(self.b, 1.0)
        fine = jnp.concatenate(
            [jnp.zeros(1), edges[1] * 0.5 ** np.arange(_HALVINGS, -1, -1.0), edges[2:]]
        )
        away = -jnp.expm1(-fine[1:])  # the edge at 0 stays apart: the power has no slope there
        z = jnp.concatenate([jnp.zeros(1), away**kappa])
        width = z[1:] - z[:-1]
        away = (z[:-1, None] + width[:, None] * _NODES) ** (1.0 / kappa)
        log_s = jnp.log1p(-away)
        log_beta = jax.scipy.special.betaln(self.a, self.b)
        density = jnp.exp(
            (self.a - 1.0 + power) * log_s + (self.b - kappa) * jnp.log(away) - log_beta
        )
        part = (1.0 - self.atom) / kappa * width[:, None] * _WEIGHTS * density
        cell = jnp.asarray(np.maximum(np.arange(fine.shape[0] - 1) - _HALVINGS, 0))
        place = (-log_s - edges[cell][:, None]) / (edges[cell + 1] - edges[cell])[:, None]
        zeros = jnp.zeros(edges.shape[0] - 1, edges.dtype)
        masses = zeros.at[cell].add(jnp.sum(part, axis=1))
        moments = zeros.at[cell].add(jnp.sum(part * jnp.clip(place, 0.0, 1.0), axis=1))
        known = masses > 1e-150  # its square, in the derivative, must not underflow
        return masses, jnp.where(known, moments / jnp.where(known, masses, 1.0), 0.5)


@record
class SampledConfidence:
    """Confidence drawn from equally weighted measured `samples` [n] in (0, 1]."""

    samples: Number
    atom: Number = 0.0

    def mean(self):
        return self.atom + (1.0 - self.atom) * jnp.mean(jnp.asarray(self.samples))

    def cells(self, edges, power):
        """As BetaConfidence.cells; samples are spread over a cell's width (continuous in p)."""
        samples = jnp.asarray(self.samples)[:, None]
        masses = (1.0 - self.atom) / samples.shape[0] * _deposit(samples, edges, power)
        return masses, jnp.full_like(masses, 0.5)


def _grid(threshold, steps):
    return jnp.maximum(-jnp.log(threshold), _SMALLEST_X) * jnp.linspace(0.0, 1.0, steps + 1)


def _deposit(samples, edges, power):
    """Sum of s^power over samples, in cells of y; a sample is a triangle two cells wide.

    A hard assignment would make the result piecewise constant in the threshold, its gradient 0.
    """
    n = edges.shape[0] - 1
    y = -jnp.log(jnp.clip(samples.ravel(), 1e-300, 1.0))
    width = edges[1]
    place = y / width
    cell = jnp.clip(jnp.floor(place), 0, n + 1).astype(int)
    part = place - cell
    weight = jnp.where(place < n + 1, jnp.exp(-power * y), 0.0)
    nodes = jnp.zeros(n + 3, edges.dtype).at[cell].add(weight * (1.0 - part))
    nodes = nodes.at[cell + 1].add(weight * part)
    nodes = nodes.at[0].multiply(2.0)  # nothing lies below y = 0: its mass is all in the first cell
    return 0.5 * (nodes[:n] + nodes[1 : n + 1])


def _nodes(law, edges):
    """f and f s on the grid points of y [2, n]: half of each cell's mass goes to either end."""

    def tilted(power):
        masses, offsets = law.cells(edges, power)
        near, far = masses * (1.0 - offsets), masses * offsets
        nodes = jnp.append(near, 0.0) + jnp.concatenate([jnp.zeros(1), far])
        # The last point also receives from the cell beyond: by symmetry as much as from this one.
        nodes = nodes.at[-1].multiply(2.0)
        return nodes.at[0].add(law.atom)

    return jax.vmap(tilted)(jnp.arange(2.0))


def _toeplitz(nodes):
    size = nodes.shape[0]
    lag = np.arange(size)[:, None] - np.arange(size)[None, :]
    return jnp.where(lag >= 0, nodes[np.maximum(lag, 0)], 0.0)


# ---------------------------------------------------------------------------- chains


@record
class ThresholdOutcome:
    """Expectations per round. tokens = accepted + 1; drafts = draft passes; verified = drafted
    tokens that the target sees (drafts if the crossing token is kept, drafts - 1 if dropped)."""

    tokens: Number
    accepted: Number
    drafts: Number
    verified: Number


@functools.partial(jax.jit, static_argnames=("crossing", "steps"))
def _chain(law, threshold, crossing, steps):
    edges = _grid(threshold, steps)
    masses, offsets = law.cells(edges, 0)
    drafts = renewal(jnp.ones(steps + 1), masses, offsets, law.atom)[-1]
    masses, offsets = law.cells(edges, 1)
    if crossing == "keep":
        forcing = jnp.full(steps + 1, law.mean())
    else:
        forcing = law.atom + jnp.concatenate([jnp.zeros(1), jnp.cumsum(masses)])
    accepted = renewal(forcing, masses, offsets, law.atom)[-1]
    verified = drafts - (crossing == "drop")
    return ThresholdOutcome(
        tokens=accepted + 1.0, accepted=accepted, drafts=drafts, verified=verified
    )


@float64
def threshold_chain(
    law, threshold, crossing: Literal["keep", "drop"] = "keep", steps: int = 512
) -> ThresholdOutcome:
    """Expected tokens, drafts and verified tokens of a chain drafted down to `threshold`.

    law: `BetaConfidence` or `SampledConfidence`, atom < 1. threshold: p in (0, 1]. crossing: keep
    or drop the token whose confidence takes the product under p. Differentiable in p and the law;
    the error falls with steps^-2.
    """
    _check_choice("crossing", crossing, ("keep", "drop"))
    return _chain(law, jnp.asarray(threshold, jnp.float64), crossing, int(steps))


def _check_choice(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: choose one of {choices}")


@record
class CappedOutcome:
    """The laws of one round that drafts at most L tokens. survival [L + 1]: P(at least k drafts
    accepted); drafted, verified [L + 1]: P(at least k drafts made), P(... seen by the target)."""

    survival: Number
    drafted: Number
    verified: Number


@functools.partial(jax.jit, static_argnames=("max_lookahead", "crossing", "steps"))
def _capped(law, threshold, max_lookahead, crossing, steps):
    edges = _grid(threshold, steps)
    inside = jnp.ones(steps + 1).at[-1].set(0.5)  # the trapezoid's end

    def within(nodes):
        """P(product of i confidences >= p), i = 0..L, each weighted as `nodes` is."""
        matrix = _toeplitz(nodes)
        start = jnp.zeros(steps + 1, edges.dtype).at[0].set(1.0)
        step = lambda mass, _: (matrix @ mass, inside @ mass)  # noqa: E731
        return jax.lax.scan(step, start, None, length=max_lookahead + 1)[1]

    plain, tilted = jax.vmap(within)(_nodes(law, edges))
    drafted = jnp.concatenate([jnp.ones(1), plain[:-1]])
    if crossing == "drop":
        return CappedOutcome(survival=tilted, drafted=drafted, verified=plain)
    survival = jnp.concatenate([jnp.ones(1), law.mean() * tilted[:-1]])
    return CappedOutcome(survival=survival, drafted=drafted, verified=drafted)


@float64
def capped_threshold_chain(
    law,
    threshold,
    max_lookahead: int,
    crossing: Literal["keep", "drop"] = "keep",
    steps: int = 64,
) -> CappedOutcome:
    """A `threshold_chain` of at most `max_lookahead` drafts, with the laws of its counts.

    P(product of i confidences >= p) is the i-fold convolution of the law of y = -ln s up to -ln p;
    with f s in the place of f it is the probability that i drafts are also accepted. Keep: draft k
    is made if the product of k - 1 stays above, and then accepted with E[s]. As max_lookahead
    grows the sums are those of `threshold_chain`. Second order in 1 / steps; differentiable.
    """
    _check_choice("crossing", crossing, ("keep", "drop"))
    threshold = jnp.asarray(threshold, jnp.float64)
    return _capped(law, threshold, int(max_lookahead), crossing, int(steps))


# ---------------------------------------------------------------------------- trees


@record
class ThresholdTreeOutcome:
    """tokens = accepted + 1, nodes = verified drafts: per round. depth: mean number of levels;
    draft passes are depth + 1 (the last one finds no child above the threshold).
    depth_law [max_depth + 1]: P(depth <= d)."""

    tokens: Number
    accepted: Number
    nodes: Number
    depth: Number
    depth_law: Number
    max_depth: int = static()


def _depth_law(samples, edges, max_depth):
    """P(depth <= d) at the last grid point, d = 0..max_depth, from joint sibling samples [S, R]."""
    n = edges.shape[0] - 1
    width = edges[1]
    y = -jnp.log(jnp.clip(samples, 1e-300, 1.0))
    left = (edges[:, None, None] - y) / width  # room left below each child, in cells [n + 1, S, R]
    alive = jnp.clip(left + 0.5, 0.0, 1.0)  # the test s >= p, smoothed over one cell as above
    place = jnp.clip(left, 0.0, n)
    cell = jnp.minimum(jnp.floor(place), n - 1).astype(int)
    part = place - cell

    def deeper(law, _):
        below = law[cell] * (1.0 - part) + law[cell + 1] * part
        law = jnp.mean(jnp.prod(1.0 - alive * (1.0 - below), axis=2), axis=1)
        return law, law[-1]

    return jax.lax.scan(deeper, jnp.zeros(n + 1, edges.dtype), None, length=max_depth + 1)[1]


@functools.partial(jax.jit, static_argnames=("max_depth", "steps"))
def _tree(samples, threshold, max_depth, steps):
    edges = _grid(threshold, steps)
    found = []
    for power in (1, 0):
        masses = _deposit(samples, edges, power) / samples.shape[0]
        forcing = jnp.concatenate([jnp.zeros(1), jnp.cumsum(masses)])
        found.append(renewal(forcing, masses)[-1])
    law = _depth_law(samples, edges, max_depth)
    return ThresholdTreeOutcome(
        tokens=1.0 + found[0],
        accepted=found[0],
        nodes=found[1],
        depth=jnp.sum(1.0 - law),
        depth_law=law,
        max_depth=max_depth,
    )


@float64
def threshold_tree(
    siblings, threshold, max_depth: int = 48, steps: int = 128
) -> ThresholdTreeOutcome:
    """Expected tokens, nodes and depth of the tree of all nodes with path product >= `threshold`.

    siblings [samples, ranks]: joint draws (or a quadrature) of the confidences of one node's
    children, masses that sum to at most 1 for tokens of one vocabulary; independent between nodes
    of different depth. threshold: p in (0, 1]. max_depth only bounds the depth law: the mean depth
    is cut where P(depth <= max_depth) < 1. Differentiable in p and the samples.
    """
    siblings = jnp.asarray(siblings, jnp.float64)
    if siblings.ndim != 2:
        raise ValueError(
            f"siblings has shape {siblings.shape}: give [samples, ranks], one row per joint draw"
        )
    return _tree(siblings, jnp.asarray(threshold, jnp.float64), int(max_depth), int(steps))


# ---------------------------------------------------------------------------- calibration


@record
class Calibration:
    """P(accepted | confidence s): logit = offset + up ln s - down ln(1 - s) (beta calibration).

    (0, 1, 1) is the identity: a calibrated drafter. Source: Kull et al. 2017, with our names.
    """

    offset: Number = 0.0
    up: Number = 1.0
    down: Number = 1.0

    @float64
    def probability(self, confidence):
        """Acceptance probability, the same shape as `confidence` in [0, 1]."""
        return jax.nn.sigmoid(_features(confidence) @ jnp.stack(list(self._vector())))

    def _vector(self):
        return (jnp.asarray(v, jnp.float64) for v in (self.offset, self.up, self.down))


def _features(confidence):
    s = jnp.clip(jnp.asarray(confidence, jnp.float64), 1e-6, 1.0 - 1e-6)
    return jnp.stack([jnp.ones_like(s), jnp.log(s), -jnp.log1p(-s)], axis=-1)


@jax.jit
def _fit_calibration(confidence, accepted, ridge):
    features = _features(confidence)
    prior = jnp.array([0.0, 1.0, 1.0])

    def loss(weights):
        logit = features @ weights
        likelihood = jnp.sum(jax.nn.softplus(logit) - accepted * logit)
        return likelihood + 0.5 * ridge * jnp.sum((weights - prior) ** 2)

    def step(_, weights):
        move = jnp.linalg.solve(jax.hessian(loss)(weights), jax.grad(loss)(weights))
        # Damped: a full Newton step may overshoot where the likelihood is flat.
        scales = jnp.array([1.0, 0.5, 0.25, 0.125, 0.0])
        values = jax.vmap(lambda t: loss(weights - t * move))(scales)
        return weights - scales[jnp.argmin(values)] * move

    start = jax.lax.fori_loop(0, 40, step, prior)
    start = jax.lax.stop_gradient(start)
    # One differentiable Newton step from the optimum: the implicit derivative in the data.
    return start - jnp.linalg.solve(jax.hessian(loss)(start), jax.grad(loss)(start))


@float64
def fit_calibration(confidence, accepted, ridge=1e-3) -> Calibration:
    """Maximum-likelihood acceptance-against-confidence law from drafted tokens.

    confidence [n]: draft probabilities of the drafted tokens; accepted [n]: 0 or 1 (or rates).
    ridge: weight of the pull towards the identity, which decides where the data do not.
    """
    confidence = jnp.asarray(confidence, jnp.float64)
    accepted = jnp.asarray(accepted, jnp.float64)
    if confidence.shape != accepted.shape or confidence.ndim != 1:
        raise ValueError(
            f"confidence has shape {confidence.shape}, accepted {accepted.shape}: one accepted "
            f"flag per drafted token is needed"
        )
    offset, up, down = _fit_calibration(confidence, accepted, jnp.asarray(ridge, jnp.float64))
    return Calibration(offset=offset, up=up, down=down)


@float64
def reliability(confidence, accepted, bins: int = 10):
    """(mean confidence, acceptance rate, count) per bin [bins, 3], and the expected calibration
    error: the count-weighted mean of |rate - confidence|. Empty bins are NaN with count 0."""
    confidence = jnp.asarray(confidence, jnp.float64)
    accepted = jnp.asarray(accepted, jnp.float64)
    which = jnp.clip((confidence * bins).astype(int), 0, bins - 1)
    count = jnp.zeros(bins).at[which].add(1.0)
    filled = jnp.where(count > 0, count, 1.0)
    mean = jnp.zeros(bins).at[which].add(confidence) / filled
    rate = jnp.zeros(bins).at[which].add(accepted) / filled
    error = jnp.sum(count * jnp.abs(rate - mean)) / confidence.shape[0]
    empty = count == 0
    table = jnp.stack(
        [jnp.where(empty, jnp.nan, mean), jnp.where(empty, jnp.nan, rate), count], axis=1
    )
    return table, error
