"""Lambert W against mpmath; safe pieces and smooth maxima at their limits."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from central_differences import assert_gradient

from sdx.theory import numerics
from sdx.theory.numerics import float64, lambertw_gap, lambertw_m1_log

ARGUMENTS = [1e-300, 1e-200, 1e-100, 1e-50, *(10.0**k for k in range(-30, 7))]
ARGUMENTS += list(10 ** np.random.default_rng(0).uniform(-20, 6, 60))


def exact_gap(u):
    """x - log1p(x) = u to 40 digits."""
    u = mpmath.mpf(u)
    s = mpmath.sqrt(2 * u)
    x = s + s * s / 3 if u < 1 else u + mpmath.log(1 + u)
    for _ in range(80):
        step = (x - mpmath.log1p(x) - u) * (1 + 1 / x)
        x -= step
        if abs(step) < mpmath.mpf(10) ** -38 * x:
            break
    return x


@pytest.fixture(scope="module")
def exact():
    gaps = []
    for u in ARGUMENTS:
        mpmath.mp.dps = 340 if u < 1e-40 else 60  # x - log1p(x) cancels to x^2 / 2
        gaps.append(exact_gap(u))
    yield gaps
    mpmath.mp.dps = 15


def relative_error(ours, gaps, function):
    mpmath.mp.dps = 60
    return max(
        abs(float((mpmath.mpf(float(o)) / function(x)) - 1))
        for o, x in zip(ours, gaps, strict=True)
    )


def test_lambertw_to_the_attainable_digits(exact):
    u = np.array(ARGUMENTS)
    assert relative_error(np.asarray(lambertw_gap(u)), exact, lambda x: x) < 1e-14
    assert relative_error(-np.asarray(lambertw_m1_log(u)), exact, lambda x: 1 + x) < 1e-15


def test_lambertw_derivatives(exact):
    with jax.enable_x64(True):
        first = jax.vmap(jax.grad(lambertw_gap))
        second = jax.vmap(jax.grad(jax.grad(lambertw_gap)))
        minus = jax.vmap(jax.grad(lambertw_m1_log))
        u = jnp.array(ARGUMENTS)
        one, two, three = (np.asarray(f(u)) for f in (first, second, minus))
        at_zero = [np.asarray(f(jnp.zeros(1))) for f in (first, second)]
    assert relative_error(one, exact, lambda x: 1 + 1 / x) < 1e-10
    np.testing.assert_array_equal(three, -one)
    keep = [i for i, u in enumerate(ARGUMENTS) if u >= 1e-200]
    deep = [exact[i] for i in keep]
    assert relative_error(two[keep], deep, lambda x: -(1 + 1 / x) / x**2) < 1e-10
    assert at_zero[0] == np.inf and at_zero[1] == -np.inf


def test_lambertw_at_the_branch_point_and_below():
    assert float(lambertw_gap(0.0)) == 0.0
    assert float(lambertw_m1_log(0.0)) == -1.0
    assert np.isnan(float(lambertw_gap(-1e-3)))


def test_lambertw_is_finite_in_float32():
    u = jnp.float32([0.0, 1e-45, 1e-38, 1e-30, 1e-7, 1.0, 1e6, 1e30, 3e38])
    assert np.all(np.isfinite(np.asarray(numerics._gap(u))))
    assert numerics._gap(u).dtype == jnp.float32


def test_float64_casts_floats_in_pytrees_and_leaves_the_flag_off():
    seen = {}

    @float64
    def look(tree):
        seen.update(jax.tree.map(lambda x: getattr(x, "dtype", type(x)), tree))
        return tree["a"] + 1e-12

    out = look({"a": 1.0, "b": np.float32([1]), "c": 3, "d": "name"})
    assert seen == {"a": jnp.float64, "b": jnp.float64, "c": int, "d": str}
    assert float(out) == 1.0 + 1e-12
    assert jnp.ones(1).dtype == jnp.float32


@pytest.mark.parametrize("z", [-1e3, -1.0, -0.049, -1e-9, 0.0, 1e-9, 0.051, 2.0])
def test_expm1_ratio(z):
    with jax.enable_x64(True):
        value, slope = jax.value_and_grad(numerics.expm1_ratio)(jnp.asarray(z))
        curvature = jax.grad(jax.grad(numerics.expm1_ratio))(jnp.asarray(z))
    mpmath.mp.dps = 50
    f = lambda t: mpmath.expm1(t) / t if t else mpmath.mpf(1)  # noqa: E731
    z = mpmath.mpf(z)
    h = mpmath.mpf(10) ** -15
    assert float(value) == pytest.approx(float(f(z)), rel=1e-14)
    assert float(slope) == pytest.approx(float((f(z + h) - f(z - h)) / (2 * h)), rel=1e-9)
    assert float(curvature) == pytest.approx(
        float((f(z + h) - 2 * f(z) + f(z - h)) / h**2), rel=1e-8
    )


def test_geometric_sum_is_the_sum():
    with jax.enable_x64(True):
        for ratio in (0.3, 0.999999, 1.0):
            terms = np.cumsum(ratio ** np.arange(50.0))
            ours = numerics.geometric_sum(jnp.log(ratio), jnp.arange(1.0, 51.0))
            np.testing.assert_allclose(np.asarray(ours), terms, rtol=1e-13)


def test_p_norm_maximum_limits_and_gradient():
    with jax.enable_x64(True):
        f = numerics.p_norm_maximum
        assert float(f(3.0, 4.0, 2.0)) == pytest.approx(5.0, rel=1e-15)
        assert float(f(1e-200, 1e200, 7.0)) == 1e200
        assert float(f(2.0, 5.0, 1e6)) == pytest.approx(5.0, rel=1e-12)
        slopes = jax.grad(lambda x: f(x[0], x[1], 3.0))(jnp.zeros(2))
        assert np.all(np.isfinite(np.asarray(slopes)))
    assert_gradient(lambda x: f(x[0], x[1], x[2]), [1.3, 0.7, 2.5])


def test_soft_maximum_cools_to_the_maximum():
    x = np.array([1.0, 3.0, 2.5])
    with jax.enable_x64(True):
        hot, cold = (float(numerics.soft_maximum(jnp.asarray(x), t)) for t in (1.0, 1e-3))
    assert hot > cold >= 3.0
    assert cold == pytest.approx(3.0, abs=1e-12)
    assert_gradient(lambda x: numerics.soft_maximum(x, 0.3), x)


def test_safe_pieces_have_no_nan_gradient():
    with jax.enable_x64(True):
        assert float(numerics.safe_divide(1.0, 0.0)) == 0.0
        assert np.isfinite(float(jax.grad(lambda d: numerics.safe_divide(1.0, d))(0.0)))
        assert float(jax.grad(numerics.safe_log)(0.0)) == 0.0
