"""The form of a matrix product and of attention per number of tokens: chosen by measurement.

A decoding step multiplies a few rows by every matrix of the model, and XLA on a CPU does that in
very different ways: `x @ W` is fast for one row and for many, and several times too slow for 2 to
12. For those the matrix is stored in *panels*, `[N / p, K, p]`, and multiplied by a fused
multiply-and-sum whose inner loop runs over a panel's p columns while the panel stays in the
first-level cache. The same holds of attention to few fresh tokens. All forms compute the same
sums in another order.

`StepForms` says which form is used where. It is data: `prepare` stores the matrices accordingly
and hangs the record on the model; `measured_forms` finds the fastest on this machine;
`default_forms` is what was found for each platform.
Legend: K rows and N columns of a matrix, p columns of a panel, X rows of activations (tokens).
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

M = TypeVar("M")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepForms:
    """Which form serves how many tokens.

    panel_width: p, columns of a panel; 0 stores plain matrices. panel_rows: the most rows that go
    through panels, `x @ W` above. sum_tokens: the most fresh tokens per row of the batch whose
    attention scores are a multiply-and-sum, `dot_general` above.
    """

    panel_width: int = 0
    panel_rows: int = 0
    sum_tokens: int = 0


PLAIN = StepForms()
# Measured on two cores of an EPYC (Zen 4): see `measured_forms`.
CPU = StepForms(panel_width=64, panel_rows=24, sum_tokens=8)


def default_forms() -> StepForms:
    """What was found to be fastest on this kind of device."""
    return CPU if jax.default_backend() == "cpu" else PLAIN


def to_panels(matrix_KxN: jax.Array, width: int) -> jax.Array:
    """`[N / p, K, p]`; a matrix whose columns do not divide stays as it is."""
    K, N = matrix_KxN.shape
    if not width or N % width:
        return matrix_KxN
    return matrix_KxN.reshape(K, N // width, width).swapaxes(0, 1)


def to_matrix(stored: jax.Array) -> jax.Array:
    """`[K, N]` from either storage."""
    if stored.ndim == 2:
        return stored
    return stored.swapaxes(0, 1).reshape(stored.shape[1], -1)


def multiply(x: jax.Array, stored: jax.Array, forms: StepForms) -> jax.Array:
    """x @ W for x `[..., K]`, in the form that suits the number of rows and W's storage."""
    if stored.ndim == 2:
        return x @ stored
    panels, K, p = stored.shape
    X = x.size // K
    if forms.panel_rows < X:
        return x @ to_matrix(stored)
    # One row is doubled: XLA rewrites the sum over a single row into a form that takes 60 times
    # as long, while two rows cost hardly more than one.
    rows = x.reshape(X, K)
    rows = jnp.concatenate([rows, rows]) if X == 1 else rows
    products = (rows[None, :, :, None] * stored[:, None]).sum(axis=2)
    return products[:, :X].swapaxes(0, 1).reshape(*x.shape[:-1], panels * p)


def prepare(model: M, forms: StepForms | None = None) -> M:
    """The same model with its matrices stored for `forms` (None: the platform's default).

    Works on every module that keeps matrices as rank-2 parameters of its `blocks` and says in
    `small_step_matrices` which of its own are heads; others come back unchanged.
    """
    forms = default_forms() if forms is None else forms
    if not hasattr(model, "forms"):
        return model
    model = jax.tree.map(lambda leaf: leaf, model)  # new modules around the same arrays
    width = forms.panel_width
    for block in model.blocks:
        for name in block.MATRICES:
            if hasattr(block, name):
                plain = to_matrix(getattr(block, name)[...])
                setattr(block, name, nnx.Param(to_panels(plain, width)))
        block.forms = forms
    if hasattr(model, "head_DxV"):
        tied = model.config.tie_embedding
        plain = model.embedding_VxD[...].T if tied else to_matrix(model.head_DxV[...])
        del model.head_DxV
    else:
        plain = model.embedding_VxD[...].T
    stored = to_panels(plain, width)
    if stored.ndim == 3 or not model.config.tie_embedding:
        model.head_DxV = nnx.Param(stored)
    model.forms = forms
    return model
