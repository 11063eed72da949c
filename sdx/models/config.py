"""The shape of a Llama-family decoder, to and from Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Static shape of one decoder. Frozen and hashable, so it is part of the jit key.

    `heads * head_dim` is the width of the queries, `kv_heads * head_dim` that of keys and of
    values; `heads` is a multiple of `kv_heads` (grouped-query attention).
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

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    def parameters(self) -> int:
        """Number of weights, embedding and head included (a tied one counted once)."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.width * self.ffn_width + 2 * self.width
        embeddings = self.vocab_size * self.width * (1 if self.tie_embedding else 2)
        return self.layers * layer + embeddings + self.width

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face `LlamaConfig` fields of this shape."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_width,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embedding,
            "max_position_embeddings": self.max_positions,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_id,
            "torch_dtype": "bfloat16",
        }

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> ModelConfig:
        """From the fields of a Hugging Face `config.json` of a Llama-family model.

        Raises ValueError for an architecture or an option that the decoder does not compute
        (another architecture, biases, scaled RoPE, an activation other than SiLU).
        """
        kind = fields.get("model_type", "llama")
        if kind != "llama":
            raise ValueError(f"model_type = {kind!r}: this decoder runs Llama checkpoints only")
        for name, allowed in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
            ("rope_scaling", None),
        ):
            if fields.get(name, allowed) != allowed:
                raise ValueError(f"{name} = {fields[name]!r}: this decoder supports {allowed!r}")
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
                rope_theta=_rope_theta(fields),
                norm_eps=fields.get("rms_norm_eps", 1e-6),
                tie_embedding=fields.get("tie_word_embeddings", False),
                max_positions=fields.get("max_position_embeddings", 2048),
                bos_id=fields.get("bos_token_id"),
                eos_id=eos[0] if isinstance(eos, list) else eos,
            )
        except KeyError as missing:
            raise ValueError(f"config.json has no {missing}: a Llama config needs it") from None


def _rope_theta(fields: dict[str, Any]) -> float:
    """Older configs carry `rope_theta` at the top, newer ones inside `rope_parameters`."""
    parameters = fields.get("rope_parameters") or {}
    if parameters.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type = {parameters['rope_type']!r}: this decoder supports default")
    return float(fields.get("rope_theta") or parameters.get("rope_theta") or 10000.0)


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
