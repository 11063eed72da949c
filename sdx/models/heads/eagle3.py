"""EAGLE-3 (Li et al. 2025): fused low, middle and high features, an LM head of its own.

fc maps the three features to the width; the first layer's attention reads the embedding and the
hidden state, each behind its own norm, side by side; the residual stream is the hidden state. The
output before the last norm is the next step's hidden state: no feature is imitated.
Legend: base.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sdx.models.cache import Fresh
from sdx.models.heads.base import Attend, Head, HeadConfig, HeadOutput
from sdx.models.llama import Block, TargetParts, rms_norm
from sdx.models.small_steps import PLAIN, multiply


class FusedBlock(Block):
    """A decoder layer whose attention reads [embedding; hidden], 2 D wide."""

    def __init__(self, config: HeadConfig, key: jax.Array, dtype: jnp.dtype):
        shape, D = config.block(), config.width
        super().__init__(shape, key, dtype)
        columns = self.qkv_DxN[...].shape[1]
        key = jax.random.fold_in(key, 1)
        self.norm_before_residual = config.norm_before_residual
        self.qkv_DxN = nnx.Param(jax.random.normal(key, (2 * D, columns), dtype) * (2 * D) ** -0.5)
        self.hidden_norm_D = nnx.Param(jnp.ones((D,), dtype))

    def project_pair(self, embedding: jax.Array, hidden: jax.Array, positions_BxT: jax.Array):
        """Queries, keys, values, and the start of the residual stream."""
        eps = self.config.norm_eps
        normed = rms_norm(hidden, self.hidden_norm_D[...], eps)
        pair = jnp.concatenate(
            [rms_norm(embedding, self.attention_norm_D[...], eps), normed], axis=-1
        )
        residual = normed if self.norm_before_residual else hidden
        return *self.project_normed(pair, positions_BxT), residual


class Eagle3(Head):
    """The first of K layers is fused; on disk the engines know K = 1 only."""

    MATRICES = ("fc_FxD", "head_DxU")

    def __init__(self, config: HeadConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32):
        self.config, self.forms = config, PLAIN
        D, F, U = config.width, config.feature_width, config.draft_vocab
        keys = jax.random.split(key, 2 + config.layers)
        self.fc_FxD = nnx.Param(jax.random.normal(keys[0], (F, D), dtype) * F**-0.5)
        first = FusedBlock(config, keys[2], dtype)
        others = [Block(config.block(), k, dtype) for k in keys[3:]]
        self.blocks = nnx.List([first, *others])
        self.norm_D = nnx.Param(jnp.ones((D,), dtype))
        self.head_DxU = nnx.Param(jax.random.normal(keys[1], (D, U), dtype) * D**-0.5)

    def fuse(self, features_BxTxF: jax.Array) -> jax.Array:
        return multiply(features_BxTxF, self, "fc_FxD")

    def __call__(
        self,
        parts: TargetParts,
        tokens_BxT: jax.Array,
        hidden_BxTxD: jax.Array,
        positions_BxT: jax.Array,
        attend: Attend,
        step: int = 0,
    ) -> HeadOutput:
        x, keys, values = hidden_BxTxD, [], []
        for layer, block in enumerate(self.blocks):
            if layer == 0:
                embedding = parts.embedding_VxD[tokens_BxT]
                q, k, v, x = block.project_pair(embedding, x, positions_BxT)
            else:
                q, k, v = block.project(x, positions_BxT)
            x = block.finish(x, attend(layer, q, k, v))
            keys.append(jnp.moveaxis(k, 2, 1))
            values.append(jnp.moveaxis(v, 2, 1))
        return HeadOutput(x, Fresh(keys=tuple(keys), values=tuple(values)))

    def logits(self, parts: TargetParts, hidden: jax.Array, step: int = 0) -> jax.Array:
        normed = rms_norm(hidden, self.norm_D[...], self.config.norm_eps)
        return multiply(normed, self, "head_DxU")
