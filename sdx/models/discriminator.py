"""KOALA's adversary: does a row of logits come from the target or from the draft head?

A linear layer maps the target's last hidden state (after its norm) to the size of the logits; a
fully connected net of 1 to 3 layers (as many as the head has) scores [mapped state; logits]. The
paper describes it in words only; width and LeakyReLU between the layers are ours.
Legend: B batch, T positions, D width of the target, V logits (the draft vocabulary), W inner width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Discriminator(nnx.Module):
    """Conditioned on the target's feature at a position, scores logits of the next token."""

    def __init__(
        self,
        width: int,
        vocab_size: int,
        layers: int,
        key: jax.Array,
        inner_width: int = 256,
        dtype: jnp.dtype = jnp.float32,
    ):
        if layers < 1:
            raise ValueError(f"layers = {layers}: a discriminator has at least one")
        keys = jax.random.split(key, layers + 1)
        sizes = [2 * vocab_size, *[inner_width] * (layers - 1), 1]
        self.condition_DxV = nnx.Param(
            jax.random.normal(keys[0], (width, vocab_size), dtype) * width**-0.5
        )
        self.weights = nnx.List(
            [
                nnx.Param(jax.random.normal(k, (a, b), dtype) * a**-0.5)
                for k, a, b in zip(keys[1:], sizes, sizes[1:], strict=False)
            ]
        )
        self.biases = nnx.List([nnx.Param(jnp.zeros((b,), dtype)) for b in sizes[1:]])

    def __call__(self, hidden_BxTxD: jax.Array, logits_BxTxV: jax.Array) -> jax.Array:
        """`[B, T]` scores before the sigmoid: positive says that the logits are the target's."""
        condition = hidden_BxTxD @ self.condition_DxV[...]
        x = jnp.concatenate([condition, logits_BxTxV], axis=-1)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = jax.nn.leaky_relu(x, 0.2) if i else x
            x = x @ weight[...] + bias[...]
        return x[..., 0]
