"""Draft heads between our networks and the engines' files.

    sdx.models.heads.Head  --to_engine-->  Eagle3Head | MedusaHead  --heads.write_head-->  folder
                           <--from_engine--                         <--heads.read_head---

EAGLE-3 heads of one layer and Medusa heads have a format that engines read; EAGLE, PosS and deeper
EAGLE-3 heads have none that says all they are: save them with `sdx.models.heads.save_head`.
Matrices are `[out, in]` in the files and `[in, out]`, queries, keys and values fused, in networks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from sdx.interop.checkpoints import read_fields
from sdx.interop.heads import LAYER, Eagle3Head, MedusaHead, read_head, vocabulary_maps
from sdx.models.heads import Head, HeadConfig, create_head, is_head, load_head
from sdx.models.heads.storage import from_tensors, named_parameters
from sdx.models.llama import TargetParts

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def to_engine(
    head: Head, parts: TargetParts | None = None, dtype: str = "float32"
) -> Eagle3Head | MedusaHead:
    """The head under the engines' names.

    parts: the target's, needed by a Medusa head that drafts with the target's LM head (the format
    stores one per position). Raises ValueError for a head that no format holds.
    """
    c = head.config
    arrays = {
        name: np.asarray(value[...]).astype(DTYPES[dtype])
        for name, value in named_parameters(head).items()
    }
    if c.kind == "eagle3" and c.layers == 1:
        return _eagle3(c, arrays, dtype)
    if c.kind == "medusa":
        if not c.own_head and parts is None:
            raise ValueError("a Medusa file stores LM heads: pass the target's parts to copy its")
        shared = None if c.own_head else np.asarray(parts.head()).astype(DTYPES[dtype])
        return _medusa(c, arrays, shared)
    raise ValueError(
        f"a {c.kind} head of {c.layers} layers: engines' files hold EAGLE-3 heads of one layer and "
        "Medusa heads; save it with sdx.models.heads.save_head"
    )


def from_engine(
    found: Eagle3Head | MedusaHead,
    feature_layers: tuple[int, ...] | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> Head:
    """The network of a head that `read_head` found.

    feature_layers: inputs of which target layers are fused (the file does not say; needed for
    EAGLE-3, `HeadConfig.feature_layers`). An embedding stored with the head is left out: heads
    read the target's. Raises ValueError for a head that the networks do not compute.
    """
    if isinstance(found, MedusaHead):
        return _from_medusa(found, dtype)
    if feature_layers is None:
        raise ValueError("name the target layers whose inputs an EAGLE-3 head fuses (the file does "
                         "not say; engines take 2, n // 2 and n - 3 of n)")  # fmt: skip
    return _from_eagle3(found, tuple(feature_layers), dtype)


def is_draft_head(folder: str | Path) -> bool:
    """Whether a folder holds a draft head, ours or in an engine's format."""
    if is_head(folder):
        return True
    if not (Path(folder) / "config.json").is_file():
        return False
    fields = read_fields(Path(folder))
    named = "eagle3" in " ".join(fields.get("architectures") or ()).lower()
    return named or fields.get("model_type") == "medusa" or "speculators_model_type" in fields


def load_draft_head(folder: str | Path, target_layers: int) -> Head:
    """The head in a folder, ours or in an engine's format, for a target of so many layers.

    Raises FileNotFoundError or ValueError, each of one line.
    """
    if is_head(folder):
        return load_head(folder)
    found = read_head(folder)
    fused = found.feature_layers(target_layers) if isinstance(found, Eagle3Head) else None
    return from_engine(found, fused)


def _split(c: HeadConfig) -> tuple[int, int]:
    """Where keys and values begin among the fused columns."""
    queries = c.heads * c.head_dim
    return queries, queries + c.kv_heads * c.head_dim


def _eagle3(c: HeadConfig, arrays: dict[str, np.ndarray], dtype: str) -> Eagle3Head:
    block = {
        name.removeprefix("blocks.0."): value
        for name, value in arrays.items()
        if name.startswith("blocks.0.")
    }
    q, k, v = np.split(block["qkv_DxN"], _split(c), axis=1)
    gate, up = np.split(block["gate_up_Dx2F"], 2, axis=1)
    layer = (
        q.T, k.T, v.T, block["out_NxD"].T, gate.T, up.T, block["down_FxD"].T,
        block["hidden_norm_D"], block["attention_norm_D"], block["ffn_norm_D"],
    )  # fmt: skip
    named = dict(zip(LAYER, layer, strict=True))
    named |= {
        "fc.weight": arrays["fc_FxD"].T,
        "norm.weight": arrays["norm_D"],
        "lm_head.weight": arrays["head_DxU"].T,
    }
    if c.kept:
        named |= vocabulary_maps(np.asarray(c.kept), c.vocab_size)
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": c.width,
        "intermediate_size": c.ffn_width,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.max_positions,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "norm_before_residual": c.norm_before_residual,
    }
    return Eagle3Head(arrays=named, fields=fields)


def _from_eagle3(found: Eagle3Head, feature_layers: tuple[int, ...], dtype) -> Head:
    a, shape = found.arrays, found.shape
    width = shape["hidden_size"]
    if (found.fields.get("target_hidden_size") or width) != width:
        raise ValueError(
            f"an EAGLE-3 head of width {width} for a target of width "
            f"{found.fields['target_hidden_size']}: sdx runs heads as wide as their target"
        )
    if shape.get("rope_scaling"):
        raise ValueError(f"rope_scaling = {shape['rope_scaling']}: heads compute plain RoPE")
    if shape.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act = {shape['hidden_act']!r}: heads compute silu")
    heads = shape["num_attention_heads"]
    ids = found.target_ids() if "d2t" in a else np.arange(found.draft_vocab_size)
    order = np.argsort(ids)
    config = HeadConfig(
        kind="eagle3",
        width=width,
        vocab_size=found.vocab_size,
        heads=heads,
        kv_heads=shape.get("num_key_value_heads") or heads,
        head_dim=shape.get("head_dim") or width // heads,
        ffn_width=shape["intermediate_size"],
        rope_theta=float(shape.get("rope_theta") or 10000.0),
        norm_eps=shape.get("rms_norm_eps", 1e-6),
        max_positions=shape.get("max_position_embeddings", 2048),
        feature_layers=feature_layers,
        kept=tuple(ids[order].tolist()) if ids.size < found.vocab_size else (),
        norm_before_residual=found.norm_before_residual,
    )
    q, k, v, out, gate, up, down, hidden_norm, attention_norm, ffn_norm = (a[n] for n in LAYER)
    tensors = {
        "blocks.0.qkv_DxN": np.concatenate([q, k, v]).T,
        "blocks.0.out_NxD": out.T,
        "blocks.0.gate_up_Dx2F": np.concatenate([gate, up]).T,
        "blocks.0.down_FxD": down.T,
        "blocks.0.hidden_norm_D": hidden_norm,
        "blocks.0.attention_norm_D": attention_norm,
        "blocks.0.ffn_norm_D": ffn_norm,
        "fc_FxD": a["fc.weight"].T,
        "norm_D": a["norm.weight"],
        "head_DxU": a["lm_head.weight"][order].T,
    }
    return from_tensors(config, tensors, dtype)


def _medusa(c: HeadConfig, arrays: dict[str, np.ndarray], shared: np.ndarray | None) -> MedusaHead:
    named: dict[str, Any] = {}
    for i in range(c.steps):
        for j in range(c.layers):
            block = f"blocks.{i * c.layers + j}."
            named[f"blocks.{i}.layers.{j}.weight"] = arrays[block + "weight_DxD"].T
            named[f"blocks.{i}.layers.{j}.bias"] = arrays[block + "bias_D"]
        own = f"blocks.{c.steps * c.layers + i}.weight_DxV"
        named[f"lm_heads.{i}.weight"] = (arrays[own] if shared is None else shared).T
    fields = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": c.width,
        "vocab_size": c.vocab_size,
        "num_heads": c.steps,
        "num_hidden_layers": c.layers,
        "medusa_fc_bias": True,
    }
    return MedusaHead(arrays=named, fields=fields)


def _from_medusa(found: MedusaHead, dtype) -> Head:
    f, a = found.fields, found.arrays
    config = HeadConfig(
        kind="medusa",
        width=f["hidden_size"],
        vocab_size=f["vocab_size"],
        layers=found.layers,
        steps=found.heads,
        own_head=True,
    )
    # A file without biases leaves them at zero, where a new head has them.
    new = create_head(config, jax.random.key(0))
    tensors = {name: np.asarray(value[...]) for name, value in named_parameters(new).items()}
    for i in range(config.steps):
        for j in range(config.layers):
            block, stored = f"blocks.{i * config.layers + j}.", f"blocks.{i}.layers.{j}."
            tensors[block + "weight_DxD"] = a[stored + "weight"].T
            if stored + "bias" in a:
                tensors[block + "bias_D"] = a[stored + "bias"]
        own = f"blocks.{config.steps * config.layers + i}.weight_DxV"
        tensors[own] = a[f"lm_heads.{i}.weight"].T
    return from_tensors(config, tensors, dtype)
