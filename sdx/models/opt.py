"""OPT (Zhang et al. 2022): learned positions, LayerNorm with bias, ReLU, biased matrices.

Same contract as `sdx.models.llama.Llama`: a pass never writes the cache. Legend: B batch, T fresh
tokens, D width, W embedding width (OPT-350M projects it to D), H heads, E head dim, F feed-forward.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from sdx.models.attention import cached_attention, causal_attention
from sdx.models.cache import Cache, Fresh
from sdx.models.llama import Output

POSITION_OFFSET = 2  # OPT's position table starts with two rows that no token uses


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptConfig:
    """Static shape of an OPT decoder. `norm_first`: LayerNorm before each block (all but 350M)."""

    kind: ClassVar[str] = "opt"
    vocab_size: int
    width: int
    layers: int
    heads: int
    ffn_width: int
    embedding_width: int
    norm_first: bool = True
    final_norm: bool = True
    tie_embedding: bool = True
    norm_eps: float = 1e-5
    max_positions: int = 2048
    bos_id: int | None = 2
    eos_id: int | None = 2

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def kv_heads(self) -> int:
        return self.heads

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> OptConfig:
        """From a `config.json`; ValueError for variants that no released OPT uses."""
        for name, allowed in (
            ("activation_function", "relu"),
            ("enable_bias", True),
            ("layer_norm_elementwise_affine", True),
        ):
            if fields.get(name, allowed) != allowed:
                raise ValueError(f"{name} = {fields[name]!r}: the OPT decoder supports {allowed!r}")
        try:
            norm_first = fields.get("do_layer_norm_before", True)
            return cls(
                vocab_size=fields["vocab_size"],
                width=fields["hidden_size"],
                layers=fields["num_hidden_layers"],
                heads=fields["num_attention_heads"],
                ffn_width=fields["ffn_dim"],
                embedding_width=fields.get("word_embed_proj_dim") or fields["hidden_size"],
                norm_first=norm_first,
                final_norm=norm_first and not fields.get("_remove_final_layer_norm", False),
                tie_embedding=fields.get("tie_word_embeddings", True),
                max_positions=fields.get("max_position_embeddings", 2048),
                bos_id=fields.get("bos_token_id", 2),
                eos_id=fields.get("eos_token_id", 2),
            )
        except KeyError as missing:
            raise ValueError(f"config.json has no {missing}: an opt config needs it") from None

    def to_hf(self) -> dict[str, Any]:
        return {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "ffn_dim": self.ffn_width,
            "word_embed_proj_dim": self.embedding_width,
            "do_layer_norm_before": self.norm_first,
            "_remove_final_layer_norm": self.norm_first and not self.final_norm,
            "tie_word_embeddings": self.tie_embedding,
            "max_position_embeddings": self.max_positions,
            "activation_function": "relu",
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_id,
            "torch_dtype": "bfloat16",
        }


class LayerNorm(nnx.Module):
    """Mean and variance over the last axis in float32, scale and bias."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.scale_D = nnx.Param(jnp.ones((width,), dtype))
        self.bias_D = nnx.Param(jnp.zeros((width,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        centred = x32 - x32.mean(-1, keepdims=True)
        unit = centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + self.eps)
        return (unit * self.scale_D[...] + self.bias_D[...]).astype(x.dtype)


class Block(nnx.Module):
    """Attention and a ReLU feed-forward; LayerNorm before each, or (350M) after each residual."""

    def __init__(self, config: OptConfig, key: jax.Array, dtype: jnp.dtype):
        c = config
        keys = jax.random.split(key, 4)
        self.config = c
        self.attention_norm = LayerNorm(c.width, c.norm_eps, dtype)
        self.ffn_norm = LayerNorm(c.width, c.norm_eps, dtype)
        self.qkv_DxN, self.qkv_bias_N = _linear(keys[0], c.width, 3 * c.width, dtype)
        self.out_NxD, self.out_bias_D = _linear(keys[1], c.width, c.width, dtype)
        self.up_DxF, self.up_bias_F = _linear(keys[2], c.width, c.ffn_width, dtype)
        self.down_FxD, self.down_bias_D = _linear(keys[3], c.ffn_width, c.width, dtype)

    def project(self, x_BxTxD: jax.Array):
        """Queries, keys and values, each `[B, T, H, E]`."""
        c = self.config
        normed = self.attention_norm(x_BxTxD) if c.norm_first else x_BxTxD
        qkv = normed @ self.qkv_DxN[...] + self.qkv_bias_N[...]
        return jnp.split(qkv.reshape(*x_BxTxD.shape[:2], 3 * c.heads, c.head_dim), 3, axis=2)

    def finish(self, x_BxTxD: jax.Array, attended_BxTxN: jax.Array) -> jax.Array:
        first = self.config.norm_first
        x = x_BxTxD + attended_BxTxN @ self.out_NxD[...] + self.out_bias_D[...]
        x = x if first else self.attention_norm(x)
        up = (self.ffn_norm(x) if first else x) @ self.up_DxF[...] + self.up_bias_F[...]
        x = x + jax.nn.relu(up) @ self.down_FxD[...] + self.down_bias_D[...]
        return x if first else self.ffn_norm(x)


class Opt(nnx.Module):
    """The decoder. `Opt(config, key)` has random weights."""

    def __init__(self, config: OptConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32):
        c = config
        keys = jax.random.split(key, c.layers + 5)
        self.config = c
        rows = c.max_positions + POSITION_OFFSET
        self.embedding_VxW = _matrix(keys[0], c.vocab_size, c.embedding_width, dtype)
        self.positions_PxD = _matrix(keys[1], rows, c.width, dtype)
        if c.embedding_width != c.width:
            self.project_in_WxD = _matrix(keys[2], c.embedding_width, c.width, dtype)
            self.project_out_DxW = _matrix(keys[3], c.width, c.embedding_width, dtype)
        self.blocks = nnx.List([Block(c, k, dtype) for k in keys[5:]])
        if c.final_norm:
            self.norm = LayerNorm(c.width, c.norm_eps, dtype)
        if not c.tie_embedding:
            self.head_WxV = _matrix(keys[4], c.embedding_width, c.vocab_size, dtype)

    def embed(self, tokens_BxT: jax.Array, positions_BxT: jax.Array) -> jax.Array:
        x = self.embedding_VxW[...][tokens_BxT]
        if self.config.embedding_width != self.config.width:
            x = x @ self.project_in_WxD[...]
        return x + self.positions_PxD[...][positions_BxT + POSITION_OFFSET]

    def __call__(
        self,
        tokens_BxT: jax.Array,
        cache: Cache,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        pending: Fresh | None = None,
    ) -> Output:
        """As `Llama.__call__`; `hidden_BxTxD` is the input of the head, `[B, T, W]`."""
        B, T = tokens_BxT.shape
        mask = jnp.tri(T, dtype=bool) if mask is None else mask
        if positions is None:
            positions = cache.lengths_B[:, None] + jnp.arange(T)
        waiting = 0 if pending is None else pending.keys[0].shape[2]
        mask_BxTxU = jnp.broadcast_to(mask, (B, T, waiting + T))
        positions_BxT = jnp.broadcast_to(positions, (B, T))
        x = self.embed(tokens_BxT, positions_BxT)
        layers, keys, values = [], [], []
        for i, block in enumerate(self.blocks):
            q, k, v = block.project(x)
            k, v = jnp.moveaxis(k, 2, 1), jnp.moveaxis(v, 2, 1)
            seen_k, seen_v = k, v
            if waiting:
                seen_k = jnp.concatenate([pending.keys[i], k], axis=2)
                seen_v = jnp.concatenate([pending.values[i], v], axis=2)
            attended = cached_attention(
                q, seen_k, seen_v, cache.keys[i], cache.values[i], cache.lengths_B, mask_BxTxU,
                positions_BxT, slots_last=cache.slots_last,
                kernels=cache.kernels,
            )  # fmt: skip
            x = block.finish(x, attended)
            layers.append(x)
            keys.append(k)
            values.append(v)
        hidden = self.normalise(x)
        fresh = Fresh(keys=tuple(keys), values=tuple(values))
        return Output(self.logits(hidden), hidden, tuple(layers), fresh)

    def features(self, tokens_BxT: jax.Array) -> jax.Array:
        """The input of the head for whole sequences, without a cache: training."""
        positions_BxT = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape)
        x = self.embed(tokens_BxT, positions_BxT)
        for block in self.blocks:
            x = block.finish(x, causal_attention(*block.project(x)))
        return self.normalise(x)

    def normalise(self, x: jax.Array) -> jax.Array:
        """The last norm and, of OPT-350M, the projection to the embedding's width."""
        x = self.norm(x) if self.config.final_norm else x
        narrow = self.config.embedding_width != self.config.width
        return x @ self.project_out_DxW[...] if narrow else x

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden @ self.head()

    def head(self) -> jax.Array:
        """The head's matrix `[W, V]`; of a tied model the embedding's transpose."""
        return self.embedding_VxW[...].T if self.config.tie_embedding else self.head_WxV[...]


def _matrix(key, rows: int, columns: int, dtype) -> nnx.Param:
    return nnx.Param(jax.random.normal(key, (rows, columns), dtype) * 0.02)


def _linear(key, rows: int, columns: int, dtype) -> tuple[nnx.Param, nnx.Param]:
    """Weights of variance 1 / rows, zero bias."""
    weight = jax.random.normal(key, (rows, columns), dtype) * rows**-0.5
    return nnx.Param(weight), nnx.Param(jnp.zeros((columns,), dtype))
