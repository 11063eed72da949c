"""FLOPs and bytes of one transformer step, from the model's config.

A step runs `new_tokens` tokens of each of `batch` sequences over `context` committed ones:
decoding is new_tokens = 1, the verification of a chain of gamma drafts is gamma + 1, of a tree
its nodes + 1 with `ancestors` set. Everything is real and differentiable: layers, width, experts.

Counted: matmuls (2 FLOPs per weight and token), attention scores and values, weights once per
step (of a mixture the experts that are expected to be touched), KV read and written. Not counted,
being small beside these: norms, rotary embedding, activations that stay in cache, the embedding
lookup. Multi-head latent attention (DeepSeek) is counted in its absorbed form: scores and values
act on the latent, the up-projections act on queries and outputs.
"""

from __future__ import annotations

import jax.numpy as jnp

from sdx.records import Number, record
from sdx.theory.architectures import (
    BYTES_PER_NUMBER,
    Architecture,
    architecture_from_config,
    llama_like,
    load_architecture,
    preset_names,
)
from sdx.theory.numerics import float64

__all__ = [
    "Architecture",
    "Step",
    "active_parameters",
    "architecture_from_config",
    "experts_touched",
    "kv_cache_bytes",
    "llama_like",
    "load_architecture",
    "parameters",
    "preset_names",
    "step_bytes",
    "step_flops",
    "step_operations",
    "weight_bytes",
]


@record
class Step:
    """What one device does in one step, per group of operations.

    FLOPs and bytes; `collective_bytes` is the payload of one step's all-reduces per device.
    """

    linear_flops: Number
    attention_flops: Number
    head_flops: Number
    linear_bytes: Number
    attention_bytes: Number
    head_bytes: Number
    collective_bytes: Number


# ------------------------------------------------------------------------------ weights


def _attention_weights(a: Architecture):
    """Matmul weights of one layer's attention."""
    if a.attention == "latent":
        nope = a.head_dim - a.rope_head_dim
        queries = a.width * a.query_rank + a.query_rank * a.heads * a.head_dim
        latent = a.width * (a.kv_rank + a.rope_head_dim)
        up = a.kv_rank * a.heads * (nope + a.value_head_dim)
        return queries + latent + up + a.heads * a.value_head_dim * a.width
    return a.width * a.head_dim * (2 * a.heads + 2 * a.kv_heads)


def _block_weights(a: Architecture, ffn_width):
    """Matmul weights of one feed-forward block (gated: gate, up, down)."""
    return (3 if a.gated_ffn else 2) * a.width * ffn_width


def _dense_and_moe_layers(a: Architecture):
    if a.ffn == "moe":
        return a.dense_layers, a.layers - a.dense_layers
    return a.layers, 0.0


def _linear_weights(a: Architecture, experts_per_layer):
    """Matmul weights of all layers, with `experts_per_layer` routed experts per mixture layer."""
    dense, moe = _dense_and_moe_layers(a)
    total = a.layers * _attention_weights(a) + dense * _block_weights(a, a.ffn_width)
    if a.ffn == "moe":
        shared = _block_weights(a, a.shared_expert_width)
        shared = shared + (a.width if a.shared_expert_gate else 0.0)
        routed = experts_per_layer * _block_weights(a, a.expert_width)
        total = total + moe * (a.width * a.experts + shared + routed)
    return total + (2 * a.width * a.embedding_width if a.narrow_embedding else 0.0)


def _small_weights(a: Architecture):
    """Norms and biases."""
    norm = a.width * (2 if a.norm_bias else 1)
    per_layer = 2 * norm
    if a.attention == "latent":
        per_layer = per_layer + a.query_rank + a.kv_rank
    if a.query_key_norm:
        per_layer = per_layer + 2 * a.head_dim
    if a.qkv_bias:
        per_layer = per_layer + a.head_dim * (a.heads + 2 * a.kv_heads)
    if a.output_bias:
        per_layer = per_layer + a.width
    if a.ffn_bias:
        per_layer = per_layer + (2 if a.gated_ffn else 1) * a.ffn_width + a.width
    router = _dense_and_moe_layers(a)[1] * a.experts if a.router_bias else 0.0
    return a.layers * per_layer + router + (norm if a.final_norm else 0.0)


def _embeddings(a: Architecture):
    copies = 1 if a.tie_embedding else 2
    return copies * a.vocabulary * a.embedding_width + a.learned_positions * a.width


@float64
def parameters(architecture: Architecture):
    """All parameters: embeddings, layers (every expert), norms, biases."""
    a = architecture
    return _embeddings(a) + _linear_weights(a, a.experts) + _small_weights(a)


@float64
def active_parameters(architecture: Architecture):
    """Parameters that one token uses: of a mixture, `active_experts` routed experts."""
    a = architecture
    return _embeddings(a) + _linear_weights(a, a.active_experts) + _small_weights(a)


@float64
def weight_bytes(architecture: Architecture):
    """Bytes of all weights, embeddings included, in `weight_dtype`."""
    a = architecture
    total = _embeddings(a) + _linear_weights(a, a.experts) + _small_weights(a)
    return total * BYTES_PER_NUMBER[a.weight_dtype]


def _kv_bytes_per_token_and_layer(a: Architecture):
    numbers = (
        a.kv_rank + a.rope_head_dim if a.attention == "latent" else 2 * a.kv_heads * a.head_dim
    )
    return numbers * BYTES_PER_NUMBER[a.kv_dtype]


def _held_positions(a: Architecture, context):
    """Sum over layers of the positions a query finds in the cache: min(context, window)."""
    windowed = jnp.minimum(context, a.window)
    return (a.layers - a.window_layers) * context + a.window_layers * windowed


@float64
def kv_cache_bytes(architecture: Architecture, batch, context):
    """Bytes of the KV cache of `batch` sequences of `context` tokens; windows are ring buffers."""
    a = architecture
    return batch * _held_positions(a, context) * _kv_bytes_per_token_and_layer(a)


# --------------------------------------------------------------------------------- step


def experts_touched(architecture: Architecture, tokens):
    """Expected experts per mixture layer that `tokens` tokens touch: sum_e 1 - (1 - pi_e)^tokens,
    tokens routed independently. At tokens = 1 it is `active_experts`."""
    a = architecture
    uniform = isinstance(a.routing, tuple) and not a.routing
    pi = a.active_experts / a.experts if uniform else jnp.asarray(a.routing)
    # log1p(-1) is -inf and its gradient NaN: an expert that every token uses is kept away from it.
    untouched = jnp.exp(tokens * jnp.log1p(-jnp.minimum(pi, 1 - 1e-15)))
    return a.experts * (1 - untouched) if uniform else jnp.sum(1 - untouched)


def _attention_flops_per_pair(a: Architecture):
    """FLOPs of one query against one key and value, all heads of a layer."""
    if a.attention == "latent":
        return 2 * a.heads * (2 * a.kv_rank + a.rope_head_dim)
    return 4 * a.heads * a.head_dim


@float64
def step_operations(
    architecture: Architecture, batch, new_tokens, context, tensor_parallel=1.0, ancestors=None
) -> Step:
    """FLOPs and bytes per device of a step.

    `ancestors`: mean number of the step's own tokens that a new token attends to besides itself;
    None is a chain, (new_tokens - 1) / 2. Split over `tensor_parallel` devices: weights and FLOPs
    evenly, grouped KV by head (never below one head per device), latent KV not at all.
    """
    a, tp = architecture, tensor_parallel
    tokens = batch * new_tokens
    if ancestors is None:
        ancestors = (new_tokens - 1) / 2
    touched = experts_touched(a, tokens) if a.ffn == "moe" else 0.0
    weight_size = BYTES_PER_NUMBER[a.weight_dtype]
    head = a.vocabulary * a.embedding_width
    held = _held_positions(a, context)
    pairs = tokens * (held + a.layers * (ancestors + 1))
    kv_share = 1.0 if a.attention == "latent" else 1 / jnp.minimum(tp, a.kv_heads)
    kv_positions = batch * (held + 2 * a.layers * new_tokens)  # new ones: written, then read
    # Two all-reduces per layer of the residual stream, two bytes a number; a ring sends and
    # receives 2 (tp - 1) / tp of the payload.
    payload = 2 * a.layers * tokens * a.width * 2.0
    return Step(
        linear_flops=2 * tokens * _linear_weights(a, a.active_experts) / tp,
        attention_flops=pairs * _attention_flops_per_pair(a) / tp,
        head_flops=2 * tokens * head / tp,
        linear_bytes=_linear_weights(a, touched) * weight_size / tp,
        attention_bytes=kv_positions * _kv_bytes_per_token_and_layer(a) * kv_share,
        head_bytes=head * weight_size / tp,
        collective_bytes=payload * 2 * (tp - 1) / tp,
    )


@float64
def step_flops(
    architecture: Architecture, batch, new_tokens, context, tensor_parallel=1.0, ancestors=None
):
    """FLOPs of a step on one of `tensor_parallel` devices; see `step_operations`."""
    s = step_operations(architecture, batch, new_tokens, context, tensor_parallel, ancestors)
    return s.linear_flops + s.attention_flops + s.head_flops


@float64
def step_bytes(
    architecture: Architecture, batch, new_tokens, context, tensor_parallel=1.0, ancestors=None
):
    """Bytes moved to and from the memory of one of `tensor_parallel` devices in a step."""
    s = step_operations(architecture, batch, new_tokens, context, tensor_parallel, ancestors)
    return s.linear_bytes + s.attention_bytes + s.head_bytes
