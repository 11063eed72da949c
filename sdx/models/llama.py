"""A Llama-family decoder in Flax NNX: RMSNorm, RoPE, grouped-query attention, SwiGLU.

By fields of its config also Mistral (windows), Qwen2 and Seed-OSS (biases), Qwen3 (query and key
norms), Mixtral and Qwen3-MoE (sparse experts), and scaled RoPE.

The module is a plain pytree: pass it to `jax.jit` and `jax.grad` as an argument. Calling it never
writes the cache; it returns the fresh keys and values, and whoever accepts tokens commits them:

    output = model(tokens_BxT, cache)                  # logits of T tokens after the cached ones
    cache = cache.commit(output.fresh, path_BxP, counts_B)

Legend: B batch, T fresh tokens, S cache slots, D width, H query heads, K key heads, G = H / K,
E head dim, F feed-forward width, V vocabulary. Matrices are stored `[in, out]`, query-key-value
and gate-up fused, so that one token costs four matrix products per layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx, struct

from sdx.models.attention import cached_attention, causal_attention
from sdx.models.cache import Cache, Fresh
from sdx.models.config import ModelConfig
from sdx.models.moe import Experts
from sdx.models.rope import RopeScaling, frequencies
from sdx.models.small_steps import PANELS, PLAIN, StepForms, multiply


@struct.dataclass
class Output:
    """What one pass returns.

    logits_BxTxV; hidden_BxTxD, the input of the head (after the last norm); `layers`, the residual
    stream after each layer `[B, T, D]` (features for draft heads; unused ones cost nothing under
    jit); `fresh`, keys and values to commit.
    """

    logits_BxTxV: jax.Array
    hidden_BxTxD: jax.Array
    layers: tuple[jax.Array, ...]
    fresh: Fresh


@struct.dataclass
class States:
    """hidden_BxTxD, the input of the head; `layers`, the residual stream after each layer."""

    hidden_BxTxD: jax.Array
    layers: tuple[jax.Array, ...]


@struct.dataclass
class TargetParts:
    """What a draft head borrows from its target: arrays, shared and never trained.

    embedding_VxD; head_DxV, None if it is the embedding; head_DxV_panels: the head's second
    storage for small steps (small_steps.py), if the target has one.
    """

    embedding_VxD: jax.Array
    head_DxV: jax.Array | None = None
    head_DxV_panels: jax.Array | None = None
    forms: StepForms = struct.field(pytree_node=False, default=PLAIN)

    def head(self) -> jax.Array:
        """The head's matrix `[D, V]`."""
        return self.embedding_VxD.T if self.head_DxV is None else self.head_DxV

    def logits(self, hidden: jax.Array, apart: bool = False) -> jax.Array:
        """The target's head on features: `[..., D]` to `[..., V]`. apart: of several calls none
        waits for another's result (small_steps.multiply_panels)."""
        return multiply(hidden, self, "head_DxV", apart)


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32 (Zhang and Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    unit = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (unit * scale_D).astype(x.dtype)


def rotate(
    x_BxTxNxE: jax.Array,
    positions_BxT: jax.Array,
    theta: float,
    scaling: RopeScaling | None = None,
) -> jax.Array:
    """Rotary embedding in Hugging Face's pairing: dimension i turns with i + E/2 (Su et al.)."""
    half = x_BxTxNxE.shape[-1] // 2
    turns = frequencies(theta, 2 * half, scaling, positions_BxT)
    angle = positions_BxT[..., None, None].astype(jnp.float32) * turns
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x_BxTxNxE[..., :half], x_BxTxNxE[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BxTxNxE.dtype)


class Block(nnx.Module):
    """One decoder layer: attention and SwiGLU, each behind a norm and beside a residual."""

    MATRICES = ("qkv_DxN", "out_NxD", "gate_up_Dx2F", "down_FxD")

    def __init__(self, config: ModelConfig, key: jax.Array, dtype: jnp.dtype, layer: int = 0):
        c, e = config, config.head_dim
        keys = jax.random.split(key, 4)
        residual = (2 * c.layers) ** -0.5  # keeps the residual stream's variance flat over depth
        self.forms = PLAIN
        self.config, self.window, sparse = config, config.window(layer), config.sparse(layer)
        self.attention_norm_D = nnx.Param(jnp.ones((c.width,), dtype))
        self.qkv_DxN = _matrix(keys[0], c.width, (c.heads + 2 * c.kv_heads) * e, dtype)
        self.out_NxD = _matrix(keys[1], c.heads * e, c.width, dtype, residual)
        self.ffn_norm_D = nnx.Param(jnp.ones((c.width,), dtype))
        if sparse:
            self.experts = Experts(
                c.width, c.expert_width, c.experts, c.experts_per_token, c.normalise_experts,
                keys[2], dtype, residual,
            )  # fmt: skip
        else:
            self.gate_up_Dx2F = _matrix(keys[2], c.width, 2 * c.ffn_width, dtype)
            self.down_FxD = _matrix(keys[3], c.ffn_width, c.width, dtype, residual)
        if c.qk_norm:
            self.query_norm_E = nnx.Param(jnp.ones((e,), dtype))
            self.key_norm_E = nnx.Param(jnp.ones((e,), dtype))
        if c.qkv_bias:
            self.qkv_bias_N = nnx.Param(jnp.zeros(((c.heads + 2 * c.kv_heads) * e,), dtype))
        if c.out_bias:
            self.out_bias_D = nnx.Param(jnp.zeros((c.width,), dtype))
        if c.mlp_bias and not sparse:
            self.gate_up_bias_2F = nnx.Param(jnp.zeros((2 * c.ffn_width,), dtype))
            self.down_bias_D = nnx.Param(jnp.zeros((c.width,), dtype))

    def project(self, x_BxTxD: jax.Array, positions_BxT: jax.Array):
        """Rotated queries `[B, T, H, E]`, rotated keys and values `[B, T, K, E]`."""
        normed = rms_norm(x_BxTxD, self.attention_norm_D[...], self.config.norm_eps)
        return self.project_normed(normed, positions_BxT)

    def project_normed(self, normed_BxTxD: jax.Array, positions_BxT: jax.Array):
        """`project` of what the norm before the attention gave."""
        c = self.config
        B, T, _ = normed_BxTxD.shape
        qkv = multiply(normed_BxTxD, self, "qkv_DxN")
        if c.qkv_bias:
            qkv = qkv + self.qkv_bias_N[...]
        qkv = qkv.reshape(B, T, c.heads + 2 * c.kv_heads, c.head_dim)
        turned = qkv[:, :, : c.heads + c.kv_heads]
        if c.qk_norm:
            queries = rms_norm(turned[:, :, : c.heads], self.query_norm_E[...], c.norm_eps)
            keys = rms_norm(turned[:, :, c.heads :], self.key_norm_E[...], c.norm_eps)
            turned = jnp.concatenate([queries, keys], axis=2)
        turned = rotate(turned, positions_BxT, c.rope_theta, c.rope_scaling)
        return turned[:, :, : c.heads], turned[:, :, c.heads :], qkv[:, :, c.heads + c.kv_heads :]

    def finish(self, x_BxTxD: jax.Array, attended_BxTxN: jax.Array) -> jax.Array:
        """Output projection and feed-forward, each added to the residual stream."""
        c = self.config
        x = x_BxTxD + multiply(attended_BxTxN, self, "out_NxD")
        if c.out_bias:
            x = x + self.out_bias_D[...]
        normed = rms_norm(x, self.ffn_norm_D[...], c.norm_eps)
        if hasattr(self, "experts"):
            return x + self.experts(normed)
        gate_up = multiply(normed, self, "gate_up_Dx2F")
        if c.mlp_bias:
            gate_up = gate_up + self.gate_up_bias_2F[...]
        gate, up = jnp.split(gate_up, 2, axis=-1)
        down = multiply(jax.nn.silu(gate) * up, self, "down_FxD")
        return x + (down + self.down_bias_D[...] if c.mlp_bias else down)


class Llama(nnx.Module):
    """The decoder. `Llama(config, key)` has random weights; `load_model` reads a checkpoint."""

    MATRICES = ("head_DxV",)

    def __init__(self, config: ModelConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32):
        keys = jax.random.split(key, config.layers + 2)
        self.config, self.forms = config, PLAIN
        normal = jax.random.normal(keys[0], (config.vocab_size, config.width), dtype)
        self.embedding_VxD = nnx.Param(normal * 0.02)
        self.blocks = nnx.List([Block(config, k, dtype, i) for i, k in enumerate(keys[2:])])
        self.norm_D = nnx.Param(jnp.ones((config.width,), dtype))
        if not config.tie_embedding:
            self.head_DxV = _matrix(keys[1], config.width, config.vocab_size, dtype)

    def __call__(
        self,
        tokens_BxT: jax.Array,
        cache: Cache,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        pending: Fresh | None = None,
    ) -> Output:
        """Logits of T fresh tokens that follow the cached ones.

        mask: bool `[T, T]` or `[B, T, T]`, true where a fresh token (row) sees a fresh token
        (column), itself included; None is a chain. positions: int `[T]` or `[B, T]`, absolute
        positions; None is the chain's, lengths + 0 .. T - 1. A tree gives its ancestor mask and
        lengths + depth. pending: keys and values of earlier passes that are not committed (a
        draft tree grows level by level); the mask then has their columns before the T own ones.
        """
        B, T = tokens_BxT.shape
        mask = jnp.tri(T, dtype=bool) if mask is None else mask
        if positions is None:
            positions = cache.lengths_B[:, None] + jnp.arange(T)
        waiting = 0 if pending is None else pending.keys[0].shape[2]
        if waiting and any(block.window for block in self.blocks):
            raise ValueError("a model with a sliding window cannot grow a draft tree by levels")
        mask_BxTxU = jnp.broadcast_to(mask, (B, T, waiting + T))
        positions_BxT = jnp.broadcast_to(positions, (B, T))
        x = self.embedding_VxD[...][tokens_BxT]
        layers, keys, values = [], [], []
        for i, (block, key, value) in enumerate(
            zip(self.blocks, cache.keys, cache.values, strict=True)
        ):
            q, k, v = block.project(x, positions_BxT)
            k, v = jnp.moveaxis(k, 2, 1), jnp.moveaxis(v, 2, 1)
            seen_k, seen_v = k, v
            if waiting:
                seen_k = jnp.concatenate([pending.keys[i], k], axis=2)
                seen_v = jnp.concatenate([pending.values[i], v], axis=2)
            attended = cached_attention(
                q,
                seen_k,
                seen_v,
                key,
                value,
                cache.lengths_B,
                mask_BxTxU,
                positions_BxT,
                block.window,
                slots_last=cache.slots_last,
                kernels=cache.kernels,
            )
            x = block.finish(x, attended)
            layers.append(x)
            keys.append(k)
            values.append(v)
        hidden = self.normalise(x)
        fresh = Fresh(keys=tuple(keys), values=tuple(values))
        return Output(self.logits(hidden), hidden, tuple(layers), fresh)

    def features(self, tokens_BxT: jax.Array) -> jax.Array:
        """The input of the head for whole sequences, without a cache: training."""
        return self.states(tokens_BxT).hidden_BxTxD

    def states(self, tokens_BxT: jax.Array) -> States:
        """`features` with the residual stream after each layer."""
        positions_BxT = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape)
        x, layers = self.embedding_VxD[...][tokens_BxT], []
        for block in self.blocks:
            q, k, v = block.project(x, positions_BxT)
            x = block.finish(x, causal_attention(q, k, v, window=block.window))
            layers.append(x)
        return States(self.normalise(x), tuple(layers))

    def normalise(self, x: jax.Array) -> jax.Array:
        """The norm before the head."""
        return rms_norm(x, self.norm_D[...], self.config.norm_eps)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The head: `[..., D]` to `[..., V]`."""
        return multiply(hidden, self, "head_DxV")

    def parts(self) -> TargetParts:
        """What draft heads take from this model as arguments."""
        panels = getattr(self, "head_DxV" + PANELS, None)
        return TargetParts(
            embedding_VxD=self.embedding_VxD[...],
            head_DxV=None if self.config.tie_embedding else self.head_DxV[...],
            head_DxV_panels=None if panels is None else panels[...],
            forms=self.forms,
        )

    def head(self) -> jax.Array:
        """The head's matrix `[D, V]`; of a tied model the embedding's transpose."""
        tied = self.config.tie_embedding
        return self.embedding_VxD[...].T if tied else self.head_DxV[...]


def _matrix(key, rows: int, columns: int, dtype, scale: float = 1.0) -> nnx.Param:
    """Normal initialisation of variance 1 / rows."""
    return nnx.Param(jax.random.normal(key, (rows, columns), dtype) * (scale * rows**-0.5))
