"""Draft heads in the engines' formats: EAGLE-3, Medusa, and the `speculators` wrapping of EAGLE-3.

    folder --read_head--> Eagle3Head | MedusaHead (fields and named arrays) --write_head--> folder

Arrays keep the dtype they were stored in and stay on the host (`d2t` is int64); a head that is
read and written in the same format comes out bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sdx.interop.checkpoints import FLOATS, INDEX, PICKLES, read_fields

Arrays = Mapping[str, np.ndarray]

# Canonical names of the one layer of an EAGLE-3 head; formats differ in the prefix before them.
LAYER = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "hidden_norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
PREFIXES = ("midlayer.", "layers.0.")
SPECULATORS_FIELDS = ("speculators_model_type", "speculators_config")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Head:
    """An EAGLE-3 head: one decoder layer over [embedding; fused features of the target].

    Shapes, with h the head's width, t the target's: fc [h, 3 t]; q, k, v of the layer take 2 h;
    lm_head [draft_vocab, h]. `arrays` holds fc.weight, the layer's tensors under `LAYER`,
    norm.weight, lm_head.weight and, where stored, d2t (int64), t2d (bool), embed_tokens.weight.
    `fields`: config.json as stored. `format`: "eagle3" or "speculators"; `prefix`: what the layer
    is called. `verifier`: name of the target, where the format records it.
    """

    arrays: Arrays
    fields: Mapping[str, Any]
    format: Literal["eagle3", "speculators"] = "eagle3"
    prefix: str = "midlayer."
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> Mapping[str, Any]:
        """The Llama fields of the layer, wherever the format keeps them."""
        return self.fields.get("transformer_layer_config") or self.fields

    @property
    def vocab_size(self) -> int:
        return self.shape["vocab_size"]

    @property
    def draft_vocab_size(self) -> int:
        return self.fields.get("draft_vocab_size") or self.vocab_size

    @property
    def norm_before_residual(self) -> bool:
        """Readers' defaults differ; absent means False, as the original EAGLE-3 code computes."""
        return bool(self.fields.get("norm_before_residual", False))

    @property
    def verifier(self) -> str:
        config = self.fields.get("speculators_config") or {}
        return (config.get("verifier") or {}).get("name_or_path") or ""

    def target_ids(self) -> np.ndarray:
        """Target id of each draft id: id + d2t[id] (`d2t` is an offset); the identity without."""
        ids = np.arange(self.draft_vocab_size, dtype=np.int64)
        return ids + self.arrays["d2t"] if "d2t" in self.arrays else ids

    def feature_layers(self, target_layers: int) -> tuple[int, int, int]:
        """The target layers whose inputs are fused: low, middle, high."""
        return 2, target_layers // 2, target_layers - 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaHead:
    """K Medusa heads, each `layers` residual blocks x + SiLU(W x + b) and a linear layer.

    `arrays`: blocks.{i}.layers.{j}.weight [h, h] (and .bias), lm_heads.{i}.weight [V, h].
    """

    arrays: Arrays
    fields: Mapping[str, Any]
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def heads(self) -> int:
        return self.fields["num_heads"]

    @property
    def layers(self) -> int:
        return self.fields["num_hidden_layers"]


def vocabulary_maps(kept: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """`d2t` (int64 offsets) and `t2d` (bool) of a draft vocabulary that keeps these target ids.

    kept [draft_vocab]: distinct target ids, ascending.
    """
    kept = np.asarray(kept, np.int64)
    if kept.size == 0 or (np.diff(kept) <= 0).any() or kept[0] < 0 or kept[-1] >= vocab_size:
        raise ValueError(f"kept ids must ascend within 0..{vocab_size - 1}")
    t2d = np.zeros(vocab_size, bool)
    t2d[kept] = True
    return {"d2t": kept - np.arange(kept.size), "t2d": t2d}


# ---------------------------------------------------------------------------- reading


def read_head(folder: str | Path) -> Eagle3Head | MedusaHead:
    """The head in a folder: config.json and model.safetensors, whichever format they are in.

    Raises FileNotFoundError or ValueError, one line: missing or pickled weights, tensors that are
    missing, unknown, of a wrong shape or dtype, d2t and t2d that disagree.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    fields = read_fields(folder)
    arrays, metadata = _read_arrays(folder)
    if fields.get("model_type") == "medusa":
        head = MedusaHead(arrays=arrays, fields=fields, metadata=metadata)
        _check_medusa(head, folder)
        return head
    kind = fields.get("speculators_model_type")
    eagle3 = any("eagle3" in a.lower() for a in fields.get("architectures") or ())
    if kind not in (None, "eagle3") or (kind is None and not eagle3):
        raise ValueError(
            f"{folder}: architectures {fields.get('architectures')}, model_type "
            f"{fields.get('model_type')!r}, speculators_model_type {kind!r}: sdx reads EAGLE-3 and "
            "Medusa heads"
        )
    prefix = next((p for p in PREFIXES if p + LAYER[0] in arrays), None)
    if prefix is None:
        raise ValueError(f"{folder}: no layer (midlayer.* or layers.0.*): not an EAGLE-3 head")
    head = Eagle3Head(
        arrays={name.removeprefix(prefix): value for name, value in arrays.items()},
        fields=fields,
        format="eagle3" if kind is None else "speculators",
        prefix=prefix,
        metadata=metadata,
    )
    _check_eagle3(head, folder)
    return head


def _read_arrays(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    path = folder / "model.safetensors"
    if not path.is_file():
        pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{folder / pickles[0]}: a pickle, which sdx never opens: convert the head to "
                "safetensors"
            )
        sharded = " (heads in shards are not read)" if (folder / INDEX).is_file() else ""
        raise FileNotFoundError(f"{path}: no such file{sharded}")
    try:
        with safe_open(path, framework="np") as file:
            return {n: file.get_tensor(n) for n in file.keys()}, dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path}: corrupt or truncated safetensors ({error})") from None


def _expect(arrays: Arrays, shapes: Mapping[str, tuple[int, ...]], folder: Path, kind: str):
    """Arrays are exactly these, of these shapes, float (except d2t and t2d) and finite."""
    for name, shape in shapes.items():
        if name not in arrays:
            raise ValueError(f"{folder}: tensor {name} is missing: not {kind}")
        value = arrays[name]
        if value.shape != shape:
            raise ValueError(
                f"{folder}: tensor {name} has shape {list(value.shape)}, config.json says "
                f"{list(shape)}"
            )
        wanted = {"d2t": (np.int64,), "t2d": (np.bool_,)}.get(name, tuple(FLOATS.values()))
        if value.dtype not in wanted:
            names = ", ".join(np.dtype(w).name for w in wanted)
            raise ValueError(f"{folder}: tensor {name} has dtype {value.dtype}, expected {names}")
        if name not in ("d2t", "t2d") and not np.isfinite(value).all():
            raise ValueError(f"{folder}: tensor {name} holds NaN or infinite weights")
    unknown = set(arrays) - set(shapes)
    if unknown:
        raise ValueError(f"{folder}: tensor {min(unknown)} is unknown: not {kind}")


def _check_eagle3(head: Eagle3Head, folder: Path):
    c = head.shape
    try:
        h, f, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
        vocab = c["vocab_size"]
    except KeyError as missing:
        raise ValueError(f"{folder}: config.json has no {missing}") from None
    if c.get("num_hidden_layers", 1) != 1:
        raise ValueError(
            f"{folder}: num_hidden_layers is {c['num_hidden_layers']}: an EAGLE-3 head has one"
        )
    e = c.get("head_dim") or h // heads
    kv = (c.get("num_key_value_heads") or heads) * e
    target = head.fields.get("target_hidden_size") or h
    shapes = dict(zip(LAYER, (
        (heads * e, 2 * h), (kv, 2 * h), (kv, 2 * h), (h, heads * e), (f, h), (f, h), (h, f),
        (h,), (h,), (h,),
    ), strict=True))  # fmt: skip
    shapes |= {"fc.weight": (h, 3 * target), "norm.weight": (h,)}
    shapes["lm_head.weight"] = (head.draft_vocab_size, h)
    optional = {
        "d2t": (head.draft_vocab_size,),
        "t2d": (vocab,),
        "embed_tokens.weight": (vocab, target),
    }
    shapes |= {name: shape for name, shape in optional.items() if name in head.arrays}
    _expect(head.arrays, shapes, folder, "an EAGLE-3 head")
    if head.draft_vocab_size != vocab and "d2t" not in head.arrays:
        raise ValueError(
            f"{folder}: draft_vocab_size {head.draft_vocab_size} of {vocab} without d2t: the "
            "draft's tokens cannot be named"
        )
    if "d2t" in head.arrays:
        _check_maps(head, vocab, folder)


def _check_maps(head: Eagle3Head, vocab: int, folder: Path):
    ids = head.target_ids()
    outside = ids[(ids < 0) | (ids >= vocab)]
    if outside.size:
        raise ValueError(
            f"{folder}: d2t leads to target id {outside[-1]}, the "
            f"vocabulary has {vocab} (d2t is an offset: target id = draft id + d2t)"
        )
    if "t2d" in head.arrays and not np.array_equal(
        np.flatnonzero(head.arrays["t2d"]), np.sort(ids)
    ):
        raise ValueError(f"{folder}: d2t and t2d name different tokens")


def _check_medusa(head: MedusaHead, folder: Path):
    try:
        h, vocab = head.fields["hidden_size"], head.fields["vocab_size"]
        heads, layers = head.heads, head.layers
    except KeyError as missing:
        raise ValueError(f"{folder}: config.json has no {missing}") from None
    blocks = [f"blocks.{i}.layers.{j}" for i in range(heads) for j in range(layers)]
    shapes = {f"{b}.weight": (h, h) for b in blocks}
    if head.fields.get("medusa_fc_bias"):
        shapes |= {f"{b}.bias": (h,) for b in blocks}
    shapes |= {f"lm_heads.{i}.weight": (vocab, h) for i in range(heads)}
    _expect(head.arrays, shapes, folder, "a Medusa head")


# ---------------------------------------------------------------------------- writing


def write_head(
    folder: str | Path,
    head: Eagle3Head | MedusaHead,
    format: Literal["eagle3", "speculators"] | None = None,
    verifier: str = "",
    lookahead: int = 5,
) -> None:
    """Writes config.json and model.safetensors.

    format: of an EAGLE-3 head, its own by default. To "speculators" the verifier's name and the
    lookahead that the proposal starts with are written; `norm_before_residual` always is.
    """
    folder = Path(folder)
    if isinstance(head, Eagle3Head):
        if format is not None and format != head.format:
            head = _convert(head, format, verifier, lookahead)
        named = {(head.prefix if n in LAYER else "") + n: v for n, v in head.arrays.items()}
        fields = dict(head.fields)
        fields.setdefault("norm_before_residual", head.norm_before_residual)
        _check_eagle3(head, folder)
    else:
        named, fields = dict(head.arrays), dict(head.fields)
        _check_medusa(head, folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(value) for name, value in named.items()}
    save_file(arrays, folder / "model.safetensors", metadata=dict(head.metadata) or None)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def _convert(head: Eagle3Head, format: str, verifier: str, lookahead: int) -> Eagle3Head:
    """The same arrays under the other format's config."""
    common = {
        "draft_vocab_size": head.draft_vocab_size,
        "norm_before_residual": head.norm_before_residual,
    }
    if head.fields.get("target_hidden_size"):
        common["target_hidden_size"] = head.fields["target_hidden_size"]
    own = (*common, *SPECULATORS_FIELDS, "transformer_layer_config", "architectures")
    layer = {k: v for k, v in head.shape.items() if k not in own}
    if format == "eagle3":
        fields = {**layer, **common, "architectures": ["LlamaForCausalLMEagle3"]}
        return dataclasses.replace(head, fields=fields, format="eagle3", prefix="midlayer.")
    if format != "speculators":
        raise ValueError(f"unknown head format {format!r}: eagle3 or speculators")
    if not verifier:
        raise ValueError("the speculators format names the target: pass its folder or hub id")
    config = {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": lookahead}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
    }
    fields = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": config,
        "transformer_layer_config": layer,
        **common,
    }
    return dataclasses.replace(head, fields=fields, format="speculators", prefix="layers.0.")
