"""The shape of a Llama-family decoder, to and from Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from sdx.models.rope import RopeScaling, scaling_from_hf, scaling_to_hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Static shape of one decoder. Frozen and hashable, so it is part of the jit key.

    `heads * head_dim` is the width of the queries, `kv_heads * head_dim` that of keys and of
    values; `heads` is a multiple of `kv_heads` (grouped-query attention).

    `kind` is the Hugging Face `model_type`; what it computes is said by the fields after it, all
    off for a plain Llama: biases, norms of queries and keys, `windows` (per layer, how many tokens
    a token sees, itself included; 0 all; empty: all layers see all), sparse experts
    (`experts_per_token` of `experts`, each `expert_width` wide, except in `dense_layers`).
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embedding: bool = False
    max_positions: int = 1024
    bos_id: int | None = None
    eos_id: int | None = None
    kind: str = "llama"
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    normalise_experts: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ffn_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}: "
                "grouped-query attention shares each key head between equally many query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd: RoPE rotates pairs")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"{len(self.windows)} windows for {self.layers} layers: give one each")

    def window(self, layer: int) -> int:
        """How many tokens a token of this layer sees, itself included; 0 is all."""
        return self.windows[layer] if self.windows else 0

    def sparse(self, layer: int) -> bool:
        """Whether this layer's feed-forward is a mixture of experts."""
        return self.experts > 0 and layer not in self.dense_layers

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    def parameters(self) -> int:
        """Number of weights, embedding and head included (a tied one counted once)."""
        q, kv, d = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.width
        layer = 2 * d * (q + kv) + 2 * d
        layer += self.qkv_bias * (q + 2 * kv) + self.out_bias * d + self.qk_norm * 2 * self.head_dim
        dense = 3 * d * self.ffn_width + self.mlp_bias * (2 * self.ffn_width + d)
        sparse = self.experts * (3 * d * self.expert_width + d)
        feed_forward = sum(sparse if self.sparse(i) else dense for i in range(self.layers))
        embeddings = self.vocab_size * d * (1 if self.tie_embedding else 2)
        return self.layers * layer + feed_forward + embeddings + d

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face `config.json` fields of this shape."""
        return {
            "architectures": [ARCHITECTURES[self.kind]],
            "model_type": self.kind,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_width,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embedding,
            "max_position_embeddings": self._hf_positions(),
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_id,
            "torch_dtype": "bfloat16",
            **scaling_to_hf(self.rope_theta, self.rope_scaling),
            **self._hf_special(),
        }

    def _hf_positions(self) -> int:
        dynamic = self.rope_scaling is not None and self.rope_scaling.kind == "dynamic"
        return self.rope_scaling.original_positions if dynamic else self.max_positions

    def _hf_special(self) -> dict[str, Any]:
        """The fields that only this kind has."""
        window = max(self.windows, default=0) or None
        full = sum(w == 0 for w in self.windows)
        windows = {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": full if window else self.layers,
            "layer_types": [
                "sliding_attention" if self.window(i) else "full_attention"
                for i in range(self.layers)
            ],
        }
        biases = {"attention_bias": self.qkv_bias, "mlp_bias": self.mlp_bias}
        experts = {"num_experts_per_tok": self.experts_per_token}
        match self.kind:
            case "llama":
                return biases
            case "mistral":
                return {"sliding_window": window}
            case "qwen2":
                return windows
            case "qwen3":
                return windows | {"attention_bias": self.qkv_bias}
            case "mixtral":
                return experts | {"sliding_window": window, "num_local_experts": self.experts}
            case "qwen3_moe":
                return {
                    **windows,
                    **experts,
                    "attention_bias": self.qkv_bias,
                    "num_experts": self.experts,
                    "moe_intermediate_size": self.expert_width,
                    "norm_topk_prob": self.normalise_experts,
                    "mlp_only_layers": list(self.dense_layers),
                    "decoder_sparse_step": 1,
                }
            case _:  # seed_oss
                return biases | {"attention_out_bias": self.out_bias}

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> ModelConfig:
        """From the fields of a Hugging Face `config.json` of a Llama-family model.

        Raises ValueError for an architecture or an option that the decoder does not compute
        (another architecture, yarn RoPE, an activation other than SiLU).
        """
        kind = fields.get("model_type", "llama")
        if kind not in ARCHITECTURES:
            raise ValueError(
                f"model_type = {kind!r}: sdx runs {', '.join(ARCHITECTURES)} and opt checkpoints"
            )
        if fields.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act = {fields['hidden_act']!r}: this decoder supports 'silu'")
        theta, scaling = scaling_from_hf(fields)
        stretch = scaling.factor if scaling and scaling.kind == "dynamic" else 1
        try:
            heads, width = fields["num_attention_heads"], fields["hidden_size"]
            eos = fields.get("eos_token_id")
            return cls(
                vocab_size=fields["vocab_size"],
                width=width,
                layers=fields["num_hidden_layers"],
                heads=heads,
                kv_heads=fields.get("num_key_value_heads") or heads,
                head_dim=fields.get("head_dim") or width // heads,
                ffn_width=fields["intermediate_size"],
                rope_theta=theta,
                norm_eps=fields.get("rms_norm_eps", 1e-5 if kind == "mixtral" else 1e-6),
                tie_embedding=fields.get("tie_word_embeddings", False),
                max_positions=int(fields.get("max_position_embeddings", 2048) * stretch),
                bos_id=fields.get("bos_token_id"),
                eos_id=eos[0] if isinstance(eos, list) else eos,
                kind=kind,
                rope_scaling=scaling,
                **_special(kind, fields),
            )
        except KeyError as missing:
            raise ValueError(f"config.json has no {missing}: a {kind} config needs it") from None


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
}


def _special(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """ModelConfig fields beyond a plain Llama's, with Hugging Face's defaults for each kind."""
    bias, mlp_bias = bool(fields.get("attention_bias")), bool(fields.get("mlp_bias"))
    everywhere = (fields.get("sliding_window") or 0,) * fields["num_hidden_layers"]
    match kind:
        case "llama":
            return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": mlp_bias}
        case "mistral":
            window = fields.get("sliding_window", 4096)
            return {"windows": (window,) * fields["num_hidden_layers"] if window else ()}
        case "qwen2":
            return {"qkv_bias": True, "windows": _qwen_windows(fields)}
        case "qwen3":
            return {
                "qkv_bias": bias, "out_bias": bias, "qk_norm": True,
                "windows": _qwen_windows(fields),
            }  # fmt: skip
        case "mixtral":
            return {
                "experts": fields["num_local_experts"],
                "experts_per_token": fields["num_experts_per_tok"],
                "expert_width": fields["intermediate_size"],
                "windows": everywhere if any(everywhere) else (),
            }
        case "qwen3_moe":
            step, dense = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
            layers = range(fields["num_hidden_layers"])
            return {
                "qkv_bias": bias,
                "out_bias": bias,
                "qk_norm": True,
                "experts": fields.get("num_experts") or fields["num_local_experts"],
                "experts_per_token": fields["num_experts_per_tok"],
                "expert_width": fields["moe_intermediate_size"],
                "normalise_experts": bool(fields.get("norm_topk_prob", False)),
                "dense_layers": tuple(i for i in layers if i in dense or (i + 1) % step),
                "windows": everywhere
                if fields.get("use_sliding_window") and any(everywhere)
                else (),
            }
        case _:  # seed_oss
            out_bias = bool(fields.get("attention_out_bias"))
            return {"qkv_bias": bias, "out_bias": out_bias, "mlp_bias": mlp_bias}


def _qwen_windows(fields: dict[str, Any]) -> tuple[int, ...]:
    """Qwen's windows: from layer `max_window_layers` on, or as `layer_types` says."""
    window = fields.get("sliding_window", 4096)
    if not fields.get("use_sliding_window") or not window:
        return ()
    layers = fields["num_hidden_layers"]
    first = fields.get("max_window_layers", 28)
    kinds = fields.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def read_config(path: str | Path) -> ModelConfig:
    """`config.json` of a checkpoint folder (or the file itself)."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a checkpoint folder has a config.json")
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    return ModelConfig.from_hf(fields)
