"""Networks to engine files and back: the same weights, the same drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.interop.draft_heads import from_engine, is_draft_head, load_draft_head, to_engine
from sdx.interop.heads import read_head, write_head
from sdx.models.config import ModelConfig
from sdx.models.heads import HeadConfig, create_head, save_head
from sdx.models.heads.storage import named_parameters
from sdx.models.llama import TargetParts

TARGET = ModelConfig(
    vocab_size=11, width=8, layers=6, heads=4, kv_heads=2, head_dim=4, ffn_width=12,
    max_positions=32,
)  # fmt: skip
PARTS = TargetParts(
    embedding_VxD=jax.random.normal(jax.random.key(5), (11, 8)),
    head_DxV=jax.random.normal(jax.random.key(6), (8, 11)),
)
HEADS = {
    "eagle3": {"kind": "eagle3"},
    "eagle3-reduced": {"kind": "eagle3", "kept": (1, 4, 9), "norm_before_residual": True},
    "medusa": {"kind": "medusa", "steps": 3, "layers": 2, "own_head": True},
}


def noisy(name):
    head = create_head(HeadConfig.for_target(TARGET, **HEADS[name]), jax.random.key(1))
    leaves, tree = jax.tree.flatten(head)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return jax.tree.unflatten(
        tree, [x + jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    )


def assert_same(a, b):
    ours, theirs = named_parameters(a), named_parameters(b)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        np.testing.assert_array_equal(value[...], theirs[key][...])


@pytest.mark.parametrize("name", HEADS)
def test_a_head_survives_the_engines_file(name, tmp_path):
    head = noisy(name)
    write_head(tmp_path, to_engine(head))
    layers = head.config.feature_layers or None
    back = from_engine(read_head(tmp_path), layers)
    if name != "medusa":  # its file has no positions, norms, nor attention
        assert back.config == head.config
    assert_same(head, back)


def test_the_speculators_wrapping_too(tmp_path):
    head = noisy("eagle3-reduced")
    write_head(tmp_path, to_engine(head), "speculators", verifier="some/target")
    back = from_engine(read_head(tmp_path), head.config.feature_layers)
    assert back.config == head.config
    assert_same(head, back)


def test_a_medusa_head_without_lm_heads_gets_the_targets():
    config = HeadConfig.for_target(TARGET, kind="medusa", steps=2)
    head = create_head(config, jax.random.key(0))
    with pytest.raises(ValueError, match="pass the target's parts"):
        to_engine(head)
    back = from_engine(to_engine(head, PARTS))
    feature = jnp.arange(8.0)[None, None]
    for step in range(2):
        hidden = head(PARTS, None, feature, None, None, step).hidden_BxTxD
        np.testing.assert_allclose(
            head.logits(PARTS, hidden, step), back.logits(PARTS, hidden, step), rtol=1e-6
        )


@pytest.mark.parametrize("fields", [{"kind": "eagle"}, {"kind": "eagle3", "layers": 2}])
def test_heads_without_a_format_are_refused(fields):
    head = create_head(HeadConfig.for_target(TARGET, **fields), jax.random.key(0))
    with pytest.raises(ValueError, match="save it with"):
        to_engine(head)


def test_the_fused_layers_must_be_named():
    with pytest.raises(ValueError, match="name the target layers"):
        from_engine(to_engine(noisy("eagle3")))


def test_any_folder_of_a_head_is_recognised(tmp_path):
    head = noisy("eagle3-reduced")
    save_head(tmp_path / "own", head)
    write_head(tmp_path / "engine", to_engine(head))
    write_head(tmp_path / "wrapped", to_engine(head), "speculators", verifier="some/target")
    write_head(tmp_path / "medusa", to_engine(noisy("medusa")))
    for name in ("own", "engine", "wrapped", "medusa"):
        assert is_draft_head(tmp_path / name)
    assert_same(load_draft_head(tmp_path / "own", 6), load_draft_head(tmp_path / "engine", 6))
    assert load_draft_head(tmp_path / "engine", 6).config == head.config
    assert load_draft_head(tmp_path / "medusa", 6).config.steps == 3
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    assert not is_draft_head(tmp_path / "other") and not is_draft_head(tmp_path / "none")
