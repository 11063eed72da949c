"""EAGLE and PosS: embedding and feature joined, decoder layers, the target's LM head.

EAGLE (Li et al. 2024): x = fc [embedding; feature], K decoder layers, and the output is the
predicted feature itself. HASS trains the same network over several steps, KOALA stacks K layers.
PosS: one such stack per specialist behind a shared fc; every specialist has its own keys of all
tokens, the committed ones included.
Legend: base.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sdx.models.cache import Fresh
from sdx.models.heads.base import Attend, Head, HeadConfig, HeadOutput, no_keys
from sdx.models.llama import Block, TargetParts
from sdx.models.small_steps import PLAIN, multiply


class Eagle(Head):
    """`blocks` holds the layers of specialist 0, then of specialist 1, ..."""

    MATRICES = ("fc_2DxD",)

    def __init__(self, config: HeadConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32):
        self.config, self.forms, D = config, PLAIN, config.width
        keys = jax.random.split(key, 1 + config.cached_layers)
        self.fc_2DxD = nnx.Param(jax.random.normal(keys[0], (2 * D, D), dtype) * (2 * D) ** -0.5)
        self.fc_bias_D = nnx.Param(jnp.zeros((D,), dtype))
        self.blocks = nnx.List([Block(config.block(), k, dtype) for k in keys[1:]])

    def __call__(
        self,
        parts: TargetParts,
        tokens_BxT: jax.Array,
        hidden_BxTxD: jax.Array,
        positions_BxT: jax.Array,
        attend: Attend,
        step: int = 0,
    ) -> HeadOutput:
        c = self.config
        pair = jnp.concatenate([parts.embedding_VxD[tokens_BxT], hidden_BxTxD], axis=-1)
        joined = multiply(pair, self, "fc_2DxD") + self.fc_bias_D[...]
        now, hidden, keys, values = c.specialist(step), None, [], []
        for specialist in range(c.specialists):
            x = joined
            for layer in range(specialist * c.layers, (specialist + 1) * c.layers):
                if specialist < now:  # no later step looks at its keys
                    none = no_keys(c, *tokens_BxT.shape, joined.dtype)
                    keys.append(none)
                    values.append(none)
                    continue
                block = self.blocks[layer]
                q, k, v = block.project(x, positions_BxT)
                x = block.finish(x, attend(layer, q, k, v))
                keys.append(jnp.moveaxis(k, 2, 1))
                values.append(jnp.moveaxis(v, 2, 1))
            # What later specialists make of this pair is not used: only their keys are, and under
            # jit nothing else of them is computed.
            hidden = x if specialist == now else hidden
        return HeadOutput(hidden, Fresh(keys=tuple(keys), values=tuple(values)))
