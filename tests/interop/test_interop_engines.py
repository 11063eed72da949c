"""Exports against the engines' own field lists."""

import json
import shlex

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sdx.interop.engines import UnsupportedByEngine, export, ranges_from_batches
from sdx.records import (
    Autoregressive,
    Cascade,
    Chain,
    Design,
    DrafterSpec,
    DynamicTree,
    StaticTree,
    ThresholdChain,
)

# The fields the engines read (their sources, autumn 2026).
VLLM_FIELDS = {
    "method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "quantization",
    "max_model_len", "revision", "parallel_drafting", "draft_sample_method",
    "rejection_sample_method", "num_speculative_tokens_per_batch_size",
    "use_heterogeneous_vocab", "prompt_lookup_min", "prompt_lookup_max",
}  # fmt: skip
VLLM_METHODS = {"draft_model", "eagle", "eagle3", "medusa", "mtp", "ngram"}
SGLANG_FIELDS = {
    "speculative-algorithm", "speculative-draft-model-path", "speculative-num-steps",
    "speculative-eagle-topk", "speculative-num-draft-tokens", "speculative-adaptive",
    "speculative-adaptive-config",
}  # fmt: skip
SGLANG_SLOT_FIELDS = {"candidate_steps", "up_hysteresis", "down_hysteresis", "ceiling_coeff"}
TENSORRT_FIELDS = {
    "decoding_type", "max_draft_len", "max_total_draft_tokens", "draft_len_schedule",
    "max_concurrency", "use_dynamic_tree", "dynamic_tree_max_topK", "speculative_model",
}  # fmt: skip
FAMILIES = {
    "vllm": ["independent", "eagle", "eagle3", "medusa", "ngram", "mtp"],
    "sglang": ["independent", "eagle", "eagle3", "ngram", "mtp"],
    "trtllm": ["independent", "eagle3", "medusa", "ngram", "mtp"],
}
SCHEDULE = ((1, 4, 5), (5, 32, 2), (33, 64, 0))


def chain(family="independent", lookahead=4, **kwargs):
    return Design(
        drafter=DrafterSpec(family=family, name="org/draft"),
        policy=Chain(lookahead=lookahead),
        **kwargs,
    )


def tree(budget=12, depth=4, branching=4, family="eagle3"):
    policy = DynamicTree(budget=budget, depth=depth, branching=branching)
    return Design(drafter=DrafterSpec(family=family, name="org/head"), policy=policy)


def pasted(command: str, flag: str) -> str:
    words = shlex.split(command)
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("family", FAMILIES["vllm"])
@pytest.mark.parametrize("schedule", [(), SCHEDULE])
def test_vllm_config_has_only_fields_vllm_reads(family, schedule):
    config = export(chain(family), "vllm", schedule=schedule)
    assert set(config.options) <= VLLM_FIELDS
    assert config.options["method"] in VLLM_METHODS
    assert ("model" in config.options) == (family not in ("ngram", "mtp"))
    assert json.loads(pasted(config.command, "--speculative-config")) == config.options


def test_vllm_schedule_is_inclusive_and_starts_at_one():
    options = export(chain(), "vllm", schedule=SCHEDULE).options
    assert options["num_speculative_tokens_per_batch_size"] == [[1, 4, 5], [5, 32, 2], [33, 64, 0]]
    assert options["num_speculative_tokens"] == 5  # the buffer holds the longest


def test_vllm_sampling_methods_follow_the_design():
    block = Design(drafter=DrafterSpec(name="d"), policy=Chain(lookahead=3, verification="block"))
    options = export(block, "vllm", temperature=1.0).options
    assert options["rejection_sample_method"] == "block"
    assert options["draft_sample_method"] == "probabilistic"
    assert export(chain(), "vllm").options["rejection_sample_method"] == "standard"
    assert export(chain(), "vllm").options["draft_sample_method"] == "greedy"


def test_vllm_tensor_parallel_of_the_draft_is_one_or_the_targets():
    config = export(chain(tensor_parallel=8), "vllm", draft_tensor_parallel=8)
    assert config.options["draft_tensor_parallel_size"] == 8
    assert "tensor_parallel_size" not in config.options
    assert pasted(config.command, "--tensor-parallel-size") == "8"
    with pytest.raises(ValueError, match="1 or the target's 8"):
        export(chain(tensor_parallel=8), "vllm", draft_tensor_parallel=4)


@pytest.mark.parametrize("family", FAMILIES["sglang"])
def test_sglang_flags(family):
    config = export(chain(family), "sglang")
    assert set(config.options) <= SGLANG_FIELDS
    assert config.options["speculative-num-draft-tokens"] == 5  # 4 drafts and the root
    if family != "ngram":
        assert config.options["speculative-num-steps"] == 4
        assert config.options["speculative-eagle-topk"] == 1


def test_sglang_tree_counts_the_root_and_keeps_its_bound():
    options = export(tree(budget=16), "sglang").options
    assert options["speculative-num-draft-tokens"] == 17
    assert options["speculative-num-draft-tokens"] <= 4 * 4 + 1
    with pytest.raises(UnsupportedByEngine, match="at most steps"):
        export(tree(budget=17), "sglang")


def test_sglang_schedule_is_a_file_of_lowest_batches():
    config = export(chain("eagle3", lookahead=5), "sglang", schedule=SCHEDULE)
    slots = json.loads(config.files[config.options["speculative-adaptive-config"]])
    assert [(b, s["candidate_steps"]) for b, s in slots.items()] == [
        ("1", [5]), ("5", [2]), ("33", [0]),
    ]  # fmt: skip
    assert all(set(s) <= SGLANG_SLOT_FIELDS for s in slots.values())
    assert "--speculative-adaptive" in shlex.split(config.command)
    with pytest.raises(UnsupportedByEngine, match="topk 1"):
        export(tree(), "sglang", schedule=SCHEDULE)


@pytest.mark.parametrize("family", FAMILIES["trtllm"])
@pytest.mark.parametrize("schedule", [(), SCHEDULE])
def test_tensorrt_yaml_reads_back(family, schedule):
    config = export(chain(family), "trtllm", schedule=schedule)
    assert set(config.options) <= TENSORRT_FIELDS
    assert yaml.safe_load(config.files["config.yaml"]) == {"speculative_config": config.options}


def test_tensorrt_tree_and_concurrency():
    options = export(tree(), "trtllm").options
    assert set(options) <= TENSORRT_FIELDS
    assert (options["max_draft_len"], options["max_total_draft_tokens"]) == (4, 12)
    assert options["use_dynamic_tree"] and options["dynamic_tree_max_topK"] == 4
    options = export(chain(), "trtllm", schedule=((1, 16, 4), (17, 64, 0))).options
    assert options["max_concurrency"] == 16 and "draft_len_schedule" not in options


@pytest.mark.parametrize(
    ("design", "engine", "reason"),
    [
        (tree(), "vllm", "tree attention was removed"),
        (Design(drafter=DrafterSpec(), policy=StaticTree(parents=(-1,))), "vllm", "token tree"),
        (Design(drafter=DrafterSpec(), policy=StaticTree(parents=(-1,))), "sglang", "fixed shape"),
        (
            Design(drafter=DrafterSpec(name="x"), policy=StaticTree(parents=(-1,))),
            "trtllm",
            "fixed",
        ),
        (Design(drafter=DrafterSpec(), policy=ThresholdChain()), "vllm", "confidence threshold"),
        (Design(drafter=DrafterSpec(), policy=Cascade(lengths=(2, 3))), "sglang", "cascade"),
        (chain("poss"), "vllm", "'poss'"),
        (chain("medusa"), "sglang", "'medusa'"),
        (chain("eagle"), "trtllm", "'eagle'"),
        (tree(family="independent"), "trtllm", "Eagle3 heads only"),
    ],
)
def test_refusals_say_why(design, engine, reason):
    with pytest.raises(UnsupportedByEngine, match=reason) as caught:
        export(design, engine)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_no_speculation_exports_no_configuration(engine):
    config = export(Design(drafter=DrafterSpec(), policy=Autoregressive()), engine)
    assert config.options == {} and "without" in config.notes[0]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="unknown engine 'tgi'"):
        export(chain(), "tgi")
    with pytest.raises(ValueError, match="3.5 is not an integer"):
        export(chain(lookahead=3.5), "vllm")
    with pytest.raises(ValueError, match="starts at 1"):
        export(chain(), "vllm", schedule=((2, 8, 3),))
    with pytest.raises(ValueError, match="needs its checkpoint"):
        export(Design(drafter=DrafterSpec(), policy=Chain()), "vllm")


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.integers(1, 512), st.integers(0, 8), min_size=1, max_size=8))
def test_ranges_cover_every_batch_once_and_keep_the_designed_ones(best):
    ranges = ranges_from_batches(best)
    covered = [b for low, high, _ in ranges for b in range(low, high + 1)]
    assert covered == list(range(1, max(best) + 1))
    lookahead = {b: k for low, high, k in ranges for b in range(low, high + 1)}
    assert {b: lookahead[b] for b in best} == best
