"""The accepted path reaches the cache, and nothing else changes; dispatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.kernels import cache_write
from sdx.kernels.dispatch import dispatch


def operands(d=80):
    rng = np.random.default_rng(0)
    draw = lambda *n: jnp.asarray(rng.standard_normal(n), jnp.float32)  # noqa: E731
    path = jnp.asarray(rng.integers(0, 6, (3, 4)), jnp.int32)
    counts, lengths = jnp.array([0, 4, 3], jnp.int32), jnp.array([20, 5, 18], jnp.int32)
    return (
        draw(3, 2, 20, d), draw(3, 2, 20, d), draw(3, 2, 6, d), draw(3, 2, 6, d),
        path, counts, lengths,
    )  # fmt: skip


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_only_the_accepted_path_is_written(implementation):
    args = operands()
    got = cache_write(*args, implementation=implementation)
    *_, path, counts, lengths = args
    for old, fresh, new in zip(args[:2], args[2:4], got, strict=True):
        want = np.array(old)
        for b in range(3):
            for i in range(int(counts[b])):
                if int(lengths[b]) + i < 20:  # what does not fit is dropped
                    want[b, :, int(lengths[b]) + i] = fresh[b, :, int(path[b, i])]
        np.testing.assert_array_equal(new, want)


def test_the_kernel_lowers_for_cuda(lower):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(128)]
    run = lambda *a: cache_write(*a, implementation="triton", interpret=False)  # noqa: E731
    assert "cache_write_triton" in lower(run, "cuda", *shapes)


def test_dispatch_falls_through_only_on_not_implemented():
    def refuses():
        raise NotImplementedError("too wide")

    def broken():
        raise TypeError("a defect")

    table = {"triton": refuses, "reference": lambda: "ran"}
    assert dispatch("op", table, None, platform="gpu") == "ran"
    with pytest.raises(NotImplementedError):
        dispatch("op", table, "triton")
    with pytest.raises(TypeError):
        dispatch("op", {"triton": broken, "reference": lambda: "ran"}, None, platform="gpu")
    with pytest.raises(ValueError, match="triton: too wide"):
        dispatch("op", {"triton": refuses}, None, platform="gpu")
    with pytest.raises(ValueError, match="no implementation 'tpu'"):
        dispatch("op", table, "tpu")
