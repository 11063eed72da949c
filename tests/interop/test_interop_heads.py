"""Draft heads: round trips bit for bit, conversions, vocabulary maps, bad heads."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sdx.interop.heads import LAYER, Eagle3Head, MedusaHead, read_head, vocabulary_maps, write_head

H, TARGET, FFN, VOCAB, KEPT = 16, 24, 40, 50, 20
EAGLE_FIELDS = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": H,
    "target_hidden_size": TARGET,
    "intermediate_size": FFN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "draft_vocab_size": KEPT,
    "norm_before_residual": True,
}
MEDUSA_FIELDS = {
    "model_type": "medusa",
    "hidden_size": H,
    "vocab_size": VOCAB,
    "num_heads": 3,
    "num_hidden_layers": 2,
    "medusa_fc_bias": True,
}
IDS = np.sort(np.random.default_rng(1).choice(VOCAB, KEPT, replace=False))


def noise(*shape, seed=[0]):  # noqa: B006  a counter: every tensor differs
    seed[0] += 1
    return np.random.default_rng(seed[0]).standard_normal(shape).astype(ml_dtypes.bfloat16)


def eagle_tensors(prefix="midlayer."):
    shapes = [
        (H, 2 * H), (H // 2, 2 * H), (H // 2, 2 * H), (H, H), (FFN, H), (FFN, H), (H, FFN),
        (H,), (H,), (H,),
    ]  # fmt: skip
    layer = {prefix + n: noise(*s) for n, s in zip(LAYER, shapes, strict=True)}
    return layer | {
        "fc.weight": noise(H, 3 * TARGET),
        "norm.weight": noise(H),
        "lm_head.weight": noise(KEPT, H),
        **vocabulary_maps(IDS, VOCAB),
    }


def medusa_tensors():
    tensors = {f"lm_heads.{i}.weight": noise(VOCAB, H) for i in range(3)}
    for i in range(3):
        for j in range(2):
            tensors[f"blocks.{i}.layers.{j}.weight"] = noise(H, H)
            tensors[f"blocks.{i}.layers.{j}.bias"] = noise(H)
    return tensors


def speculators_fields():
    layer = {k: v for k, v in EAGLE_FIELDS.items() if not k.startswith(("draft", "norm", "target"))}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": KEPT,
        "target_hidden_size": TARGET,
        "norm_before_residual": True,
    }


FORMATS = {
    "eagle3": (EAGLE_FIELDS, eagle_tensors),
    "eagle3, other prefix": (EAGLE_FIELDS, lambda: eagle_tensors("layers.0.")),
    "speculators": (speculators_fields(), lambda: eagle_tensors("layers.0.")),
    "medusa": (MEDUSA_FIELDS, medusa_tensors),
}


def store(folder, fields, tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip_is_bit_for_bit(name, tmp_path):
    fields, tensors = FORMATS[name]
    folder = store(tmp_path / "in", fields, tensors())
    head = read_head(folder)
    write_head(tmp_path / "out", head)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()
    assert isinstance(head, MedusaHead if name == "medusa" else Eagle3Head)


def test_eagle3_to_speculators_and_back_keeps_every_array(tmp_path):
    head = read_head(store(tmp_path / "a", EAGLE_FIELDS, eagle_tensors()))
    write_head(tmp_path / "b", head, "speculators", verifier="org/target", lookahead=3)
    wrapped = read_head(tmp_path / "b")
    assert wrapped.verifier == "org/target" and wrapped.format == "speculators"
    assert all(n.startswith("layers.0.") for n in load_file(tmp_path / "b/model.safetensors")
               if n.removeprefix("layers.0.") in LAYER)  # fmt: skip
    write_head(tmp_path / "c", wrapped, "eagle3")
    original, back = (load_file(tmp_path / f / "model.safetensors") for f in "ac")
    assert original.keys() == back.keys()
    assert all(original[n].tobytes() == back[n].tobytes() for n in original)
    assert json.loads((tmp_path / "c/config.json").read_text()) == EAGLE_FIELDS


def test_norm_before_residual_is_always_written(tmp_path):
    fields = {k: v for k, v in EAGLE_FIELDS.items() if k != "norm_before_residual"}
    write_head(tmp_path / "b", read_head(store(tmp_path / "a", fields, eagle_tensors())))
    assert json.loads((tmp_path / "b/config.json").read_text())["norm_before_residual"] is False


def test_d2t_is_an_offset(tmp_path):
    head = read_head(store(tmp_path / "a", EAGLE_FIELDS, eagle_tensors()))
    assert head.target_ids().tolist() == IDS.tolist()
    assert np.flatnonzero(head.arrays["t2d"]).tolist() == IDS.tolist()
    assert head.arrays["d2t"].dtype == np.int64 and head.feature_layers(32) == (2, 16, 29)
    with pytest.raises(ValueError, match="must ascend within 0..49"):
        vocabulary_maps(np.array([3, 3]), VOCAB)


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({}, {"fc.weight": None}, "tensor fc.weight is missing"),
        ({}, {"fc.weight": noise(H, 3 * H)}, r"fc.weight has shape \[16, 48\]"),
        ({}, {"lm_head.weight": np.ones((KEPT, H))}, "lm_head.weight has dtype float64"),
        ({}, {"d2t": np.zeros(KEPT, np.int32)}, "d2t has dtype int32, expected int64"),
        ({}, {"d2t": np.full(KEPT, VOCAB)}, "d2t leads to target id 69, the vocabulary has 50"),
        ({}, {"t2d": np.zeros(VOCAB, bool)}, "d2t and t2d name different tokens"),
        ({}, {"d2t": None, "t2d": None}, "without d2t"),
        ({}, {"norm.weight": np.full(H, np.nan, np.float32)}, "holds NaN"),
        ({}, {"extra": noise(2)}, "tensor extra is unknown"),
        ({"num_hidden_layers": 2}, {}, "an EAGLE-3 head has one"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "sdx reads EAGLE-3 and Medusa"),
        ({}, dict.fromkeys(f"midlayer.{n}" for n in LAYER), "no layer"),
    ],
)
def test_bad_heads(tmp_path, fields, tensors, message):
    arrays = {n: v for n, v in (eagle_tensors() | tensors).items() if v is not None}
    folder = store(tmp_path / "bad", EAGLE_FIELDS | fields, arrays)
    with pytest.raises(ValueError, match=message) as caught:
        read_head(folder)
    assert "\n" not in str(caught.value)


def test_bad_medusa_and_folders(tmp_path):
    folder = store(tmp_path / "m", MEDUSA_FIELDS | {"num_heads": 4}, medusa_tensors())
    with pytest.raises(ValueError, match="blocks.3.layers.0.weight is missing"):
        read_head(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="a pickle, which sdx never opens"):
        read_head(folder)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        read_head(tmp_path / "absent")
    head = read_head(store(tmp_path / "a", EAGLE_FIELDS, eagle_tensors()))
    with pytest.raises(ValueError, match="names the target"):
        write_head(tmp_path / "b", head, "speculators")
