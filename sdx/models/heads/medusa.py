"""Medusa (Cai et al. 2024): one head per position, all from the same feature of the target.

Head i maps f_t through K residual blocks x + SiLU(x W + b) and an LM head (its own or the
target's) to the law of x_{t + 2 + i}; drafts do not depend on one another. KOALA stacks K > 1.
Legend: base.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sdx.models.cache import Fresh
from sdx.models.heads.base import Attend, Head, HeadConfig, HeadOutput
from sdx.models.llama import TargetParts
from sdx.models.small_steps import PLAIN, multiply


class Residual(nnx.Module):
    """x + SiLU(x W + b), the identity plus nothing at the start."""

    MATRICES = ("weight_DxD",)

    def __init__(self, width: int, dtype: jnp.dtype):
        self.forms = PLAIN
        self.weight_DxD = nnx.Param(jnp.zeros((width, width), dtype))
        self.bias_D = nnx.Param(jnp.zeros((width,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.silu(multiply(x, self, "weight_DxD", apart=True) + self.bias_D[...])


class LMHead(nnx.Module):
    """A Medusa head's own projection to the vocabulary."""

    MATRICES = ("weight_DxV",)

    def __init__(self, width: int, vocab_size: int, key: jax.Array, dtype: jnp.dtype):
        self.forms = PLAIN
        weight = jax.random.normal(key, (width, vocab_size), dtype) * width**-0.5
        self.weight_DxV = nnx.Param(weight)


class Medusa(Head):
    """`blocks`: K residual blocks of head 0, then of head 1, ..., then the LM heads if own."""

    def __init__(self, config: HeadConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32):
        self.config, self.forms = config, PLAIN
        blocks: list[nnx.Module] = [
            Residual(config.width, dtype) for _ in range(config.steps * config.layers)
        ]
        if config.own_head:
            keys = jax.random.split(key, config.steps)
            blocks += [LMHead(config.width, config.vocab_size, k, dtype) for k in keys]
        self.blocks = nnx.List(blocks)

    def lm_head(self, step: int) -> LMHead:
        """The LM head of a step, if they are its own."""
        return self.blocks[self.config.steps * self.config.layers + step]

    def __call__(
        self,
        parts: TargetParts,
        tokens_BxT: jax.Array,
        hidden_BxTxD: jax.Array,
        positions_BxT: jax.Array,
        attend: Attend,
        step: int = 0,
    ) -> HeadOutput:
        """hidden_BxTxD is the target's feature at every step; the other inputs are not used."""
        x, K = hidden_BxTxD, self.config.layers
        for block in self.blocks[step * K : (step + 1) * K]:
            x = block(x)
        return HeadOutput(x, Fresh(keys=(), values=()))

    def logits(self, parts: TargetParts, hidden: jax.Array, step: int = 0) -> jax.Array:
        if not self.config.own_head:
            return parts.logits(hidden, apart=True)
        return multiply(hidden, self.lm_head(step), "weight_DxV")
