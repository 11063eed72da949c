"""Draft heads as networks: shapes, storage, and the unroll against a naive simulation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.models.config import ModelConfig
from sdx.models.discriminator import Discriminator
from sdx.models.heads import (
    HeadConfig,
    create_head,
    features_of,
    is_head,
    load_head,
    save_head,
    unroll,
)
from sdx.models.heads.storage import named_parameters
from sdx.models.llama import Llama
from sdx.models.small_steps import PLAIN

TARGET = ModelConfig(
    vocab_size=11, width=8, layers=3, heads=2, kv_heads=1, head_dim=4, ffn_width=12,
    max_positions=32,
)  # fmt: skip
SHAPES = {
    "eagle": {"kind": "eagle"},
    "koala": {"kind": "eagle", "layers": 2},
    "eagle3": {"kind": "eagle3", "kept": (0, 2, 3, 7, 9)},
    "eagle3-deep": {"kind": "eagle3", "layers": 2, "norm_before_residual": True},
    "poss": {"kind": "poss", "specialists": 2, "positions_per_specialist": 2},
    "poss-deep": {"kind": "poss", "specialists": 3, "layers": 2},
    "medusa": {"kind": "medusa", "steps": 4, "layers": 2},
    "medusa-own": {"kind": "medusa", "steps": 4, "own_head": True},
}
# Tiny networks: compiling takes longer than running.
quick = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
SEQUENTIAL = ["eagle", "eagle3-deep", "poss", "poss-deep"]  # the rest are their special cases


@pytest.fixture(scope="module")
def target():
    return Llama(TARGET, jax.random.key(0))


@pytest.fixture(scope="module")
def states(target):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 9)))
    return tokens, target.states(tokens)


def make(name, target=None):
    config = HeadConfig.for_target(TARGET, **SHAPES[name])
    head = create_head(config, jax.random.key(1), None if target is None else target.parts())
    # Zero weights (Medusa starts as the identity) would hide mistakes.
    leaves, tree = jax.tree.flatten(head)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


def naive_draft(head, parts, tokens, features, start, steps):
    """Logits of `steps` drafts, of which the first pairs slot `start`: one sequence, one slot at a
    time, attention over an explicit list of pairs (the definition that unroll vectorises)."""
    pairs = [(tokens[t + 1], features[t], t, 0) for t in range(start + 1)]
    seen: dict[int, list] = {}
    found = []

    def attend(layer, q, k, v):
        seen.setdefault(layer, []).append((k[0, 0], v[0, 0]))
        keys, values = (jnp.stack(x) for x in zip(*seen[layer], strict=True))
        H, K = q.shape[2], k.shape[2]
        keys, values = (jnp.repeat(x, H // K, axis=1) for x in (keys, values))
        weights = jax.nn.softmax(jnp.einsum("he,she->hs", q[0, 0], keys) * q.shape[-1] ** -0.5)
        return jnp.einsum("hs,she->he", weights, values).reshape(1, 1, -1)

    def read(token, hidden, slot, step):
        return head(
            parts, token[None, None], hidden[None, None], jnp.array([[slot]]), attend, step
        ).hidden_BxTxD[0, 0]

    for token, feature, slot, _ in pairs:
        hidden = read(token, head.fuse(feature), slot, 0)
    found.append(head.logits(parts, hidden, 0))
    for step in range(1, steps):
        slot = start + step
        hidden = read(tokens[slot + 1], hidden, slot, step)
        found.append(head.logits(parts, hidden, step))
    return jnp.stack(found)


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_unroll_is_drafting_at_every_slot_at_once(name, target, states):
    """Step j at slot t is what j drafts after the target's feature t - j compute one by one."""
    head, parts, (tokens, read) = make(name), target.parts(), states
    features = features_of(head.config, read)
    steps, start = 4, 2
    found = quick(lambda: unroll(head, parts, tokens, features, steps))()
    drafts = quick(naive_draft, static_argnums=(4, 5))(
        head, parts, tokens[1], features[1], start, steps
    )
    for step in range(steps):
        unrolled = found[step].logits_BxSxU[1, start + step]
        np.testing.assert_allclose(unrolled, drafts[step], atol=2e-5)


@pytest.mark.parametrize("name", ["medusa", "medusa-own"])
def test_medusa_heads_read_the_targets_feature(name, target, states):
    head, parts, (tokens, read) = make(name), target.parts(), states
    found = unroll(head, parts, tokens, read.hidden_BxTxD, 4)
    x = read.hidden_BxTxD
    K = head.config.layers
    for block in head.blocks[2 * K : 3 * K]:
        x = x + jax.nn.silu(x @ block.weight_DxD[...] + block.bias_D[...])
    own = head.lm_head(2).weight_DxV[...] if name == "medusa-own" else parts.head()
    np.testing.assert_allclose(found[2].logits_BxSxU[:, 2:], (x @ own)[:, :-3], atol=1e-5)
    with pytest.raises(ValueError, match="5 steps of a head with 4"):
        unroll(head, parts, tokens, read.hidden_BxTxD, 5)


def test_specialists_learn_from_their_own_steps_only(target, states):
    head, (tokens, read) = make("poss"), states

    def loss(head, step):
        found = unroll(head, target.parts(), tokens, read.hidden_BxTxD, 4)
        return (found[step].logits_BxSxU[:, step:] ** 2).sum()

    for step in (1, 2):
        slope = quick(jax.grad(loss), static_argnums=1)(head, step)
        norms = [float(jnp.abs(b.qkv_DxN[...]).max()) for b in slope.blocks]
        assert norms[step // 2] > 0 and norms[1 - step // 2] == 0


@pytest.mark.parametrize("name", SHAPES)
def test_saved_heads_come_back_bit_for_bit(name, tmp_path, target):
    head = make(name, target)
    save_head(tmp_path, head)
    back = load_head(tmp_path, forms=PLAIN)
    assert is_head(tmp_path) and back.config == head.config
    ours, theirs = named_parameters(head), named_parameters(back)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        np.testing.assert_array_equal(value[...], theirs[key][...])
    assert jax.tree.structure(head) == jax.tree.structure(back)


def test_a_reduced_vocabulary_names_target_tokens(target):
    head = make("eagle3", target)
    full = head.expand(jnp.arange(5.0))
    assert full.shape == (11,) and np.isneginf(full).sum() == 6
    np.testing.assert_array_equal(full[np.array(head.config.kept)], np.arange(5.0))


def test_own_lm_heads_start_as_the_targets(target):
    config = HeadConfig.for_target(TARGET, kind="eagle3", kept=(1, 4))
    head = create_head(config, jax.random.key(0), target.parts())
    np.testing.assert_array_equal(head.head_DxU[...], target.head()[:, [1, 4]])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"kind": "lookahead"}, "head kind 'lookahead'"),
        ({"kind": "eagle", "positions_per_specialist": 1}, "positions_per_specialist = 1"),
        ({"kind": "medusa", "steps": 0}, "steps = 0"),
        ({"kind": "eagle", "kept": (1,)}, "keep all ids"),
        ({"kind": "eagle3", "kept": (3, 2)}, "must ascend"),
        ({"kind": "eagle", "layers": 0}, "layers = 0"),
    ],
)
def test_shapes_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        HeadConfig.for_target(TARGET, **fields)


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no draft head"):
        load_head(tmp_path / "absent")
    head = make("eagle")
    save_head(tmp_path, head)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"width": 8', '"width": 6'))
    with pytest.raises(ValueError, match="has shape"):
        load_head(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="corrupt or truncated"):
        load_head(tmp_path)


def test_configs_survive_json():
    config = HeadConfig.for_target(TARGET, **SHAPES["eagle3"])
    assert HeadConfig.from_fields(config.to_fields()) == config
    with pytest.raises(ValueError, match="unknown field 'depth'"):
        HeadConfig.from_fields(config.to_fields() | {"depth": 1})


@pytest.mark.parametrize("layers", [1, 3])
def test_the_discriminator_scores_every_position(layers):
    adversary = Discriminator(8, 5, layers, jax.random.key(0), inner_width=6)
    hidden, logits = jnp.ones((2, 3, 8)), jnp.arange(30.0).reshape(2, 3, 5)
    scores = adversary(hidden, logits)
    assert scores.shape == (2, 3)
    slope = jax.grad(lambda x: adversary(hidden, x).sum())(logits)
    assert float(jnp.abs(slope).min()) >= 0 and float(jnp.abs(slope).max()) > 0
    with pytest.raises(ValueError, match="layers = 0"):
        Discriminator(8, 5, 0, jax.random.key(0))


def test_configs_are_part_of_the_jit_key():
    config = HeadConfig.for_target(TARGET, kind="eagle")
    assert hash(config) == hash(dataclasses.replace(config))
