"""Gradients of the analysis wing against central differences in float64."""

import jax
import jax.numpy as jnp
import numpy as np


def assert_gradient(function, point, rtol=1e-6, step=1e-3):
    """jax.grad of a scalar `function` of a vector equals the five-point difference, relative to the
    larger of the slope and the value's own scale per relative step."""
    with jax.enable_x64(True):
        f = jax.jit(function)
        x = np.asarray(point, float)
        gradient = np.asarray(jax.jit(jax.grad(function))(jnp.asarray(x)))
        value = abs(float(f(jnp.asarray(x))))
        for k in range(x.size):
            h = step * max(abs(x[k]), 1e-3)
            shifts = np.zeros((4, x.size))
            shifts[:, k] = np.array([-2, -1, 1, 2]) * h
            a, b, c, d = (float(f(jnp.asarray(x + s))) for s in shifts)
            difference = (a - 8 * b + 8 * c - d) / (12 * h)
            scale = max(abs(difference), 1e-3 * value / max(abs(x[k]), 1e-3))
            assert np.isfinite(gradient[k])
            assert abs(gradient[k] - difference) <= rtol * scale, (k, gradient[k], difference)
