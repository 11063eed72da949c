"""Every policy through every implementation of the kernels: the same laws, the same tokens.

Pallas bodies are interpreted here; tests/kernels lowers them for the devices.
"""

import jax
import numpy as np
import pytest
from enumeration import distance, round_law, true_law
from test_decoding_losslessness import DRAFTERS, PROMPT, TARGET

from sdx.decoding import streamed
from sdx.decoding.base import Proposal
from sdx.decoding.generation import generate
from sdx.decoding.llama_target import LlamaTarget, with_kernels
from sdx.decoding.random import Keys
from sdx.decoding.verify import judge
from sdx.kernels import surplus
from sdx.kernels.dispatch import kernels_in
from sdx.models.config import ModelConfig
from sdx.models.llama import Llama
from sdx.records import Autoregressive, Chain, Sampling, StaticTree

SAMPLING = Sampling(temperature=2.0, top_p=0.97)


# One policy per rule and per shape of the streams; experiments/kernel_losslessness.py runs all
# policies through all implementations (minutes of interpretation).
PROVED = {
    "reference": ("chain", "tree-replacement", "threshold-drop"),
    "triton": ("chain", "block", "tree-without-replacement", "tree-top"),
    "tpu": ("chain", "tree-without-replacement"),
}


@pytest.mark.parametrize(
    "kernels, policy", [(kernels, policy) for kernels in PROVED for policy in PROVED[kernels]]
)
def test_enumerated_law_is_the_targets(kernels, policy):
    assert error_of(policy, kernels) < 1e-6


def error_of(policy, kernels):
    """How far the enumerated law of a round, extended by the target, is from the target's."""
    target = with_kernels(TARGET, kernels)
    law = round_law(target, with_kernels(DRAFTERS[policy], kernels), SAMPLING, PROMPT)
    longest = max(map(len, law))
    emitted = true_law(TARGET, SAMPLING, PROMPT, longest, given=law)
    return distance(emitted, true_law(TARGET, SAMPLING, PROMPT, longest))


@pytest.mark.parametrize("policy", ["chain", "tree-without-replacement"])
def test_the_proof_catches_a_wrong_constant(monkeypatch, policy):
    def broken(target, draft, request, **options):
        return surplus(target, draft, request._replace(c_N=0.5 * request.c_N), **options)

    monkeypatch.setattr(streamed, "surplus", broken)
    assert error_of(policy, "reference") > 1e-3


@pytest.fixture(scope="module")
def pair():
    def llama(layers, seed):
        config = ModelConfig(
            vocab_size=29, width=32, layers=layers, heads=4, kv_heads=2, head_dim=8, ffn_width=48,
            max_positions=96,
        )  # fmt: skip
        return Llama(config, jax.random.key(seed))

    return llama(2, 0), llama(1, 1)


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
POLICIES = {
    "chain": Chain(lookahead=3),
    "tree": StaticTree(parents=(-1, -1, 0, 0, 1)),
}


def tokens(pair, policy, kernels, sampling=Sampling()):  # noqa: B008 (frozen)
    target, draft = pair
    drafter = None if isinstance(policy, Autoregressive) else draft
    return generate(target, drafter, PROMPTS, policy, sampling, 6, key=3, kernels=kernels).tokens


@pytest.fixture(scope="module")
def plain(pair):
    return tokens(pair, Autoregressive(), "auto")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kernels", ["triton", "tpu"])
def test_greedy_tokens_are_those_of_autoregression(pair, plain, policy, kernels):
    assert tokens(pair, POLICIES[policy], kernels) == plain


def test_the_named_kernels_run(pair):

    target = LlamaTarget(model=pair[0], kernels="triton")
    cache = target.empty_cache(1, 16)
    ids = np.zeros((1, 3), np.int32)
    assert set(kernels_in(target, ids, cache)) == {"tree_attention_triton"}
    proposal = Proposal(tokens_BxN=ids[:, :2], live_BxN=np.ones((1, 2), bool), rule="chosen")
    random = Keys.of(jax.random.key(0), 1)
    ran = kernels_in(lambda x: judge(x, proposal, SAMPLING, random, "tpu")[0], np.zeros((1, 3, 29)))
    assert set(ran) == {"verify_statistics_tpu", "verify_tails_tpu", "verify_surplus_tpu"}


def test_an_unknown_implementation_is_named(pair):
    with pytest.raises(ValueError, match="kernels = 'cuda'"):
        generate(pair[0], None, PROMPTS, kernels="cuda")
