"""The form of a matrix product per number of tokens: chosen by measurement, behind one function.

A decoding step multiplies a few rows by every matrix of the model, and XLA on a CPU does that in
very different ways: `x @ W` is fast for one row and for many, and up to three times too slow for
2 to 16. For those the matrix is stored a second time in *panels*, `[N / p, K, p]`, and multiplied
by a fused multiply-and-sum over K, whose panel stays in the first-level cache. Both forms compute
the same sums in another order.

`StepForms` says which form serves which numbers of rows. It is data: `prepare` adds the panels and
hangs the record on the modules; `default_forms` is what measurements found for the platform;
`measured_forms` measures here.
Legend: K rows and N columns of a matrix, p columns of a panel, X rows of activations (tokens).
"""

from __future__ import annotations

import dataclasses
import time
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

M = TypeVar("M")
PANELS = "_panels"  # suffix of a matrix's second storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepForms:
    """Panels of (about) `panel_width` columns serve `first_rows` to `last_rows` rows of
    activations, `x @ W` fewer and more. Width 0: no panels."""

    panel_width: int = 0
    first_rows: int = 2
    last_rows: int = 24


PLAIN = StepForms()


def default_forms() -> StepForms:
    """What was found to be fastest on this kind of device.

    On two cores of an EPYC (Zen 4): with JAX 0.10 panels win from one row on, with 0.12 from two.
    """
    if jax.default_backend() != "cpu":
        return PLAIN
    return StepForms(panel_width=64, first_rows=1 if jax.__version_info__ < (0, 11) else 2)


def to_panels(matrix_KxN: jax.Array, width: int) -> jax.Array | None:
    """`[N / p, K, p]` with p = width, halved until it divides N; None under 16 columns."""
    K, N = matrix_KxN.shape
    while N % width:
        width //= 2
    if width < 16:
        return None
    return matrix_KxN.reshape(K, N // width, width).swapaxes(0, 1)


def to_matrix(stored: jax.Array) -> jax.Array:
    """`[K, N]` from either storage."""
    if stored.ndim == 2:
        return stored
    return stored.swapaxes(0, 1).reshape(stored.shape[1], -1)


def multiply_panels(x_XxK: jax.Array, panels: jax.Array, apart: bool = False) -> jax.Array:
    """x @ W, `[X, N]`, for W in panels. apart: other products with this W wait for none of this
    one's results (Medusa's positions)."""
    X = x_XxK.shape[0]
    # One row is doubled: XLA rewrites the sum over a single row into a form that takes 60 times
    # as long (the barrier keeps it from seeing that half is thrown away), while two rows cost
    # hardly more than one.
    rows = jnp.concatenate([x_XxK, x_XxK]) if X == 1 else x_XxK
    # Uses of one matrix are kept apart: two passes in one loop would share the broadcast panels,
    # which XLA then writes to memory once per row instead of fusing (8 times as long).
    if apart:  # the panels' barriers alone would be merged into one
        panels, rows = jax.lax.optimization_barrier((panels, rows))
    else:
        panels = jax.lax.optimization_barrier(panels)
    products = (rows[None, :, :, None] * panels[:, None]).sum(axis=2)
    products = jax.lax.optimization_barrier(products) if X == 1 else products
    return products[:, :X].swapaxes(0, 1).reshape(X, -1)


def multiply(x: jax.Array, module: nnx.Module, name: str, apart: bool = False) -> jax.Array:
    """x @ W for x `[..., K]` and W the matrix `name` of `module`, in the form that
    `module.forms` has for so many rows. apart: see `multiply_panels`."""
    panels = getattr(module, name + PANELS, None)
    X = x.size // x.shape[-1]
    if panels is None or not module.forms.first_rows <= X <= module.forms.last_rows:
        return x @ _plain(module, name)
    out = multiply_panels(x.reshape(X, -1), panels[...], apart)
    return out.reshape(*x.shape[:-1], -1)


def prepare(model: M, forms: StepForms | None = None) -> M:
    """The same model (arrays shared) with panels added as `forms` says (None: the platform's).

    Serves modules whose `MATRICES` names their matrices, the model's own and its `blocks`'; the
    model's head may be its embedding. Only float32: in narrower types the sum would round.
    """
    forms = default_forms() if forms is None else forms
    model = jax.tree.map(lambda leaf: leaf, model)  # new modules around the same arrays
    for module in (model, *model.blocks):
        module.forms = forms
        for name in module.MATRICES:
            if hasattr(module, name + PANELS):
                delattr(module, name + PANELS)
            matrix = _plain(module, name)
            if not forms.panel_width or matrix is None or matrix.dtype != jnp.float32:
                continue
            panels = to_panels(matrix, forms.panel_width)
            if panels is not None:
                setattr(module, name + PANELS, nnx.Param(panels))
    return model


def _plain(module: nnx.Module, name: str) -> jax.Array | None:
    """The matrix `[K, N]`; of a tied head the embedding's transpose; None if there is none."""
    if name == "head_DxV":
        return module.head()
    return getattr(module, name)[...] if hasattr(module, name) else None


def measured_forms(
    width: int = 256,
    columns: int = 1024,
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32),
    repeats: int = 5,
) -> StepForms:
    """Times both forms for these numbers of rows and a `[width, columns]` matrix on this device;
    panels then serve from the first number at which they win to the last."""
    matrix = jax.random.normal(jax.random.key(0), (width, columns))
    panels = to_panels(matrix, 64)
    wins = []
    for X in rows:
        x = jnp.ones((X, width))
        plain = _repeated(lambda x: x @ matrix, x)
        summed = _repeated(lambda x: multiply_panels(x, panels), x)
        times = [(_seconds(plain, x), _seconds(summed, x)) for _ in range(repeats)]  # interleaved
        if np.min(times, axis=0)[1] < np.min(times, axis=0)[0]:
            wins.append(X)
    return StepForms(panel_width=64, first_rows=wins[0], last_rows=wins[-1]) if wins else PLAIN


def _repeated(product, x: jax.Array, steps: int = 64):
    """`steps` dependent products in one compiled loop, run once."""

    def step(_, x):
        return jnp.tanh(product(x)[:, : x.shape[1]])

    run = jax.jit(lambda x: jax.lax.fori_loop(0, steps, step, x)).lower(x).compile()
    run(x).block_until_ready()
    return run


def _seconds(run, x: jax.Array) -> float:
    begin = time.perf_counter()
    run(x).block_until_ready()
    return time.perf_counter() - begin
