"""Checkpoints: bit for bit there and back, one clear line for everything that is wrong."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sdx.models.checkpoint import load_model, save_model
from sdx.models.config import ModelConfig, read_config
from sdx.models.llama import Llama
from sdx.models.small_steps import PLAIN, StepForms


@pytest.fixture
def folder(tmp_path, model):
    save_model(tmp_path / "a", model)
    return tmp_path / "a"


def test_saved_again_it_is_the_same_file(folder, tmp_path):
    forms = StepForms(panel_width=16)
    loaded, config = load_model(folder, forms=forms)
    assert config == read_config(folder)
    save_model(tmp_path / "b", loaded)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (folder / name).read_bytes()


def test_float32_keeps_every_bit(tmp_path, model):
    save_model(tmp_path, model, "float32")
    loaded, _ = load_model(tmp_path, forms=PLAIN)
    jax.tree.map(np.testing.assert_array_equal, loaded, model)


def test_tied_model_and_its_doubled_head(tmp_path, config):
    tied = Llama(ModelConfig(**{**vars(config), "tie_embedding": True}), jax.random.key(3))
    save_model(tmp_path, tied, "float32")
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    loaded, _ = load_model(tmp_path, forms=PLAIN)
    jax.tree.map(np.testing.assert_array_equal, loaded, tied)


def test_weights_can_be_loaded_narrow(folder):
    loaded, _ = load_model(folder, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype(jnp.bfloat16)}


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("keep", [0, 7, 300, 5000])
def test_truncated_file(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="corrupt or truncated") as error:
        load_model(folder)
    assert "model.safetensors" in one_line(error)


def test_corrupt_header(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(content)
    with pytest.raises(ValueError, match="corrupt or truncated") as error:
        load_model(folder)
    one_line(error)


def test_missing_tensor_wrong_shape_and_unknown_name(folder):
    path = folder / "model.safetensors"
    good = load_file(path)
    for change, message in (
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"model.norm.weight": good["model.norm.weight"][:3]}, "config.json says"),
        ({"model.extra": good["model.norm.weight"]}, "model.extra is unknown"),
    ):
        save_file({k: v for k, v in (good | change).items() if v is not None}, path)
        with pytest.raises(ValueError, match=message) as error:
            load_model(folder)
        one_line(error)


def test_missing_files(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="no such checkpoint folder"):
        load_model(tmp_path / "nothing")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(folder)


def test_malformed_config(folder):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields)[:-5])
    with pytest.raises(ValueError, match="not valid JSON"):
        load_model(folder)
    for change, message in (
        ({"model_type": "gpt2"}, "model_type = 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"num_key_value_heads": 3}, "not a multiple of kv_heads"),
        ({"num_hidden_layers": 0}, "layers = 0"),
    ):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=message) as error:
            load_model(folder)
        one_line(error)
    del fields["vocab_size"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="vocab_size"):
        load_model(folder)


def test_config_round_trip(config):
    assert ModelConfig.from_hf(config.to_hf()) == config
