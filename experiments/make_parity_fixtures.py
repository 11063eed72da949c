"""Tiny random checkpoints of every supported architecture, with the logits transformers computes.

    pip install -e '.[peers]' && python -m experiments.make_parity_fixtures

Writes tests/interop/fixtures/<name>/: config.json and safetensors as transformers saves them, and
expected.safetensors with tokens int32 [72] and logits float32 [72, V] (64 tokens in one pass, then
8 one by one with the cache). Expected: 14 folders, each under 300 KB. Needs torch and transformers
(the committed files were made with torch 2.13.0 and transformers 5.23.0); tests need neither.

Weights are drawn so that every feature shows in the logits: matrices of variance 1/inputs, norm
scales 1 +- 0.3, biases of deviation 0.5, heads of deviation 0.3.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

ROOT = Path(__file__).parent.parent / "tests" / "interop" / "fixtures"
PROMPT, DECODED = 64, 8
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# name -> (class, fields beyond SHAPE)
FIXTURES = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama_dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            "max_position_embeddings": 32,
        },
    ),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 12}),
    "qwen2": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "seed_oss": (
        "SeedOss",
        {"head_dim": 16, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ),
    "opt": ("OPT", {"ffn_dim": 64}),
    "opt_post_norm": (
        "OPT",
        {"ffn_dim": 64, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
    ),
}
SHARDED = {"llama": "40KB"}


def randomise(model: torch.nn.Module, generator: torch.Generator):
    """bfloat16 values in float32 weights, so that the small file holds them exactly."""
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            value = 1 + 0.3 * noise
        elif parameter.ndim == 1:
            value = 0.5 * noise
        elif "embed" in name:
            value = (0.3 if tied else 1.0) * noise
        else:
            value = noise * parameter.shape[-1] ** -0.5
        parameter.data.copy_(value.to(torch.bfloat16).to(torch.float32))


@torch.no_grad()
def expected(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [PROMPT + DECODED, V]: the prompt in one pass, then one token at a time."""
    out = model(tokens[None, :PROMPT], use_cache=True)
    logits, cache = [out.logits[0]], out.past_key_values
    for i in range(PROMPT, PROMPT + DECODED):
        out = model(tokens[None, i : i + 1], past_key_values=cache, use_cache=True)
        logits.append(out.logits[0])
        cache = out.past_key_values
    return torch.cat(logits)


def make(name: str):
    kind, extra = FIXTURES[name]
    config = getattr(transformers, kind + "Config")(**(SHAPE | extra))
    config._attn_implementation = "eager"
    model = getattr(transformers, kind + "ForCausalLM")(config).eval().to(torch.float32)
    generator = torch.Generator().manual_seed(len(name) * 1000 + sum(map(ord, name)))
    randomise(model, generator)
    tokens = torch.randint(0, SHAPE["vocab_size"], (PROMPT + DECODED,), generator=generator)
    logits = expected(model, tokens)
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=SHARDED.get(name, "1GB"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file(
        {"tokens": tokens.to(torch.int32), "logits": logits.contiguous()},
        folder / "expected.safetensors",
    )
    size = sum(f.stat().st_size for f in folder.iterdir())
    assert size <= 300_000, f"{name} has {size} bytes"
    print(f"{name}: {size / 1000:.0f} KB, logits of deviation {logits.std():.2f}")


def main():
    for name in FIXTURES:
        make(name)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
