"""Perplexities, rank acceptance, confidence of a pair; interrupted measurements go on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.calibration.pair import read_pair
from sdx.cli.resume import CHUNK, measured_in_chunks
from sdx.decoding.cross_vocabulary import cross_vocabulary
from sdx.decoding.llama_target import as_target
from sdx.models.config import ModelConfig
from sdx.models.llama import Llama
from sdx.records import Chain, Measurement

V, LENGTH = 24, 14
CONFIG = ModelConfig(
    vocab_size=V, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_width=16,
    max_positions=32,
)  # fmt: skip


def wide(seed):
    """A model whose distributions are not flat."""
    model = Llama(CONFIG, jax.random.key(seed))
    model.embedding_VxD[...] = 50 * model.embedding_VxD[...]
    return as_target(model)


@pytest.fixture(scope="module")
def pair():
    return wide(0), wide(1)


@pytest.fixture(scope="module")
def texts():
    tokens = np.random.default_rng(0).integers(0, V, (6, LENGTH))
    sizes = (4, 8, 8, 6, 8, 5)
    return [t[:n].tolist() for t, n in zip(tokens, sizes, strict=True)], [
        t[8 : 8 + LENGTH - 8].tolist() for t in tokens
    ]


@pytest.fixture(scope="module")
def logits(pair, texts):
    """Both models' logits over each text, read directly."""
    out = []
    for prompt, new in zip(*texts, strict=True):
        ids = jnp.asarray([*prompt, *new, *[0] * (LENGTH - len(prompt) - len(new))])
        both = [m(ids[None], m.empty_cache(1, LENGTH)).logits_BxTxV[0] for m in pair]
        out.append((len(prompt), [*prompt, *new], *map(np.asarray, both)))
    return out


def test_perplexity_is_over_the_prompts(pair, texts, logits):
    found = read_pair(*pair, *texts)
    for model, interval in ((2, found.target_perplexity), (3, found.draft_perplexity)):
        losses = []
        for entry in logits:
            n, ids = entry[:2]
            log_p = np.asarray(jax.nn.log_softmax(entry[model]))
            losses += [-log_p[i - 1, ids[i]] for i in range(1, n)]
        assert interval.value == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
        assert interval.low < interval.value < interval.high
    assert found.shared == 1.0 and found.tokens == sum(len(p) - 1 for p in texts[0])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rank_acceptance_is_the_targets_mass_on_the_drafts_ranks(pair, texts, logits, temperature):
    found = read_pair(*pair, *texts, ranks=3, temperature=temperature)
    mass = []
    for n, ids, target, draft in logits:
        for i in range(n - 1, len(ids) - 1):
            order = np.argsort(-draft[i])[:3]
            if temperature:
                p = np.exp(target[i] / temperature)
                mass.append((p / p.sum())[order])
            else:
                mass.append(order == target[i].argmax())
    expected = np.mean(mass, axis=0)
    assert np.allclose([r.value for r in found.rank_acceptance], expected, atol=1e-5)
    assert found.confidence is not None


def test_a_draft_equal_to_its_target_is_always_accepted(pair, texts):
    found = read_pair(pair[0], pair[0], *texts, ranks=2)
    assert [r.value for r in found.rank_acceptance] == [1.0, 0.0]
    assert found.target_perplexity == found.draft_perplexity


def test_a_draft_of_another_family_counts_shared_tokens_only(pair, texts):
    """The same draft behind a vocabulary that lacks token 3: restricted and renormalised."""
    names = {f"t{i}": i for i in range(V)}
    draft = cross_vocabulary(pair[0], names, {k: v for k, v in names.items() if v != 3}, V)
    found = read_pair(pair[0], draft, *texts)
    following = [i for p in texts[0] for i in p[1:]]
    assert found.shared == pytest.approx(1 - following.count(3) / len(following))
    assert found.draft_perplexity.value < found.target_perplexity.value  # renormalised


def test_texts_that_do_not_fit(pair):
    with pytest.raises(ValueError, match="two tokens or more"):
        read_pair(*pair, [[1]], [[2]])
    with pytest.raises(ValueError, match="text of 40 tokens: the models have 32"):
        read_pair(*pair, [[1] * 20], [[2] * 20])


# ---------------------------------------------------------------------------- going on


def counted(prompts, lookaheads=(1, 2)):
    """Measurements that tell which prompt they are of."""
    return {
        g: [
            Measurement(
                rounds=p[0], tokens=2 * p[0], seconds=0.5, drafted_per_position=(p[0],) * g,
                accepted_per_position=(1,) * g, policy=Chain(lookahead=g),
            )
            for p in prompts
        ]
        for g in lookaheads
    }  # fmt: skip


def test_an_interrupted_measurement_goes_on(tmp_path):
    prompts, state, calls = [[i] for i in range(1, 2 * CHUNK + 4)], str(tmp_path / "s.jsonl"), []

    def failing(chunk):
        calls.append(len(chunk))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return counted(chunk)

    with pytest.raises(KeyboardInterrupt):
        measured_in_chunks(state, {"a": 1}, prompts, (1, 2), failing)
    with open(state, "a", encoding="utf-8") as out:
        out.write('{"1": [{"ty')  # a line cut off by the interruption
    runs = measured_in_chunks(state, {"a": 1}, prompts, (1, 2), failing)
    assert calls == [CHUNK, CHUNK, CHUNK, 3]  # the first chunk was not measured again
    assert runs == {g: list(m) for g, m in counted(prompts).items()}
    assert measured_in_chunks(state, {"a": 1}, prompts, (1, 2), None) == runs


def test_another_measurements_file_is_refused(tmp_path):
    state = str(tmp_path / "s.jsonl")
    measured_in_chunks(state, {"a": 1}, [[1]], (1,), lambda c: counted(c, (1,)))
    with pytest.raises(ValueError, match="belongs to another measurement"):
        measured_in_chunks(state, {"a": 2}, [[1]], (1,), None)
