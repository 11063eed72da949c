"""Training: it learns, it resumes on the same trajectory, its schedule ends, its data are split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from sdx.models.config import ModelConfig
from sdx.models.llama import Llama
from sdx.training import corpus
from sdx.training.losses import (
    cross_entropy,
    distillation_loss,
    forward_kl,
    language_model_loss,
)
from sdx.training.trainer import Schedule, Trainer

CONFIG = ModelConfig(
    vocab_size=16, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_width=16
)
STREAM = np.tile(np.arange(16, dtype=np.int32), 40)  # after i comes i + 1


def new_trainer(folder=None, steps=24) -> Trainer:
    return Trainer(
        Llama(CONFIG, jax.random.key(0)),
        language_model_loss,
        corpus.lengthening_batches(STREAM, 64, (16, 16), 0.5, seed=1),
        Schedule(steps=steps, warmup_steps=4),
        folder=folder,
    )


@pytest.fixture(scope="module")
def finished():
    trainer = new_trainer()
    start = float(language_model_loss(trainer.model, STREAM[None, :33]))
    return trainer, start, trainer.fit()


def test_training_learns(finished):
    trainer, start, progress = finished
    assert progress.step == 24
    assert float(language_model_loss(trainer.model, STREAM[None, :33])) < start - 1.0


def test_resumed_training_follows_the_same_trajectory(finished, tmp_path):
    first = new_trainer(tmp_path)
    assert not first.resume()
    first.fit(stop_step=13)
    second = new_trainer(tmp_path)
    assert second.resume()
    assert second.progress.step == 13
    assert second.fit().step == 24
    for name, weight in finished[0].weights.items():
        np.testing.assert_array_equal(second.weights[name], weight, err_msg=name)


def test_schedule_warms_up_stays_and_ends():
    plan = Schedule(steps=100, seconds=50, warmup_steps=10, decay=0.4)
    assert plan.factor(0, 0) == pytest.approx(0.1)
    assert plan.factor(30, 0) == 1
    assert plan.factor(80, 0) == pytest.approx(0.5)
    assert plan.factor(30, 40) == pytest.approx(0.5)  # time runs out before the steps do
    assert plan.progress(30, 51) == 1


def test_losses_agree_with_their_definitions():
    p, q = jax.random.normal(jax.random.key(0), (2, 5, 7))
    target = jnp.arange(5)
    soft = jax.nn.softmax(q)
    np.testing.assert_allclose(
        cross_entropy(q, target), -jnp.log(soft[target, target]).mean(), rtol=1e-5
    )
    law = jax.nn.softmax(p)
    expected = (law * jnp.log(law / soft)).sum(axis=1).mean()
    np.testing.assert_allclose(forward_kl(p, q), expected, rtol=1e-5)
    assert abs(float(forward_kl(q, q))) < 1e-6


def test_distillation_does_not_train_the_teacher(finished):
    teacher, window = finished[0].model, STREAM[None, :17]
    student = Llama(CONFIG, jax.random.key(5))
    slopes = jax.jit(jax.grad(distillation_loss, argnums=(0, 2)))(student, window, teacher)
    norms = [sum(float(jnp.abs(leaf).sum()) for leaf in jax.tree.leaves(s)) for s in slopes]
    assert norms[0] > 0 and norms[1] == 0


def test_batches_are_a_function_of_the_step():
    batch = corpus.lengthening_batches(STREAM, 64, (16, 32), 0.5, seed=1)
    assert batch(0, 0.0).shape == (4, 17) and batch(0, 0.9).shape == (2, 33)
    np.testing.assert_array_equal(batch(7, 0.1), batch(7, 0.2))
    assert (batch(0, 0.0)[:, 1:] == (batch(0, 0.0)[:, :-1] + 1) % 16).all()
    seen = np.concatenate([batch(step, 0.0)[:, 0] for step in range(3)])
    assert len(seen) == 12


def test_too_short_a_text_is_an_error():
    with pytest.raises(ValueError, match="a window of 64 needs more text"):
        corpus.batches(STREAM[:50], 1, 64, 0)


@pytest.fixture(scope="module")
def library():
    return corpus.standard_library()


def test_the_corpus_is_split_by_file(library):
    sides = {split: corpus.texts(split, library) for split in ("train", "held_out")}
    assert sum(map(len, sides.values())) == len(library) > 300
    assert 0.04 < len(sides["held_out"]) / len(library) < 0.14
    assert not [path for path in library if "test" in path.split("/")[:-1] or "encodings" in path]
    assert corpus.split_of("ast.py") == corpus.split_of("ast.py")


def test_the_tokenizer_round_trips(library):
    sample = corpus.texts("held_out", library)[:3]
    tokenizer = corpus.train_tokenizer(sample, 300)
    assert tokenizer.get_vocab_size() == 300 and tokenizer.token_to_id(corpus.END_OF_TEXT) == 0
    text = sample[0][:500] + "é\t→ ünï"
    assert Tokenizer.from_str(tokenizer.to_str()).decode(tokenizer.encode(text).ids) == text
    stream = corpus.tokenise(tokenizer, ["a b", "c"])
    assert stream[0] == stream[-1] == 0 and (stream == 0).sum() == 3
    assert corpus.held_out_prompts(np.arange(100), 4, 10).shape == (4, 10)


def test_missing_sources_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Python sources"):
        corpus.standard_library(tmp_path)
