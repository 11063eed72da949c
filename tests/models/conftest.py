"""One tiny model and its jitted passes, shared by the tests of this folder."""

import jax
import jax.numpy as jnp
import pytest

from sdx.models.config import ModelConfig
from sdx.models.llama import Llama

CONFIG = ModelConfig(
    vocab_size=48,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_width=48,
    max_positions=64,
)


@pytest.fixture(scope="session")
def config():
    return CONFIG


@pytest.fixture(scope="session")
def model():
    return Llama(CONFIG, jax.random.key(0))


@pytest.fixture(scope="session")
def forward():
    """jitted (model, tokens, cache, mask, positions) -> Output"""
    return jax.jit(lambda m, tokens, cache, mask=None, at=None: m(tokens, cache, mask, at))


@pytest.fixture(scope="session")
def whole():
    """jitted (model, tokens) -> logits of all positions, without a cache"""
    return jax.jit(lambda m, tokens: m.logits(m.features(tokens)))


@pytest.fixture(scope="session")
def tokens():
    return jax.random.randint(jax.random.key(1), (2, 12), 0, CONFIG.vocab_size, jnp.int32)
