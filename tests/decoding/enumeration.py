"""Enumerates the law of what the runtime emits, by walking through every random decision.

`Script` answers the runtime's random questions from a list of answers and reports the law of the
first question that the list does not answer. `law_of` grows the lists breadth first until every
run has ended, and so adds up the exact probability of every outcome.
"""

from __future__ import annotations

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np

from sdx.decoding.base import Sequence
from sdx.decoding.llama_target import kernels_of
from sdx.decoding.loop import begin, run
from sdx.decoding.sampling import log_probabilities
from sdx.decoding.table import TableModel
from sdx.decoding.verify import emitted, judge, read_proposal
from sdx.records import Sampling, record

NO_STOPS = jnp.zeros((0,), jnp.int32)


@record
class Script:
    """A random source of one row. answers_S; `length`: how many are given; `asked`: how many
    questions so far; law_W: the law of the first unanswered question."""

    answers_S: jax.Array
    length: jax.Array
    asked: jax.Array
    law_W: jax.Array

    def _answer(self, law_W):
        W = self.law_W.shape[0]
        law_W = jnp.pad(law_W, (0, W - law_W.shape[0]))
        answer = jnp.where(self.asked < self.length, self.answers_S[self.asked], 0)
        source = Script(
            answers_S=self.answers_S,
            length=self.length,
            asked=self.asked + 1,
            law_W=jnp.where(self.asked == self.length, law_W, self.law_W),
        )
        return answer, source

    def accept(self, probability_BxK):
        source, answers = self, []
        for probability in probability_BxK[0]:
            answer, source = source._answer(jnp.stack([1 - probability, probability]))
            answers.append(answer == 1)
        return jnp.stack(answers)[None] if answers else jnp.zeros((1, 0), bool), source

    def draw(self, log_weights_BxV):
        source, answers = self, []
        for weights_V in log_weights_BxV[0].reshape(-1, log_weights_BxV.shape[-1]):
            # Nothing left to draw: token 0 for certain (the runtime marks it as not live).
            certain_V = jnp.where(jnp.arange(weights_V.size) == 0, 0.0, -jnp.inf)
            weights_V = jnp.where(weights_V.max() > -jnp.inf, weights_V, certain_V)
            answer, source = source._answer(jax.nn.softmax(weights_V))
            answers.append(answer)
        shape = (1, *log_weights_BxV.shape[1:-1])
        return jnp.stack(answers).astype(jnp.int32).reshape(shape), source


def law_of(run, width: int, questions: int = 64, chunk: int = 512) -> dict[tuple, float]:
    """The law of `run(script) -> (tokens_Q, count, script)`: outcome -> probability.

    `width` is the largest number of answers to one question.
    """

    @jax.jit
    @jax.vmap
    def play(answers_S, length):
        script = Script(
            answers_S=answers_S, length=length, asked=jnp.int32(0), law_W=jnp.zeros((width,))
        )
        tokens_Q, count, script = run(script)
        return tokens_Q, count, script.asked, script.law_W

    frontier, law = [((), 1.0)], defaultdict(float)
    while frontier:
        following = []
        for i in range(0, len(frontier), chunk):
            part = frontier[i : i + chunk]
            answers = np.zeros((chunk, questions), np.int32)
            lengths = np.zeros((chunk,), np.int32)
            for j, (prefix, _) in enumerate(part):
                answers[j, : len(prefix)], lengths[j] = prefix, len(prefix)
            tokens, counts, asked, laws = map(np.asarray, play(answers, lengths))
            for j, (prefix, probability) in enumerate(part):
                if asked[j] <= len(prefix):
                    law[tuple(tokens[j, : counts[j]].tolist())] += probability
                    continue
                assert len(prefix) < questions, "more questions than the script has room for"
                assert np.isfinite(laws[j]).all(), "a law that is not finite"
                for answer in np.flatnonzero(laws[j] > 0):
                    share = probability * float(laws[j, answer])
                    following.append(((*prefix, int(answer)), share))
        frontier = following
    return dict(law)


def complete(law: dict[tuple, float], following, length: int) -> dict[tuple, float]:
    """Extends every outcome to `length` tokens by `following(outcome) -> law_V` and cuts longer
    ones: the law of the first `length` tokens."""
    result, open_ = defaultdict(float), list(law.items())
    while open_:
        tokens, probability = open_.pop()
        if len(tokens) >= length:
            result[tokens[:length]] += probability
            continue
        for token, share in enumerate(following(tokens)):
            if share > 0:
                open_.append(((*tokens, token), probability * float(share)))
    return dict(result)


def distance(a: dict[tuple, float], b: dict[tuple, float]) -> float:
    """Largest difference of probability over all outcomes."""
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())


# ---------------------------------------------------------------------------- the runtime's law


def table(seed: int, size: int, scale: float = 1.5) -> TableModel:
    """A random table model of `size` tokens."""
    logits = scale * jax.random.normal(jax.random.key(seed), (size, size, size))
    return TableModel(logits_VxVxV=logits)


def next_law(model: TableModel, sampling: Sampling) -> np.ndarray:
    """P[previous, last, next] of the target under `sampling`."""
    if sampling.temperature == 0:
        return np.eye(model.vocab_size)[np.asarray(model.logits_VxVxV.argmax(-1))]
    return np.exp(np.asarray(log_probabilities(model.logits_VxVxV, sampling), np.float64))


def true_law(model, sampling, prompt, length: int, given: dict | None = None) -> dict[tuple, float]:
    """Law of `length` tokens after the prompt, one by one; `given`: what is already decided."""
    P = next_law(model, sampling)

    def following(tokens):
        before = (0, *prompt, *tokens)
        return P[before[-2], before[-1]]

    return complete({(): 1.0} if given is None else given, following, length)


def loop_law(target, drafter, sampling, prompt, length: int, stops=NO_STOPS) -> dict:
    """Law of what the whole loop emits: prompt, first token, rounds, roll-backs."""
    size = len(prompt)

    def play(script):
        lengths_B = jnp.array([size])
        limits_B = lengths_B + length
        fixed = {"sampling": sampling}
        state = begin(
            target, drafter, jnp.array([prompt]), lengths_B, limits_B, stops, script,
            capacity=size + length, **fixed,
        )  # fmt: skip
        state = run(target, drafter, stops, state, jnp.int32(length), **fixed)
        tokens = state.sequence.tokens_BxL[0, size : size + length]
        return tokens, state.sequence.lengths_B[0] - size, state.random

    return law_of(play, target.vocab_size)


def round_law(target, drafter, sampling, prompt) -> dict:
    """Law of what one round emits after the prompt (at least two tokens)."""
    size = len(prompt)
    tokens_BxL = jnp.pad(jnp.array([prompt]), ((0, 0), (0, drafter.height + 4)))
    sequence = Sequence(tokens_BxL=tokens_BxL, lengths_B=jnp.array([size]))

    def play(script):
        cache = target.empty_cache(1, size + 8)
        read = target(sequence.tokens_BxL[:, :size], cache)
        state = drafter.prepare(sequence, size, size + 8, read)
        cache = cache.commit(read.fresh, jnp.arange(size)[None], jnp.array([size - 1]))
        proposal, _, script = drafter.propose(state, sequence, sampling, script)
        output = read_proposal(target, cache, sequence, proposal, lag=1)
        kernels = kernels_of(target)
        verdict, _, script = judge(output.logits_BxTxV, proposal, sampling, script, kernels)
        return emitted(proposal, verdict)[0], verdict.accepted_B[0] + 1, script

    return law_of(play, target.vocab_size)
