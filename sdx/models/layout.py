"""Where each tensor of a Hugging Face checkpoint lies inside the parameters of a decoder.

Parameters are stored `[in, out]` and fused (queries, keys and values in one matrix, gate and up in
one, all experts of a layer in one array); checkpoints store `[out, in]` matrices apart. A `Leaf` is
one parameter, its `Part`s are the stored tensors that fill it, side by side along its last axis.
Reading, sharding and writing back all follow this one table.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from sdx.models.config import ModelConfig
from sdx.models.llama import Llama
from sdx.models.opt import POSITION_OFFSET, Opt, OptConfig

Region = tuple[tuple[int, int], ...]  # (start, stop) per axis


@dataclasses.dataclass(frozen=True)
class Part:
    """A stored tensor: transposed into `region` of its parameter if it is a matrix `[out, in]`."""

    name: str
    shape: tuple[int, ...]
    region: Region
    transpose: bool


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter; `shard_axis` is the one that tensor parallelism splits (None: replicated)."""

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    shard_axis: int | None = None


def skeleton(config: ModelConfig | OptConfig, dtype: jnp.dtype):
    """The decoder with shapes for weights: nothing is allocated."""
    network = Opt if isinstance(config, OptConfig) else Llama
    return nnx.eval_shape(lambda: network(config, jax.random.key(0), dtype))


def layout(config: ModelConfig | OptConfig) -> list[Leaf]:
    """All parameters of the decoder and the tensors that fill them."""
    return _opt(config) if isinstance(config, OptConfig) else _llama(config)


def get(model, path: tuple[str | int, ...]):
    """The parameter (an `nnx.Param`) at `path`."""
    for step in path:
        model = model[step] if isinstance(step, int) else getattr(model, step)
    return model


def put(model, path: tuple[str | int, ...], value: jax.Array):
    setattr(get(model, path[:-1]), path[-1], nnx.Param(value))


# ---------------------------------------------------------------------------- building blocks


def _vector(path, *named: tuple[str, int], shard=None) -> Leaf:
    """Vectors one after the other."""
    parts, at = [], 0
    for name, size in named:
        parts.append(Part(name, (size,), ((at, at + size),), False))
        at += size
    return Leaf(path, (at,), tuple(parts), shard)


def _table(path, name: str, rows: int, columns: int, shard=None) -> Leaf:
    """A matrix kept as it is stored (embeddings)."""
    region = ((0, rows), (0, columns))
    return Leaf(path, (rows, columns), (Part(name, (rows, columns), region, False),), shard)


def _matrix(path, inputs: int, *named: tuple[str, int], shard=None) -> Leaf:
    """Stored `[out_i, in]` matrices, transposed and side by side: `[in, sum of out]`."""
    parts, at = [], 0
    for name, outputs in named:
        region = ((0, inputs), (at, at + outputs))
        parts.append(Part(name, (outputs, inputs), region, True))
        at += outputs
    return Leaf(path, (inputs, at), tuple(parts), shard)


def _stack(path, leaves: list[Leaf]) -> Leaf:
    """Equal matrices stacked along a new first axis (experts)."""
    parts = tuple(
        dataclasses.replace(part, region=((i, i + 1), *part.region))
        for i, leaf in enumerate(leaves)
        for part in leaf.parts
    )
    first = leaves[0]
    shard = None if first.shard_axis is None else first.shard_axis + 1
    return Leaf(path, (len(leaves), *first.shape), parts, shard)


# ---------------------------------------------------------------------------- Llama family


def _llama(c: ModelConfig) -> list[Leaf]:
    leaves = [_table(("embedding_VxD",), "model.embed_tokens.weight", c.vocab_size, c.width)]
    for i in range(c.layers):
        leaves += _llama_block(c, i)
    leaves.append(_vector(("norm_D",), ("model.norm.weight", c.width)))
    if not c.tie_embedding:
        leaves.append(_matrix(("head_DxV",), c.width, ("lm_head.weight", c.vocab_size), shard=1))
    return leaves


def _llama_block(c: ModelConfig, i: int) -> list[Leaf]:
    at, p = ("blocks", i), f"model.layers.{i}."
    a, d, q, kv = p + "self_attn.", c.width, c.heads * c.head_dim, c.kv_heads * c.head_dim
    leaves = [
        _vector((*at, "attention_norm_D"), (p + "input_layernorm.weight", d)),
        _vector((*at, "ffn_norm_D"), (p + "post_attention_layernorm.weight", d)),
        _matrix(
            (*at, "qkv_DxN"), d, (a + "q_proj.weight", q), (a + "k_proj.weight", kv),
            (a + "v_proj.weight", kv), shard=1,
        ),
        _matrix((*at, "out_NxD"), q, (a + "o_proj.weight", d), shard=0),
    ]  # fmt: skip
    if c.qkv_bias:
        named = (a + "q_proj.bias", q), (a + "k_proj.bias", kv), (a + "v_proj.bias", kv)
        leaves.append(_vector((*at, "qkv_bias_N"), *named, shard=0))
    if c.out_bias:
        leaves.append(_vector((*at, "out_bias_D"), (a + "o_proj.bias", d)))
    if c.qk_norm:
        leaves.append(_vector((*at, "query_norm_E"), (a + "q_norm.weight", c.head_dim)))
        leaves.append(_vector((*at, "key_norm_E"), (a + "k_norm.weight", c.head_dim)))
    return leaves + (_experts(c, at, p) if c.sparse(i) else _feed_forward(c, at, p + "mlp."))


def _feed_forward(c: ModelConfig, at: tuple, m: str) -> list[Leaf]:
    d, f = c.width, c.ffn_width
    leaves = [
        _matrix(
            (*at, "gate_up_Dx2F"), d, (m + "gate_proj.weight", f), (m + "up_proj.weight", f),
            shard=1,
        ),
        _matrix((*at, "down_FxD"), f, (m + "down_proj.weight", d), shard=0),
    ]  # fmt: skip
    if c.mlp_bias:
        named = (m + "gate_proj.bias", f), (m + "up_proj.bias", f)
        leaves.append(_vector((*at, "gate_up_bias_2F"), *named, shard=0))
        leaves.append(_vector((*at, "down_bias_D"), (m + "down_proj.bias", d)))
    return leaves


def _experts(c: ModelConfig, at: tuple, p: str) -> list[Leaf]:
    mixtral = c.kind == "mixtral"
    m = p + ("block_sparse_moe." if mixtral else "mlp.")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    d, f, at = c.width, c.expert_width, (*at, "experts")
    names = [f"{m}experts.{e}." for e in range(c.experts)]
    gate_up = [
        _matrix((), d, (f"{n}{gate}.weight", f), (f"{n}{up}.weight", f), shard=1) for n in names
    ]
    downs = [_matrix((), f, (f"{n}{down}.weight", d), shard=0) for n in names]
    return [
        _matrix((*at, "router_DxX"), d, (m + "gate.weight", c.experts)),
        _stack((*at, "gate_up_XxDx2F"), gate_up),
        _stack((*at, "down_XxFxD"), downs),
    ]


# ---------------------------------------------------------------------------- OPT


def _opt(c: OptConfig) -> list[Leaf]:
    p, rows = "model.decoder.", c.max_positions + POSITION_OFFSET
    leaves = [
        _table(("embedding_VxW",), p + "embed_tokens.weight", c.vocab_size, c.embedding_width),
        _table(("positions_PxD",), p + "embed_positions.weight", rows, c.width),
    ]
    if c.embedding_width != c.width:
        wide = (p + "project_in.weight", c.width)
        narrow = (p + "project_out.weight", c.embedding_width)
        leaves.append(_matrix(("project_in_WxD",), c.embedding_width, wide))
        leaves.append(_matrix(("project_out_DxW",), c.width, narrow))
    for i in range(c.layers):
        leaves += _opt_block(c, ("blocks", i), f"{p}layers.{i}.")
    if c.final_norm:
        leaves += _layer_norm(("norm",), p + "final_layer_norm", c.width)
    if not c.tie_embedding:
        named = ("lm_head.weight", c.vocab_size)
        leaves.append(_matrix(("head_WxV",), c.embedding_width, named, shard=1))
    return leaves


def _layer_norm(at: tuple, name: str, width: int) -> list[Leaf]:
    return [
        _vector((*at, "scale_D"), (name + ".weight", width)),
        _vector((*at, "bias_D"), (name + ".bias", width)),
    ]


def _opt_block(c: OptConfig, at: tuple, p: str) -> list[Leaf]:
    d, f = c.width, c.ffn_width
    qkv = [f"{p}self_attn.{n}_proj" for n in "qkv"]
    out, up, down = p + "self_attn.out_proj", p + "fc1", p + "fc2"
    return [
        *_layer_norm((*at, "attention_norm"), p + "self_attn_layer_norm", d),
        *_layer_norm((*at, "ffn_norm"), p + "final_layer_norm", d),
        _matrix((*at, "qkv_DxN"), d, *((n + ".weight", d) for n in qkv), shard=1),
        _vector((*at, "qkv_bias_N"), *((n + ".bias", d) for n in qkv), shard=0),
        _matrix((*at, "out_NxD"), d, (out + ".weight", d), shard=0),
        _vector((*at, "out_bias_D"), (out + ".bias", d)),
        _matrix((*at, "up_DxF"), d, (up + ".weight", f), shard=1),
        _vector((*at, "up_bias_F"), (up + ".bias", f), shard=0),
        _matrix((*at, "down_FxD"), f, (down + ".weight", d), shard=0),
        _vector((*at, "down_bias_D"), (down + ".bias", d)),
    ]
