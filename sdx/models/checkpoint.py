"""Llama checkpoints in Hugging Face's layout: `config.json` and `model.safetensors`.

Weights are bfloat16 on disk by default (rounded to nearest) and float32 in memory; a model that
was loaded and is saved again comes out bit for bit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from sdx.models.config import ModelConfig, read_config
from sdx.models.llama import Llama
from sdx.models.small_steps import StepForms, prepare

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}


def to_tensors(model: Llama) -> dict[str, np.ndarray]:
    """The weights under Hugging Face's Llama names, matrices as `[out, in]`."""
    c = model.config
    q, k = c.heads * c.head_dim, c.kv_heads * c.head_dim
    tensors = {"model.embed_tokens.weight": model.embedding_VxD[...]}
    for i, block in enumerate(model.blocks):
        prefix = f"model.layers.{i}."
        qkv, gate_up = block.qkv_DxN[...], block.gate_up_Dx2F[...]
        tensors |= {
            prefix + "input_layernorm.weight": block.attention_norm_D[...],
            prefix + "self_attn.q_proj.weight": qkv[:, :q].T,
            prefix + "self_attn.k_proj.weight": qkv[:, q : q + k].T,
            prefix + "self_attn.v_proj.weight": qkv[:, q + k :].T,
            prefix + "self_attn.o_proj.weight": block.out_NxD[...].T,
            prefix + "post_attention_layernorm.weight": block.ffn_norm_D[...],
            prefix + "mlp.gate_proj.weight": gate_up[:, : c.ffn_width].T,
            prefix + "mlp.up_proj.weight": gate_up[:, c.ffn_width :].T,
            prefix + "mlp.down_proj.weight": block.down_FxD[...].T,
        }
    tensors["model.norm.weight"] = model.norm_D[...]
    if not c.tie_embedding:
        tensors["lm_head.weight"] = model.head_DxV[...].T
    return {name: np.asarray(value) for name, value in tensors.items()}


def save_model(folder: str | Path, model: Llama, dtype: str = "bfloat16") -> None:
    """Writes `config.json` and `model.safetensors` (atomically) into `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fields = model.config.to_hf() | {"torch_dtype": dtype}
    tensors = {
        name: np.ascontiguousarray(value.astype(DTYPES[dtype]))
        for name, value in to_tensors(model).items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def from_tensors(
    config: ModelConfig, tensors: dict[str, np.ndarray], dtype: jnp.dtype = jnp.float32
) -> Llama:
    """A model from weights under Hugging Face's names.

    Raises ValueError for a missing, superfluous or wrongly shaped tensor.
    """
    model = nnx.eval_shape(lambda: Llama(config, jax.random.key(0), dtype))
    left = dict(tensors)

    def take(name: str, *shape: int) -> jax.Array:
        if name not in left:
            raise ValueError(f"tensor {name} is missing: not a Llama checkpoint of this config")
        value = left.pop(name)
        if value.shape != shape:
            raise ValueError(f"tensor {name} has shape {value.shape}, config.json says {shape}")
        return jnp.asarray(value.astype(dtype))

    c = config
    d, f, q, k = c.width, c.ffn_width, c.heads * c.head_dim, c.kv_heads * c.head_dim
    model.embedding_VxD = nnx.Param(take("model.embed_tokens.weight", c.vocab_size, d))
    for i, block in enumerate(model.blocks):
        p = f"model.layers.{i}."
        parts = [
            take(f"{p}self_attn.{n}_proj.weight", w, d)
            for n, w in zip("qkv", (q, k, k), strict=True)
        ]
        block.qkv_DxN = nnx.Param(jnp.concatenate(parts).T)
        block.out_NxD = nnx.Param(take(p + "self_attn.o_proj.weight", d, q).T)
        block.attention_norm_D = nnx.Param(take(p + "input_layernorm.weight", d))
        block.ffn_norm_D = nnx.Param(take(p + "post_attention_layernorm.weight", d))
        parts = [take(f"{p}mlp.{n}_proj.weight", f, d) for n in ("gate", "up")]
        block.gate_up_Dx2F = nnx.Param(jnp.concatenate(parts).T)
        block.down_FxD = nnx.Param(take(p + "mlp.down_proj.weight", d, f).T)
    model.norm_D = nnx.Param(take("model.norm.weight", d))
    if not c.tie_embedding:
        model.head_DxV = nnx.Param(take("lm_head.weight", c.vocab_size, d).T)
    left.pop("lm_head.weight", None)  # some writers store the tied head a second time
    left = {n for n in left if not n.endswith("rotary_emb.inv_freq")}
    if left:
        raise ValueError(f"tensor {sorted(left)[0]} is unknown: not a plain Llama checkpoint")
    return model


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint folder, one file or sharded by an index.

    Raises FileNotFoundError, or ValueError for a corrupt or truncated file.
    """
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, np.ndarray] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; a checkpoint folder has safetensors")
        try:
            tensors |= load_file(path)
        except (SafetensorError, ValueError, KeyError, OSError) as error:
            raise ValueError(
                f"{path}: corrupt or truncated safetensors ({error}); fetch or write it again"
            ) from None
    return tensors


def load_model(
    folder: str | Path, dtype: jnp.dtype = jnp.float32, forms: StepForms | None = None
) -> tuple[Llama, ModelConfig]:
    """The model in `folder` (Hugging Face layout) and its config, weights as `dtype`.

    Matrices are stored for the step forms given (None: the platform's, `default_forms`).
    Raises FileNotFoundError or ValueError, each of one line.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such checkpoint folder")
    config = read_config(folder)
    return prepare(from_tensors(config, read_tensors(folder), dtype), forms), config
