"""All step forms compute the same; panels are used for the rows that the record names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.models.cache import empty_cache
from sdx.models.config import ModelConfig
from sdx.models.llama import Llama
from sdx.models.small_steps import (
    PLAIN,
    StepForms,
    measured_forms,
    multiply,
    multiply_panels,
    prepare,
    to_matrix,
    to_panels,
)

FORMS = StepForms(panel_width=16, first_rows=1, last_rows=6)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_panels_multiply_as_the_matrix_does(rows):
    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(((rows, 24), (24, 96))))
    got = jax.jit(lambda x, w: multiply_panels(x, to_panels(w, 32)))(x, w)
    np.testing.assert_allclose(got, x @ w, atol=2e-5, rtol=2e-5)


def test_storage_is_reversible_and_narrows_until_it_divides():
    w = jnp.arange(6 * 96, dtype=jnp.float32).reshape(6, 96)
    assert to_panels(w, 64).shape == (3, 6, 32)
    np.testing.assert_array_equal(to_matrix(to_panels(w, 64)), w)
    assert to_panels(w[:, :40], 64) is None  # 8 columns would be too narrow


@pytest.mark.parametrize("tied", [False, True])
def test_a_prepared_model_computes_the_same(tied, tokens, forward):
    config = ModelConfig(
        vocab_size=48, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_width=48,
        tie_embedding=tied, max_positions=64,
    )  # fmt: skip
    plain = Llama(config, jax.random.key(0))
    panels = prepare(plain, FORMS)
    assert plain.forms == PLAIN and panels.forms == FORMS
    for count in (1, 2, 4):  # 2, 4 and 8 rows: panels, panels, plain
        cache = empty_cache(config, 2, 16)
        expected = forward(plain, tokens[:, :count], cache).logits_BxTxV
        got = forward(panels, tokens[:, :count], cache).logits_BxTxV
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)
    again = prepare(panels, PLAIN)
    assert jax.tree.structure(again) == jax.tree.structure(plain)


def test_the_form_follows_the_number_of_rows(model):
    """Panels set to zero show where they are used."""
    block = prepare(model, FORMS).blocks[0]
    block.qkv_DxN_panels = type(block.qkv_DxN)(jnp.zeros_like(block.qkv_DxN_panels[...]))
    for rows, zero in ((1, True), (6, True), (7, False)):
        x = jnp.ones((rows, 32))
        assert (multiply(x, block, "qkv_DxN") == 0).all() == zero


def test_narrow_types_keep_plain_matrices(config):
    half = Llama(config, jax.random.key(0), jnp.bfloat16)
    assert jax.tree.structure(prepare(half, PLAIN)) == jax.tree.structure(half)
    assert not hasattr(prepare(half, FORMS).blocks[0], "qkv_DxN_panels")


def test_measuring_gives_a_usable_record():
    forms = measured_forms(32, 64, rows=(2, 64), repeats=2)
    assert forms == PLAIN or (forms.first_rows in (2, 64) and forms.last_rows >= forms.first_rows)
