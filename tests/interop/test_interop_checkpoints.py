"""Checkpoints of every architecture against transformers' logits, round trips, bad files.

The fixtures are tiny random checkpoints (`experiments/make_parity_fixtures.py`); transformers is
not needed here.
"""

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from sdx.interop.checkpoints import (
    INDEX,
    load_checkpoint,
    load_tokenizer,
    read_config,
    save_checkpoint,
)
from sdx.models.cache import empty_cache

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(p.name for p in FIXTURES.iterdir())
PROMPT = 64


# Compiling is all the cost of tiny models: the compiler's optimisations are switched off.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@jit
def prefill(model, tokens_N):
    """Logits [N, V] of a prompt and the cache after it."""
    output = model(tokens_N[None], empty_cache(model.config, 1, PROMPT + 8))
    return output.logits_BxTxV[0], output.fresh


@jit
def decode(model, fresh, tokens_N):
    """Logits [N, V] of tokens that follow the prompt one at a time, from the cache."""

    def one(cache, token):
        output = model(token[None, None], cache)
        return cache.append(output.fresh), output.logits_BxTxV[0, 0]

    cache = empty_cache(model.config, 1, PROMPT + 8).append(fresh)
    return jax.lax.scan(one, cache, tokens_N)[1]


def expectation(name):
    expected = load_file(FIXTURES / name / "expected.safetensors")
    return jnp.asarray(expected["tokens"]), expected["logits"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name):
    tokens, expected = expectation(name)
    model = load_checkpoint(FIXTURES / name).model
    logits, fresh = prefill(model, tokens[:PROMPT])
    assert np.abs(logits - expected[:PROMPT]).max() < 2e-4
    assert np.abs(decode(model, fresh, tokens[PROMPT:]) - expected[PROMPT:]).max() < 2e-4


def with_config(model, **changes):
    """The same weights run under a config without one feature."""
    config = dataclasses.replace(model.config, **changes)
    model.config = config
    for i, block in enumerate(model.blocks):
        block.config = config
        if hasattr(block, "window"):
            block.window = config.window(i)
    return model


def with_weights(model, ending, value):
    """The parameters whose name ends so, set to a constant."""
    for block in model.blocks:
        for name, parameter in list(vars(block).items()):
            if isinstance(parameter, nnx.Param) and name.endswith(ending):
                setattr(block, name, nnx.Param(jnp.full_like(parameter[...], value)))
    return model


def first_query_heads(model):
    """Grouped-query attention undone: every query head uses the first key head."""
    c = model.config
    start, e = c.heads * c.head_dim, c.head_dim
    for block in model.blocks:
        qkv = block.qkv_DxN[...]
        for at in (start, start + c.kv_heads * e):
            qkv = qkv.at[:, at + e : at + 2 * e].set(qkv[:, at : at + e])
        block.qkv_DxN = nnx.Param(qkv)
    return model


def one_expert(model):
    for block in model.blocks:
        if hasattr(block, "experts"):
            block.experts.chosen = 1
    return model


ABLATIONS = [
    ("llama", "grouped queries", first_query_heads),
    ("llama3", "llama3 RoPE", lambda m: with_config(m, rope_scaling=None)),
    ("llama_linear", "linear RoPE", lambda m: with_config(m, rope_scaling=None)),
    ("llama_dynamic", "dynamic RoPE", lambda m: with_config(m, rope_scaling=None)),
    ("llama_bias", "query, key, value biases", lambda m: with_weights(m, "qkv_bias_N", 0.0)),
    ("llama_bias", "feed-forward biases", lambda m: with_weights(m, "gate_up_bias_2F", 0.0)),
    ("mistral", "window", lambda m: with_config(m, windows=())),
    ("qwen2", "biases", lambda m: with_weights(m, "qkv_bias_N", 0.0)),
    ("qwen2", "window of the second layer only", lambda m: with_config(m, windows=(12, 12))),
    ("qwen3", "query and key norms", lambda m: with_weights(m, "y_norm_E", 1.0)),
    ("qwen3_moe", "chosen experts", one_expert),
    ("mixtral", "chosen experts", one_expert),
    ("seed_oss", "output bias", lambda m: with_weights(m, "out_bias_D", 0.0)),
    ("opt", "biases", lambda m: with_weights(m, "up_bias_F", 0.0)),
    ("opt_post_norm", "norm after", lambda m: with_config(m, norm_first=True)),
]


@pytest.mark.parametrize(("name", "feature", "without"), ABLATIONS, ids=lambda x: str(x)[:20])
def test_each_feature_matters(name, feature, without):
    """A fixture that would pass without its feature would prove nothing."""
    tokens, expected = expectation(name)
    logits, _ = prefill(without(load_checkpoint(FIXTURES / name).model), tokens[:PROMPT])
    assert np.abs(logits - expected[:PROMPT]).max() > 1e-2, feature


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [jnp.float32, None])
def test_round_trip_is_bit_for_bit(name, dtype, tmp_path):
    loaded = load_checkpoint(FIXTURES / name, dtype=dtype)
    save_checkpoint(tmp_path, loaded.model, like=loaded.stored)
    written = sorted(p.name for p in tmp_path.iterdir())
    assert written == sorted(
        {p.name for p in (FIXTURES / name).iterdir()} - {"expected.safetensors"}
    )
    for file in written:
        ours, theirs = (tmp_path / file).read_bytes(), (FIXTURES / name / file).read_bytes()
        assert json.loads(ours) == json.loads(theirs) if file.endswith("json") else ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_config_round_trip(name):
    """A model that did not come from a checkpoint writes a config.json that reads back the same."""
    config = read_config(json.loads((FIXTURES / name / "config.json").read_text()))
    assert read_config(config.to_hf()) == config


def test_save_without_a_source(tmp_path):
    loaded = load_checkpoint(FIXTURES / "mixtral")
    save_checkpoint(tmp_path, loaded.model, dtype="F16")
    again = load_checkpoint(tmp_path)
    assert set(again.stored.dtypes.values()) == {"F16"}
    for old, new in zip(jax.tree.leaves(loaded.model), jax.tree.leaves(again.model), strict=True):
        assert np.array_equal(np.asarray(old, np.float16), np.asarray(new, np.float16))


def test_tensor_parallel_reads_the_same_model():
    """Two devices in another process: logits as on one, matrices really split."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", TENSOR_PARALLEL, str(FIXTURES / "qwen2")],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    split, difference = done.stdout.split()
    assert split == "(32,32)" and float(difference) < 2e-4


TENSOR_PARALLEL = """
import sys
import jax, numpy as np
from safetensors.numpy import load_file
from sdx.interop.checkpoints import load_checkpoint
from sdx.models.cache import empty_cache
mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
model = load_checkpoint(sys.argv[1], mesh=mesh).model
expected = load_file(sys.argv[1] + "/expected.safetensors")
cache = empty_cache(model.config, 1, 72)
run = jax.jit(lambda m, t: m(t, cache).logits_BxTxV, compiler_options={
    "xla_backend_optimization_level": 0})
logits = run(model, expected["tokens"][None, :64])
shape = model.blocks[0].qkv_DxN[...].addressable_shards[0].data.shape
print(str(shape).replace(" ", ""), np.abs(logits[0] - expected["logits"][:64]).max())
"""


# ---------------------------------------------------------------------------- bad checkpoints


def line(folder) -> str:
    """The one line that loading a bad checkpoint raises."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def copy(tmp_path):
    def make(name, fields=(), **tensors):
        """A fixture with changed config fields and tensors (None: left out)."""
        folder = tmp_path / name
        shutil.copytree(FIXTURES / name, folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(fields)))
        if tensors:
            stored = load_file(folder / "model.safetensors")
            stored = {k: v for k, v in (stored | tensors).items() if v is not None}
            save_file(stored, folder / "model.safetensors")
        return folder

    return make


def test_tied_embedding_matters(copy):
    folder = copy("llama_tied", {"tie_word_embeddings": False})
    assert "lm_head.weight is missing" in line(folder)


def test_missing_shard(copy):
    folder = copy("llama")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: shard is missing" in line(folder)


def test_shard_without_its_tensor(copy):
    folder = copy("llama")
    path = folder / "model-00001-of-00002.safetensors"
    save_file(dict(list(load_file(path).items())[1:]), path)
    assert "has no tensor" in line(folder)


def test_index_cannot_leave_its_folder(copy):
    folder = copy("llama")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    assert "outside its folder" in line(folder)
    (folder / INDEX).write_text("{}")
    assert "not a shard index" in line(folder)


NORM = "model.norm.weight"


def test_wrong_shape_and_dtype(copy, tmp_path):
    folder = copy("qwen3", **{NORM: np.ones(31, np.float16)})
    assert "model.norm.weight has shape [31], config.json says [32]" in line(folder)
    folder = copy("mistral", **{NORM: np.ones(32, np.int8)})
    assert "has dtype I8, sdx reads BF16, F16, F32" in line(folder)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_weights(copy, bad):
    values = np.ones(32, ml_dtypes.bfloat16)
    values[7] = bad
    assert "model.norm.weight holds NaN or infinite weights" in line(
        copy("qwen3", **{NORM: values})
    )


def test_missing_and_unknown_tensors(copy):
    assert "tensor model.norm.weight is missing" in line(copy("qwen3", **{NORM: None}))
    extra = {"model.layers.0.adapter.weight": np.ones(3, np.float32)}
    assert "model.layers.0.adapter.weight is unknown" in line(copy("mistral", **extra))


def test_unknown_architecture_and_options(copy):
    assert "model_type = 'mamba'" in line(copy("llama", {"model_type": "mamba"}))
    assert "hidden_act = 'gelu'" in line(copy("qwen3", {"hidden_act": "gelu"}))
    yarn = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}
    assert "rope_type = 'yarn'" in line(copy("mistral", yarn))
    assert "activation_function = 'gelu'" in line(copy("opt", {"activation_function": "gelu"}))


def test_truncated_file(copy):
    folder = copy("qwen3")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "corrupt or truncated" in line(folder)


class Explosive:
    """Unpickling this writes a file."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return (open, (self.mark, "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_is_never_opened(copy, tmp_path, name):
    folder, mark = copy("qwen3"), tmp_path / "exploded"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Explosive(mark)))
    assert "a pickle" in line(folder) and "never opens" in line(folder)
    assert not mark.exists()


def test_bad_folders(tmp_path, monkeypatch):
    assert "no such checkpoint folder" in line(tmp_path / "absent")
    assert "has a config.json" in line(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in line(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "no model.safetensors" in line(tmp_path)
    with pytest.raises(FileNotFoundError, match="tokenizer.json: no such file"):
        load_tokenizer(tmp_path)


def test_hub_id_without_a_network(monkeypatch):
    """The hub's own offline switch stands for a machine without a network."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    text = line("no-such-org/no-such-model")
    assert "offline" in text and "pass its folder" in text
