"""FLOPs and bytes by hand, published parameter counts, gradients, limits, error lines."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.theory.transformers import (
    Architecture,
    active_parameters,
    architecture_from_config,
    experts_touched,
    kv_cache_bytes,
    llama_like,
    load_architecture,
    parameters,
    preset_names,
    step_bytes,
    step_flops,
    step_operations,
    weight_bytes,
)

# Totals as the model hubs publish them (counted from the checkpoints).
PUBLISHED = {
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "qwen1.5-0.5b": 463_987_712,
    "qwen1.5-1.8b": 1_836_828_672,
    "qwen1.5-4b": 3_950_369_280,
    "qwen1.5-7b": 7_721_324_544,
    "qwen1.5-14b": 14_167_290_880,
    "qwen1.5-32b": 32_512_218_112,
    "qwen1.5-72b": 72_287_920_128,
    "qwen1.5-110b": 111_209_914_368,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "vicuna-7b": 6_738_415_616,
    "vicuna-13b": 13_015_864_320,
    "vicuna-33b": 32_528_943_616,
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "seed-oss-36b": 36_151_104_512,
    "mixtral-8x7b": 46_702_792_704,
}
# Published in billions only: (total, active), half a unit of the last digit.
ROUNDED = {
    "opt-30b": (30.0, None, 0.5),
    "opt-66b": (66.0, None, 0.5),
    "deepseek-v3": (671.0, 37.0, 1.0),
    "qwen3-30b-a3b": (30.5, 3.3, 0.06),
    "mixtral-8x7b": (46.7, 12.9, 0.06),
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(name):
    assert float(parameters(load_architecture(name))) == PUBLISHED[name]


@pytest.mark.parametrize("name", sorted(ROUNDED))
def test_parameters_round_to_the_published_ones(name):
    total, active, half = ROUNDED[name]
    architecture = load_architecture(name)
    assert abs(float(parameters(architecture)) / 1e9 - total) < half
    if active:
        assert abs(float(active_parameters(architecture)) / 1e9 - active) < half


def test_every_preset_is_checked():
    assert set(preset_names()) == set(PUBLISHED) | set(ROUNDED)


def tiny(**changes) -> Architecture:
    """2 layers, width 8, 4 heads of 2, 2 kv heads, ffn 16, vocabulary 32."""
    base = llama_like(
        2.0, 8.0, 32.0, head_dim=2.0, queries_per_kv=2.0, ffn_ratio=2.0, tie_embedding=False
    )
    return dataclasses.replace(base, **changes)


def numbers(step) -> dict:
    return {k: float(v) for k, v in dataclasses.asdict(step).items()}


def test_a_dense_step_by_hand():
    # Per layer: q, o 8x8 each, k, v 8x4 each = 192; gate, up, down 3 x 8x16 = 384: 576. b=3, t=2.
    got = numbers(step_operations(tiny(), 3, 2, 10))
    assert got == dict(
        linear_flops=2 * 6 * 2 * 576,
        # queries see 10 + 1 and 10 + 2 positions; 4 heads x 2 x 4 FLOPs a pair; 2 layers, 3 rows
        attention_flops=3 * 2 * (11 + 12) * 4 * 4 * 2,
        head_flops=2 * 6 * 8 * 32,
        linear_bytes=2 * 576 * 2,
        # a position is 2 x 2 heads x 2 numbers x 2 bytes; read 10, write 2, read the 2
        attention_bytes=3 * 2 * (10 + 2 + 2) * 16,
        head_bytes=8 * 32 * 2,
        collective_bytes=0,
    )
    assert float(step_flops(tiny(), 3, 2, 10)) == 13824 + 4416 + 3072
    assert float(step_bytes(tiny(), 3, 2, 10)) == 2304 + 1344 + 512
    assert float(kv_cache_bytes(tiny(), 3, 10)) == 3 * 2 * 10 * 16
    assert float(weight_bytes(tiny())) == 2 * (2 * 576 + 2 * 256 + 2 * 16 + 8)


def test_a_split_step_by_hand():
    whole, half = step_operations(tiny(), 3, 2, 10), step_operations(tiny(), 3, 2, 10, 2)
    quarter = step_operations(tiny(), 3, 2, 10, 4)
    assert float(half.linear_flops) == float(whole.linear_flops) / 2
    assert float(half.attention_bytes) == float(whole.attention_bytes) / 2
    # two kv heads cannot be split over four devices
    assert float(quarter.attention_bytes) == float(half.attention_bytes)
    # 2 all-reduces x 2 layers of 6 tokens x 8 numbers x 2 bytes, ring factor 2 (tp - 1) / tp
    assert float(half.collective_bytes) == 2 * 2 * 6 * 8 * 2 * 1.0
    assert float(quarter.collective_bytes) == 2 * 2 * 6 * 8 * 2 * 1.5


def test_a_sliding_window_by_hand():
    windowed = tiny(window=4.0, window_layers=1.0)
    got = step_operations(windowed, 1, 1, 10)
    assert float(got.attention_flops) == (11 + 5) * 32
    assert float(got.attention_bytes) == (10 + 4 + 2 * 2) * 16
    short = step_operations(windowed, 1, 1, 3)  # a context inside the window: nothing is saved
    assert numbers(short) == numbers(step_operations(tiny(), 1, 1, 3))


def test_a_mixture_by_hand():
    mixture = tiny(
        ffn="moe",
        experts=4.0,
        active_experts=2.0,
        expert_width=16.0,
        shared_expert_width=8.0,
        dense_layers=1.0,
    )
    # attention 192 twice, one dense block 384, router 8x4, shared 192, routed 384 each
    fixed = 2 * 192 + 384 + 32 + 192
    got = step_operations(mixture, 1, 1, 0)
    assert float(got.linear_flops) == 2 * (fixed + 2 * 384)
    assert np.isclose(float(got.linear_bytes), 2 * (fixed + 2 * 384), rtol=1e-14)
    three = step_operations(mixture, 3, 1, 0)
    assert np.isclose(float(three.linear_bytes), 2 * (fixed + 4 * (1 - 0.5**3) * 384), rtol=1e-14)


def test_latent_attention_by_hand():
    latent = tiny(
        attention="latent",
        head_dim=3.0,
        query_rank=5.0,
        kv_rank=6.0,
        rope_head_dim=1.0,
        value_head_dim=2.0,
    )
    # q 8x5 + 5x(4x3); latent 8x(6+1); up 6x4x(2+2); out 4x2x8; ffn 384
    layer = 40 + 60 + 56 + 96 + 64 + 384
    got = step_operations(latent, 1, 1, 10, 4)
    assert float(got.linear_flops) * 4 == 2 * 2 * layer
    # absorbed: a score over 6 + 1 numbers and a value over 6, 4 heads, 2 FLOPs, 11 keys, 2 layers
    assert float(got.attention_flops) * 4 == 2 * 11 * 4 * 2 * (6 + 1 + 6)
    # every device holds the whole latent: 7 numbers of 2 bytes
    assert float(got.attention_bytes) == 2 * 12 * 14


def test_narrow_weights_and_kv():
    wide, narrow = tiny(), tiny(weight_dtype="int4", kv_dtype="float8")
    a, b = step_operations(wide, 2, 1, 9), step_operations(narrow, 2, 1, 9)
    assert float(b.linear_bytes) == float(a.linear_bytes) / 4
    assert float(b.attention_bytes) == float(a.attention_bytes) / 2
    assert float(b.linear_flops) == float(a.linear_flops)


def test_ancestors_of_a_tree():
    # 5 nodes under one root: every node has 1 ancestor in the step, the root none: mean 5 / 6
    chain = step_operations(tiny(), 1, 6, 10)
    star = step_operations(tiny(), 1, 6, 10, ancestors=5 / 6)
    assert np.isclose(float(chain.attention_flops), 2 * 32 * sum(11 + i for i in range(6)))
    assert np.isclose(float(star.attention_flops), 2 * 32 * (11 + 5 * 12))


def test_experts_touched_limits():
    with jax.enable_x64(True):
        mixtral = load_architecture("mixtral-8x7b")
        assert np.isclose(experts_touched(mixtral, 1.0), 2.0, rtol=1e-14)
        assert np.isclose(experts_touched(mixtral, 1e9), 8.0)
        skewed = dataclasses.replace(mixtral, routing=np.array([1.0] + [1 / 7] * 7))
        assert np.isclose(experts_touched(skewed, 1.0), 2.0)
        for tokens in (2.0, 7.0, 40.0):  # uniform routing touches the most
            assert experts_touched(skewed, tokens) < experts_touched(mixtral, tokens)
        gradient = jax.grad(experts_touched, argnums=1)(skewed, 3.0)
        assert np.isfinite(gradient) and gradient > 0


NAMES = ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "opt-350m")


@pytest.mark.parametrize("name", NAMES)
def test_gradients_match_central_differences(name):
    """d(bytes + FLOPs)/d(every size, batch, new tokens, context), by central differences."""
    with jax.enable_x64(True):
        architecture = load_architecture(name)
        architecture = dataclasses.replace(architecture, window=900.3, window_layers=3.0)
        leaves, tree = jax.tree.flatten((architecture, 3.0, 4.0, 1000.0, 2.0))
        x0 = jnp.array(leaves)

        def work(x):
            a, b, t, s, tp = jax.tree.unflatten(tree, list(x))
            step = step_operations(a, b, t, s, tp)
            return jnp.log(step.linear_flops + step.attention_flops + step.head_flops) + jnp.log(
                step.linear_bytes + step.attention_bytes + step.head_bytes + step.collective_bytes
            )

        exact = np.asarray(jax.grad(work)(x0))
        steps = jnp.diag(1e-4 * jnp.maximum(jnp.abs(x0), 1e-2))
        values = jax.jit(jax.vmap(work))
        numeric = np.asarray((values(x0 + steps) - values(x0 - steps)) / (2 * jnp.diag(steps)))
        scale = np.maximum(np.abs(exact), 1e-3 / np.maximum(np.abs(x0), 1e-2))
        assert np.max(np.abs(exact - numeric) / scale) < 1e-6
        assert np.count_nonzero(exact) >= 12


def test_vmap_over_design_variables():
    with jax.enable_x64(True):
        widths = jnp.array([512.0, 700.5, 2048.0])
        counts = jax.vmap(lambda w: parameters(llama_like(12.5, w, 32000.0)))(widths)
        each = [parameters(llama_like(12.5, w, 32000.0)) for w in (512.0, 700.5, 2048.0)]
        np.testing.assert_allclose(counts, each, rtol=1e-14)
        assert np.all(np.diff(counts) > 0)


def write_config(tmp_path, **config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


LLAMA = dict(
    model_type="llama",
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    vocab_size=100,
)


def test_a_config_from_a_path_and_from_a_folder(tmp_path):
    path = write_config(tmp_path, **LLAMA, torch_dtype="float32")
    by_path, by_folder = load_architecture(str(path)), load_architecture(str(tmp_path))
    assert by_path == by_folder
    assert by_path.kv_heads == 4 and by_path.head_dim == 16
    assert by_path.weight_dtype == by_path.kv_dtype == "float32"
    assert load_architecture(str(path), weight_dtype="int4").weight_dtype == "int4"


def test_a_sliding_window_config():
    mistral = LLAMA | dict(model_type="mistral", sliding_window=4096)
    assert architecture_from_config(mistral).window_layers == 2
    qwen = LLAMA | dict(model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    assert architecture_from_config(qwen).window_layers == 0
    kinds = dict(layer_types=["sliding_attention", "full_attention"])
    assert architecture_from_config(mistral | kinds).window_layers == 1


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(FileNotFoundError) as error:
        load_architecture("llama-3.1-71b")
    assert "llama-3.1-70b" in one_line(error)


def test_an_unknown_architecture_is_refused(tmp_path):
    path = write_config(tmp_path, **(LLAMA | dict(model_type="mamba")))
    with pytest.raises(ValueError, match="unknown architecture model_type 'mamba'") as error:
        load_architecture(str(path))
    one_line(error)


@pytest.mark.parametrize("key", sorted(set(LLAMA) - {"model_type"}))
def test_a_missing_key_is_named(key):
    config = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(ValueError, match=f"key '{key}' is missing") as error:
        architecture_from_config(config, "mine")
    one_line(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": ', "not valid JSON"),
        ("[1]", "not a JSON object"),
        (json.dumps(LLAMA | dict(hidden_size="wide")), "hidden_size = 'wide'"),
        (json.dumps(LLAMA | dict(num_hidden_layers=-2)), "num_hidden_layers = -2"),
        (json.dumps(LLAMA | dict(torch_dtype="float12")), "'float12' of"),
        (json.dumps(LLAMA | dict(head_dim="x")), "head_dim = 'x'"),
    ],
)
def test_a_bad_config_gives_one_line(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_architecture(str(path))
    one_line(error)
