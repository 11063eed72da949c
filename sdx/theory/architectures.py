"""A decoder-only transformer as numbers: the Architecture record, draft families with real sizes,
and the reading of Hugging Face `config.json` files.

The presets in `hw_models/presets` are such files, holding only the facts that matter here.
"""

from __future__ import annotations

import difflib
import json
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from sdx.records import Number, record, static

BYTES_PER_NUMBER = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "float4": 0.5,
}


@record
class Architecture:
    """A decoder-only transformer. Sizes are leaves (real in designs); kinds are static.

    `window_layers` of the `layers` attend over at most `window` positions. In a mixture
    ("moe") the first `dense_layers` keep the dense block of `ffn_width`; the others route each
    token to `active_experts` of `experts` blocks of `expert_width` and pass it through shared
    experts of `shared_expert_width` in all. `routing` holds the probability that a token goes to
    expert e (sum = active_experts); empty means uniform, the upper bound of what is touched.
    """

    layers: Number
    width: Number
    heads: Number
    kv_heads: Number
    head_dim: Number
    ffn_width: Number
    vocabulary: Number
    embedding_width: Number  # OPT-350m embeds narrower than it computes
    learned_positions: Number = 0.0
    window: Number = 0.0
    window_layers: Number = 0.0
    experts: Number = 0.0
    active_experts: Number = 0.0
    expert_width: Number = 0.0
    shared_expert_width: Number = 0.0
    dense_layers: Number = 0.0
    routing: Any = ()
    query_rank: Number = 0.0  # latent attention
    kv_rank: Number = 0.0
    rope_head_dim: Number = 0.0
    value_head_dim: Number = 0.0
    name: str = static(default="")
    attention: Literal["grouped", "latent"] = static(default="grouped")
    ffn: Literal["dense", "moe"] = static(default="dense")
    gated_ffn: bool = static(default=True)
    tie_embedding: bool = static(default=False)
    narrow_embedding: bool = static(default=False)
    qkv_bias: bool = static(default=False)
    output_bias: bool = static(default=False)
    ffn_bias: bool = static(default=False)
    norm_bias: bool = static(default=False)
    query_key_norm: bool = static(default=False)
    final_norm: bool = static(default=True)
    router_bias: bool = static(default=False)
    shared_expert_gate: bool = static(default=False)
    weight_dtype: str = static(default="bfloat16")
    kv_dtype: str = static(default="bfloat16")


# ---------------------------------------------------------------------------- draft family


def llama_like(
    layers,
    width,
    vocabulary,
    head_dim=64.0,
    queries_per_kv=4.0,
    ffn_ratio=3.5,
    tie_embedding: bool = True,
    weight_dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    name: str = "llama-like",
) -> Architecture:
    """A Llama-family decoder with real `layers` and `width`: heads = width / head_dim, kv heads =
    heads / queries_per_kv, ffn = ffn_ratio * width (Llama-3 proportions)."""
    heads = width / head_dim
    return Architecture(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads / queries_per_kv,
        head_dim=head_dim,
        ffn_width=ffn_ratio * width,
        vocabulary=vocabulary,
        embedding_width=width,
        tie_embedding=tie_embedding,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        name=name,
    )


# --------------------------------------------------------------------- config.json of Hugging Face

PRESETS = resources.files("hw_models") / "presets"
DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "fp8": "float8"}


def preset_names() -> list[str]:
    """Names that `load_architecture` knows without a path."""
    return sorted(p.name.removesuffix(".json") for p in PRESETS.iterdir())


def nearest(name: str, known: list[str]) -> str:
    """The end of an error line: the known names nearest to `name`."""
    close = difflib.get_close_matches(name.lower(), known, n=4, cutoff=0.4)
    return f"nearest names: {', '.join(close or known)}"


def load_architecture(
    name_or_path: str, weight_dtype: str | None = None, kv_dtype: str | None = None
) -> Architecture:
    """The architecture of a preset name ("llama-3.1-70b", any case), of a `config.json`, or of a
    folder that holds one. The dtypes override the config's.

    Raises FileNotFoundError for an unknown name, ValueError for a config that cannot be read.
    """
    path = Path(name_or_path).expanduser()
    known = preset_names()
    if name_or_path.lower() in known:
        source = PRESETS / f"{name_or_path.lower()}.json"
    elif path.is_dir() and (path / "config.json").is_file():
        source = path / "config.json"
    elif path.is_file():
        source = path
    else:
        raise FileNotFoundError(
            f"unknown model {name_or_path!r}: neither a preset nor the path of a config.json; "
            + nearest(name_or_path, known)
        )
    try:
        config = json.loads(source.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{source} is not valid JSON: {error}; mend the file") from None
    if not isinstance(config, dict):
        raise ValueError(f"{source} holds a {type(config).__name__}, not a JSON object")
    preset = source.name.removesuffix(".json")
    label = preset if preset != "config" else source.parent.name
    return architecture_from_config(config, label, weight_dtype, kv_dtype)


class _Config:
    """A config.json whose missing keys give one clear line."""

    def __init__(self, config: dict, name: str):
        self.config, self.name = config, name

    def __call__(self, key: str, default: float | None = None) -> float:
        if default is not None and self.config.get(key) is None:
            return float(default)
        if key not in self.config:
            kind = self.config.get("model_type")
            raise ValueError(
                f"config of {self.name!r}: key {key!r} is missing (model_type {kind!r}); add it"
            )
        value = self.config[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ValueError(
                f"config of {self.name!r}: {key} = {value!r} is not a non-negative number"
            )
        return float(value)

    def get(self, key: str, default=None):
        value = self.config.get(key)
        return default if value is None else value


def architecture_from_config(
    config: dict, name: str = "", weight_dtype: str | None = None, kv_dtype: str | None = None
) -> Architecture:
    """The architecture that a Hugging Face config (a dict) describes.

    Raises ValueError for a model_type it does not know, a missing key or an unknown dtype.
    """
    kind = config.get("model_type")
    if kind not in READERS:
        raise ValueError(
            f"config of {name!r}: unknown architecture model_type {kind!r}; known: "
            + ", ".join(sorted(READERS))
        )
    fields = READERS[kind](_Config(config, name))
    quantised = (config.get("quantization_config") or {}).get("quant_method")
    stored = quantised or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    weights = weight_dtype or DTYPES.get(stored)
    cache = kv_dtype or ("float32" if weights == "float32" else "bfloat16")
    for label, dtype in (("weight", weights), ("KV", cache)):
        if dtype not in BYTES_PER_NUMBER:
            raise ValueError(
                f"{label} dtype {dtype or stored!r} of {name!r} is unknown; known: "
                + ", ".join(BYTES_PER_NUMBER)
            )
    return Architecture(name=name, weight_dtype=weights, kv_dtype=cache, **fields)


def _decoder(c: _Config, **extra) -> dict:
    """What the Llama-shaped families share."""
    width, heads = c("hidden_size"), c("num_attention_heads")
    fields = dict(
        layers=c("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=c("num_key_value_heads", heads),
        head_dim=c("head_dim", width / heads),
        ffn_width=c("intermediate_size"),
        vocabulary=c("vocab_size"),
        embedding_width=width,
        tie_embedding=bool(c.get("tie_word_embeddings", False)),
    )
    window = c("sliding_window", 0.0)
    if window and c.get("use_sliding_window", True):
        kinds = c.get("layer_types")
        full = c("max_window_layers", 0.0) if "use_sliding_window" in c.config else 0.0
        layers = kinds.count("sliding_attention") if kinds else max(fields["layers"] - full, 0.0)
        fields |= dict(window=window, window_layers=float(layers))
    return fields | extra


def _llama(c: _Config) -> dict:
    bias = bool(c.get("attention_bias", False))
    mlp = bool(c.get("mlp_bias", False))
    output = bool(c.get("attention_out_bias", bias))  # Seed-OSS has q, k, v biases only
    return _decoder(c, qkv_bias=bias, output_bias=output, ffn_bias=mlp)


def _mixture(c: _Config, **extra) -> dict:
    return _decoder(c, ffn="moe", active_experts=c("num_experts_per_tok"), **extra)


def _mixtral(c: _Config) -> dict:
    return _mixture(c, experts=c("num_local_experts"), expert_width=c("intermediate_size"))


def _qwen_moe(c: _Config, **extra) -> dict:
    extra |= dict(experts=c("num_experts"), expert_width=c("moe_intermediate_size"))
    return _mixture(c, **extra)


def _qwen2_moe(c: _Config) -> dict:
    shared = c("shared_expert_intermediate_size")
    return _qwen_moe(c, qkv_bias=True, shared_expert_width=shared, shared_expert_gate=True)


def _qwen3(c: _Config) -> dict:
    return _decoder(c, query_key_norm=True)


def _qwen3_moe(c: _Config) -> dict:
    return _qwen_moe(c, query_key_norm=True)


def _deepseek(c: _Config) -> dict:
    expert = c("moe_intermediate_size")
    fields = _mixture(
        c,
        attention="latent",
        experts=c("n_routed_experts"),
        expert_width=expert,
        shared_expert_width=expert * c("n_shared_experts"),
        dense_layers=c("first_k_dense_replace"),
        query_rank=c("q_lora_rank"),
        kv_rank=c("kv_lora_rank"),
        rope_head_dim=c("qk_rope_head_dim"),
        value_head_dim=c("v_head_dim"),
        router_bias=c.get("topk_method") == "noaux_tc",
    )
    return fields | dict(head_dim=c("qk_nope_head_dim") + c("qk_rope_head_dim"))


def _opt(c: _Config) -> dict:
    width, heads = c("hidden_size"), c("num_attention_heads")
    narrow = c("word_embed_proj_dim", width)
    return dict(
        layers=c("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width / heads,
        ffn_width=c("ffn_dim"),
        vocabulary=c("vocab_size"),
        embedding_width=narrow,
        learned_positions=c("max_position_embeddings") + 2,  # OPT offsets positions by two
        narrow_embedding=narrow != width,
        tie_embedding=bool(c.get("tie_word_embeddings", True)),
        gated_ffn=False,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        norm_bias=True,
        final_norm=bool(c.get("do_layer_norm_before", True)),
    )


READERS = {
    "llama": _llama,
    "seed_oss": _llama,
    "mistral": _decoder,
    "mixtral": _mixtral,
    "qwen2": lambda c: _decoder(c, qkv_bias=True),
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek,
    "opt": _opt,
}
