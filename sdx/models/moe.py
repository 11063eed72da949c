"""A sparse feed-forward: each token goes to its k likeliest experts (Mixtral, Qwen3-MoE).

Tokens are sorted by expert and every expert multiplies its own run (`jax.lax.ragged_dot`), so that
the work is k experts per token and an expert that no token chose is not computed.
Legend: N tokens, D width, X experts, k chosen, F expert width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Experts(nnx.Module):
    """Router and experts. `normalise`: the k weights are rescaled to sum to 1."""

    def __init__(
        self,
        width: int,
        expert_width: int,
        experts: int,
        chosen: int,
        normalise: bool,
        key: jax.Array,
        dtype: jnp.dtype,
        down_scale: float = 1.0,
    ):
        if not 1 <= chosen <= experts:
            raise ValueError(
                f"{chosen} of {experts} experts per token: need 1 <= chosen <= experts"
            )
        self.experts, self.chosen, self.normalise = experts, chosen, normalise
        keys = jax.random.split(key, 3)

        def matrix(key, *shape, scale=1.0):
            return nnx.Param(jax.random.normal(key, shape, dtype) * (scale * shape[-2] ** -0.5))

        self.router_DxX = matrix(keys[0], width, experts)
        self.gate_up_XxDx2F = matrix(keys[1], experts, width, 2 * expert_width)
        self.down_XxFxD = matrix(keys[2], experts, expert_width, width, scale=down_scale)

    def route(self, x_NxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights and indices of the chosen experts, both `[N, k]`."""
        scores = jax.nn.softmax((x_NxD @ self.router_DxX[...]).astype(jnp.float32), axis=-1)
        weight_Nxk, chosen_Nxk = jax.lax.top_k(scores, self.chosen)
        if self.normalise:
            weight_Nxk = weight_Nxk / weight_Nxk.sum(-1, keepdims=True)
        return weight_Nxk.astype(x_NxD.dtype), chosen_Nxk

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        x_NxD = x_BxTxD.reshape(-1, x_BxTxD.shape[-1])
        weight_Nxk, chosen_Nxk = self.route(x_NxD)
        order = jnp.argsort(chosen_Nxk.reshape(-1))  # stable: (token, choice) pairs by expert
        token = order // self.chosen
        sizes_X = jnp.bincount(chosen_Nxk.reshape(-1), length=self.experts).astype(jnp.int32)
        gate_up = jax.lax.ragged_dot(x_NxD[token], self.gate_up_XxDx2F[...], sizes_X)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, self.down_XxFxD[...], sizes_X)
        out = out * weight_Nxk.reshape(-1)[order, None]
        return jnp.zeros_like(x_NxD).at[token].add(out).reshape(x_BxTxD.shape)
