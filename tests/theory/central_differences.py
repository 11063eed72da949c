"""Gradients of the analysis wing against central differences in float64."""

import jax
import jax.numpy as jnp
import numpy as np


def assert_gradient(function, *points, rtol=1e-6, step=1e-3):
    """jax.grad of a scalar `function` of a vector equals the five-point difference at each of
    `points`, relative to the larger of the slope and the value's own scale per relative step.

    Slope and all shifted values come from one compiled, vmapped program.
    """
    points = np.asarray(points, float)
    n = points.shape[1]
    h = step * np.maximum(np.abs(points), 1e-3)  # [points, n]
    shifts = np.concatenate([k * np.eye(n) for k in (-2, -1, 1, 2)] + [np.zeros((1, n))])
    with jax.enable_x64(True):
        both = jax.jit(jax.vmap(jax.value_and_grad(function)))
        batch = points[:, None, :] + shifts * h[:, None, :]
        value, slope = (np.asarray(v) for v in both(jnp.asarray(batch.reshape(-1, n))))
    value = value.reshape(len(points), 4 * n + 1)
    gradient = slope.reshape(len(points), 4 * n + 1, n)[:, -1]
    a, b, c, d = (value[:, k * n : (k + 1) * n] for k in range(4))
    difference = (a - 8 * b + 8 * c - d) / (12 * h)
    own = 1e-3 * np.abs(value[:, -1:]) / np.maximum(np.abs(points), 1e-3)
    scale = np.maximum(np.abs(difference), own)
    assert np.isfinite(gradient).all()
    assert (np.abs(gradient - difference) <= rtol * scale).all(), (gradient, difference)
