"""Losses of draft heads: hand-computed cases, which weights they move, the runtime's acceptance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.decoding.generation import Sampling, generate
from sdx.models.config import ModelConfig
from sdx.models.discriminator import Discriminator
from sdx.models.heads import HeadConfig, Step, create_head
from sdx.models.llama import Llama
from sdx.records import Chain
from sdx.training import head_data, head_losses, heads
from sdx.training.head_losses import HeadLoss
from sdx.training.trainer import Rates, Schedule

CONFIG = ModelConfig(vocab_size=11, width=8, layers=3, heads=2, kv_heads=1, head_dim=4, ffn_width=8)
FUSED = (1, 2, 3)
ROWS, TOKENS, PROMPT = 4, 14, 4


@pytest.fixture(scope="module")
def target():
    return Llama(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def teacher(target):
    return head_data.teacher_of(target)


@pytest.fixture(scope="module")
def written(target, tmp_path_factory):
    """A folder of features of texts that the target made of random prompts."""
    prompts = jax.random.randint(jax.random.key(1), (ROWS, PROMPT), 0, CONFIG.vocab_size)
    text = head_data.continuations(target, np.asarray(prompts), TOKENS - PROMPT, batch=2)
    folder = tmp_path_factory.mktemp("features")
    head_data.write_features(folder, target, text, FUSED, batch=3)
    return folder, text


@pytest.fixture(scope="module")
def batch(written):
    return head_data.feature_batches(head_data.Features(written[0]), ROWS, 5, True)(0, 0.0)


def make(kind, **fields):
    config = HeadConfig.for_target(CONFIG, kind, **fields)
    head = create_head(config, jax.random.key(7))
    # Medusa's blocks start as the identity: move everything off its start.
    keys = iter(jax.random.split(jax.random.key(8), 100))
    return jax.tree.map(lambda w: w + 0.1 * jax.random.normal(next(keys), w.shape), head)


# ---------------------------------------------------------------------------- hand-computed


def step_of(q, hidden=(0.0, 0.0)):
    return Step(
        hidden_BxSxD=jnp.asarray(hidden, float)[None, None], logits_BxSxU=jnp.log(jnp.asarray(q))
    )


P = jnp.asarray([[[0.5, 0.3, 0.2]]])
Q = [[[0.2, 0.3, 0.5]]]


@pytest.fixture(scope="module")
def eagle_of_three():
    return make("eagle", vocab_size=3)


@pytest.mark.parametrize(
    "loss, value",
    [
        (HeadLoss(), -(0.5 * np.log(0.2) + 0.3 * np.log(0.3) + 0.2 * np.log(0.5))),
        (HeadLoss(objective="tv"), 0.3),  # 1 - (0.2 + 0.3 + 0.2)
        (HeadLoss(law=0.0, top=2.0, top_k=2), -2 * (0.5 * np.log(0.2) + 0.3 * np.log(0.3))),
        (HeadLoss(law=0.0, feature=1.0), (0.5 * 0.4**2 + 2.5) / 2),  # d = 0.4 and 3
        (HeadLoss(objective="throughput", survival_weights=(4.0,)), -0.7),
    ],
    ids=["ce", "tv", "top", "feature", "throughput"],
)
def test_losses_of_one_slot(eagle_of_three, loss, value):
    steps = [step_of(Q, (0.4, -1.0))]
    top = jnp.asarray([[[0.0, 2.0]]])
    found = head_losses.distillation(eagle_of_three, loss, steps, jnp.log(P), top)
    np.testing.assert_allclose(found, value, rtol=1e-5)


def test_unrolled_steps_are_weighted_and_leave_out_slots_without_a_past(eagle_of_three):
    q = jnp.asarray([[[0.2, 0.3, 0.5], [0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]])
    steps = [Step(jnp.zeros((1, 3, 2)), jnp.log(q))] * 2
    p = jnp.broadcast_to(P, q.shape)
    tv = np.asarray([0.3, 0.0, 0.6])
    loss = HeadLoss(objective="tv", steps=2, decay=0.8)
    found = head_losses.distillation(eagle_of_three, loss, steps, jnp.log(p), jnp.zeros((1, 3, 2)))
    np.testing.assert_allclose(found, tv.mean() + 0.8 * tv[1:].mean(), rtol=1e-5)
    # Chains start at slots 0 and 1: rates of step 0 there, of step 1 one slot later.
    loss = HeadLoss(objective="throughput", steps=2, survival_weights=(3.0, 1.0))
    found = head_losses.distillation(eagle_of_three, loss, steps, jnp.log(p), jnp.zeros((1, 3, 2)))
    rate = 1 - tv
    one, two = rate[:2].mean(), (rate[0] * rate[1] + rate[1] * rate[2]) / 2
    np.testing.assert_allclose(found, -(3 * one + two) / 4, rtol=1e-5)


def test_tv_is_one_minus_acceptance_of_the_runtimes_rule():
    p, q = jax.nn.softmax(jax.random.normal(jax.random.key(3), (2, 4, 6)))
    accepted = (q * jnp.minimum(1.0, p / q)).sum(-1)  # a draft x ~ q is taken w. p. min(1, p/q)
    np.testing.assert_allclose(head_losses.acceptance(p, jnp.log(q)), accepted, rtol=1e-5)
    np.testing.assert_allclose(1 - accepted, 0.5 * jnp.abs(p - q).sum(-1), rtol=1e-4)


def test_throughput_loss_descends_along_the_weights(batch, teacher):
    """Its gradient is that of sum_k w_k S(k), so a step down it raises throughput to first order:
    with weight on S(2) only, it equals the gradient of -S(2)."""
    head = make("eagle")

    def survival(head, k):
        steps, logits, _ = head_losses.unrolled(head, HeadLoss(steps=2), batch, teacher)
        p = jax.nn.softmax(logits)
        rates = [head_losses.acceptance(p, s.logits_BxSxU) for s in steps]
        return -head_losses.survivals(rates)[k]

    loss = HeadLoss(objective="throughput", steps=2, survival_weights=(0.0, 5.0))
    found = jax.jit(jax.grad(lambda h: head_losses.head_loss(h, batch, teacher, loss)))(head)
    wanted = jax.jit(jax.grad(lambda h: survival(h, 1)))(head)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)


# ---------------------------------------------------------------------------- who learns


def norms(slope):
    return {k: float(jnp.abs(v).sum()) for k, v in heads_weights(slope).items()}


def heads_weights(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def test_a_specialist_learns_from_its_positions_only(batch, teacher):
    head = make("poss", positions_per_specialist=2, specialists=2)
    loss = HeadLoss(steps=4, feature=1.0)

    @functools.partial(jax.jit, static_argnums=1)
    def slope(head, j):
        def of_step(head):
            steps, logits, top = head_losses.unrolled(head, loss, batch, teacher)
            only = [s if i == j else jax.lax.stop_gradient(s) for i, s in enumerate(steps)]
            return head_losses.distillation(head, loss, only, logits, top[:, 1:])

        return jax.grad(of_step)(head)

    for j in range(4):
        found = norms(slope(head, j))
        for i in range(2):
            mine = sum(v for k, v in found.items() if f"blocks[{i}]" in k)
            assert (mine > 0) == (i == j // 2), (i, j)
        assert sum(v for k, v in found.items() if "fc" in k) > 0  # shared


@pytest.mark.parametrize("name", ["eagle", "hass", "eagle3", "poss", "medusa"])
def test_the_target_never_learns_and_every_weight_of_a_head_does(name, batch, teacher):
    fields = {
        "eagle3": {"feature_layers": FUSED},
        "medusa": {"steps": 2},
        "poss": {"specialists": 2},
    }
    head = make(heads.KIND.get(name, name), **fields.get(name, {}))
    loss = heads.recipe(name, steps=min(2, heads.RECIPES[name].steps))
    slope = jax.jit(jax.grad(lambda h: head_losses.head_loss(h, batch, teacher, loss)))(head)
    assert all(v > 0 for v in norms(slope).values()), norms(slope)
    # What trains is the head: the teacher is data of the step, and comes out as it went in.
    before = jax.tree.map(np.asarray, teacher)
    trainer = heads.head_trainer(
        head, teacher, loss, lambda step, progress: batch, Schedule(steps=3, warmup_steps=1),
        rates=Rates(matrix=0.0),
    )  # fmt: skip
    first = float(head_losses.head_loss(head, batch, teacher, loss))
    trainer.fit()
    jax.tree.map(np.testing.assert_array_equal, before, trainer.context[0])
    assert all(name.startswith("['head']") for name in trainer.weights)
    assert trainer.progress.loss < first


def test_generator_and_discriminator_learn_in_turn(batch, teacher):
    head = make("eagle")
    loss = heads.recipe("koala")
    pair = {
        "head": head,
        "discriminator": Discriminator(CONFIG.width, CONFIG.vocab_size, 2, jax.random.key(2)),
    }
    seen = []
    trainer = heads.head_trainer(
        head, teacher, loss, lambda step, progress: batch, Schedule(steps=2, warmup_steps=1),
        adversarial=0.3, rates=Rates(matrix=0.0), key=jax.random.key(2),
    )  # fmt: skip
    names = list(trainer.weights)
    assert {n.split("'")[1] for n in names} == {"head", "discriminator"}
    # L_G moves the head and L_D the discriminator, whose optimizers know nothing else.
    for phase, part in zip(trainer.moments, ("head", "discriminator"), strict=True):
        state = heads_weights(phase)
        owners = {
            owner for owner in ("head", "discriminator") for k in state if f"['{owner}']" in k
        }
        seen.append(owners)
        assert owners == {part}
    before = {k: np.asarray(v) for k, v in trainer.weights.items()}
    trainer.fit(stop_step=1)
    moved = {k for k, v in trainer.weights.items() if (np.asarray(v) != before[k]).any()}
    assert {k.split("'")[1] for k in moved} == {"head", "discriminator"}
    # The discriminator's step saw the head that the generator's step had left.
    after_generator = {k: v for k, v in trainer.weights.items()}
    assert seen and after_generator
    value = head_losses.discriminator_loss(pair, batch, teacher, loss)
    drafts, real, _ = head_losses.scores(pair, loss, batch, teacher)
    wanted = -jnp.log1p(-jax.nn.sigmoid(drafts[0])).mean() - jnp.log(jax.nn.sigmoid(real)).mean()
    np.testing.assert_allclose(value, wanted, rtol=1e-4)
    supervised = head_losses.head_loss(head, batch, teacher, loss)
    wanted = supervised - 0.3 * jnp.log(jax.nn.sigmoid(drafts[0])).mean()
    found = head_losses.generator_loss(pair, batch, teacher, loss, 0.3)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


# ---------------------------------------------------------------------------- data, evaluation


def test_features_are_the_targets_and_batches_a_function_of_the_step(written, target, teacher):
    folder, text = written
    features = head_data.Features(folder)
    assert len(features) == ROWS and text.shape == (ROWS, TOKENS)
    item = features[1]
    np.testing.assert_array_equal(item["tokens"], text[1])
    top = target.features(jnp.asarray(text[1:2]))[0]
    np.testing.assert_allclose(teacher.top(item["last"].astype(np.float32)), top, atol=0.02)
    assert item["fused"].shape == (TOKENS, len(FUSED) * CONFIG.width)
    np.testing.assert_array_equal(item["fused"][:, -CONFIG.width :], item["last"])
    one, again = (head_data.feature_batches(features, 2, 5) for _ in range(2))
    np.testing.assert_array_equal(one(9, 0.0)["tokens"], again(9, 0.5)["tokens"])
    assert one(9, 0.0)["seed"] != one(8, 0.0)["seed"] and "fused" not in one(0, 0.0)


def test_unfinished_features_and_unknown_recipes_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no features"):
        head_data.Features(tmp_path)
    with pytest.raises(ValueError, match="must be one of eagle"):
        heads.recipe("griffin")
    with pytest.raises(ValueError, match="survival weights"):
        HeadLoss(objective="throughput", steps=2, survival_weights=(1.0,))


def test_specialists_start_as_the_eagle_head(batch, teacher):
    eagle = make("eagle")
    config = HeadConfig.for_target(CONFIG, "poss", positions_per_specialist=1, specialists=2)
    head = heads.specialists_from(eagle, config, jax.random.key(0))
    loss = HeadLoss(steps=2)
    a, b = (head_losses.head_loss(h, batch, teacher, loss) for h in (eagle, head))
    np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.fixture(scope="module")
def decoded(target):
    """decoded(temperature): (head, prompts, texts of the target, counts of a chain of two)."""
    head = make("eagle")
    prompts = np.asarray(jax.random.randint(jax.random.key(4), (64, PROMPT), 0, 11))

    def run(temperature):
        text = head_data.continuations(target, prompts, 26, (temperature,), batch=64)
        result = generate(
            target, head, prompts.tolist(), Chain(lookahead=2), Sampling(temperature=temperature),
            26, key=1, stop_ids=(),
        )  # fmt: skip
        return head, text, result

    return run


def test_survival_on_texts_predicts_what_the_runtime_accepts(target, teacher, tmp_path, decoded):
    """Chains of a head behind the decoding loop: accepted per position against S(k)."""
    head, text, result = decoded(1.0)
    head_data.write_features(tmp_path, target, text, batch=64)
    batch = head_data.Features(tmp_path).all()
    predicted = heads.chain_survival(head, teacher, batch, PROMPT, 2, False)
    # Rounds start where the round before ended: with one draft per round nearly everywhere.
    counts = result.measurement()
    measured = np.asarray(counts.accepted_per_position) / counts.rounds
    error = 4 * np.sqrt(predicted * (1 - predicted) / counts.rounds) + 0.03
    assert (np.abs(measured - predicted) < error).all(), (measured, predicted)


def test_greedy_rounds_are_those_read_off_the_text(target, teacher, tmp_path, decoded):
    """Greedy text and drafts are determined: walking the text round by round must give the tokens
    of every row and exactly the runtime's rounds."""
    head, text, result = decoded(0.0)
    assert result.tokens == text[:, PROMPT:].tolist()
    head_data.write_features(tmp_path, target, text, batch=64)
    batch = head_data.Features(tmp_path).all() | {"seed": np.uint32(0)}
    same_2xBxS = np.asarray(heads.chances(head, batch, teacher, 2, True)[0])
    rounds = 0
    for row in range(len(text)):
        done = 1  # the prompt's pass gives a token of its own; slot t drafts the text's token t + 2
        while done < 26:
            slot = PROMPT - 2 + done
            run = [same_2xBxS[j, row, slot + j] for j in range(2) if slot + j < same_2xBxS.shape[2]]
            done += 1 + int(np.cumprod(run).sum())
            rounds += 1
    assert result.measurement().rounds == rounds
