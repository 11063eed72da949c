"""The rules of acceptance on their own: published behaviours, edges, float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import complete, distance, law_of

from sdx.decoding import accept, walk
from sdx.decoding.base import Proposal
from sdx.decoding.random import Keys
from sdx.decoding.trees import StaticTreeDrafter, topology
from sdx.decoding.verify import emitted

KEYS = functools.partial(Keys.of, jax.random.key(0))


def tree_of(parents):
    drafter = StaticTreeDrafter(model=None, parents=parents)
    return drafter._tree(topology(parents), np.zeros(len(parents) + 1, np.int32))


def one_hot_logs(tokens, size):
    return jnp.log(jax.nn.one_hot(jnp.array(tokens), size))


def chain_of(tokens, live=None, **fields):
    tokens = jnp.array(tokens)
    live = jnp.ones(tokens.shape, bool) if live is None else jnp.array(live)
    return Proposal(tokens_BxN=tokens, live_BxN=live, **fields)


def greedy_emission(best, proposal):
    verdict = accept.greedy_chain(jnp.array(best), proposal)
    tokens = emitted(proposal, verdict)
    return [row[: n + 1].tolist() for row, n in zip(tokens, verdict.accepted_B, strict=True)]


def test_first_mismatch_emits_the_targets_token_and_nothing_after():
    assert greedy_emission([[5, 6, 7, 8]], chain_of([[5, 9, 7]])) == [[5, 6]]


def test_all_accepted_emits_the_bonus():
    assert greedy_emission([[5, 6, 7, 8]], chain_of([[5, 6, 7]])) == [[5, 6, 7, 8]]


def test_ragged_rows_and_no_drafts():
    proposal = chain_of([[5, 6], [5, 6], [0, 0]], [[True, True], [True, False], [False, False]])
    best = [[5, 6, 7], [5, 6, 7], [0, 0, 0]]
    assert greedy_emission(best, proposal) == [[5, 6, 7], [5, 6], [0]]


def test_zero_length_drafts_sample_the_target():
    empty = chain_of(np.zeros((1, 0), np.int32), rule="chosen")
    verdict, _ = accept.chain(KEYS(1), one_hot_logs([[2]], 4), empty)
    assert (int(verdict.accepted_B[0]), int(verdict.token_B[0])) == (0, 2)


@pytest.mark.parametrize("rule", ["replacement", "block"])
def test_equal_laws_accept_everything_and_disjoint_laws_nothing(rule):
    judge = accept.block_chain if rule == "block" else accept.chain
    same = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (1, 4, 6)))
    tokens = jnp.argmax(same[:, :3], -1)
    verdict, _ = judge(KEYS(1), same, chain_of(tokens, log_q_BxRxV=same[:, :3], rule=rule))
    assert int(verdict.accepted_B[0]) == 3
    p, q = one_hot_logs([[1, 1, 1, 1]], 6), one_hot_logs([[2, 2, 2]], 6)
    verdict, _ = judge(KEYS(1), p, chain_of([[2, 2, 2]], log_q_BxRxV=q, rule=rule))
    assert (int(verdict.accepted_B[0]), int(verdict.token_B[0])) == (0, 1)


def test_a_token_is_not_emitted_after_its_rejection():
    """Zero residual mass: p = q up to rounding, yet the event said no."""

    class Refuse:
        def accept(self, probability):
            return jnp.zeros(probability.shape, bool), self

        def draw(self, log_weights):
            assert not jnp.isnan(log_weights).any()
            return jnp.argmax(log_weights, -1), self

    law = jnp.log(jnp.array([[[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]]))
    verdict, _ = accept.chain(Refuse(), law, chain_of([[0]], log_q_BxRxV=law[:, :1]))
    assert int(verdict.token_B[0]) == 1


def stream_law(p_V, q_V, children, rule):
    """Law of the token that follows the root when `children` candidates are drawn and tested."""
    size = len(p_V)
    tree = tree_of((-1,) * children)
    log_p = jnp.log(jnp.broadcast_to(p_V, (1, children + 1, size)))
    log_q = jnp.log(q_V)[None, None]

    def play(script):
        weights, tokens, live = jnp.log(q_V)[None], [], []
        for _ in range(children):
            token, script = script.draw(weights)
            tokens.append(token)
            live.append(weights.max(-1) > -jnp.inf)
            if rule == "without_replacement":
                weights = jnp.where(jnp.arange(size) == token[:, None], -jnp.inf, weights)
        proposal = Proposal(
            tokens_BxN=jnp.stack(tokens, 1),
            live_BxN=jnp.stack(live, 1),
            log_q_BxRxV=log_q,
            tree=tree,
            rule=rule,
        )
        verdict, script = walk.tree(script, log_p, proposal)
        return emitted(proposal, verdict)[0], jnp.int32(1), script

    return law_of(play, size)


EDGES = {
    "random": ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]),
    "support smaller than the children": ([0.1, 0.2, 0.3, 0.4], [0.6, 0.4, 0.0, 0.0]),
    "disjoint": ([0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 0.0, 0.0]),
    "equal": ([0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]),
    "peaked draft": ([0.4, 0.3, 0.2, 0.1], [1 - 1e-7, 4e-8, 4e-8, 2e-8]),
    "peaked both": ([1 - 1e-7, 5e-8, 5e-8, 0.0], [1 - 2e-7, 1e-7, 0.0, 1e-7]),
    "certain draft": ([0.4, 0.3, 0.2, 0.1], [0.0, 1.0, 0.0, 0.0]),
    "certain target": ([0.0, 1.0, 0.0, 0.0], [0.3, 0.3, 0.3, 0.1]),
}


@pytest.mark.parametrize("rule", ["replacement", "without_replacement"])
@pytest.mark.parametrize("edge", EDGES)
def test_siblings_are_lossless_at_the_edges(edge, rule):
    p, q = (jnp.array(x, jnp.float32) for x in EDGES[edge])
    law = stream_law(p, q, 3, rule)
    truth = {(i,): float(x) for i, x in enumerate(np.asarray(p / p.sum(), np.float64))}
    assert distance(law, truth) < 1e-6
    assert all(truth[token] > 0 for token, share in law.items() if share > 0)


@pytest.mark.parametrize("rule", ["replacement", "block"])
def test_a_peaked_chain_is_lossless(rule):
    """1 - q = 1e-7 at every position."""
    log_q = jnp.log(jnp.array([[[1 - 1e-7, 5e-8, 5e-8]] * 2], jnp.float32))
    log_p = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.2, 0.7, 0.1], [0.3, 0.3, 0.4]]]))
    judge = accept.block_chain if rule == "block" else accept.chain

    def play(script):
        first, script = script.draw(log_q[:, 0])
        second, script = script.draw(log_q[:, 1])
        proposal = chain_of(jnp.stack([first, second], 1), log_q_BxRxV=log_q, rule=rule)
        verdict, script = judge(script, log_p, proposal)
        return emitted(proposal, verdict)[0], verdict.accepted_B[0] + 1, script

    def following(tokens):
        return np.exp(np.asarray(log_p[0, len(tokens)], np.float64))

    law = complete(law_of(play, 3), following, 3)
    assert distance(law, complete({(): 1.0}, following, 3)) < 1e-6


def test_masked_tokens_are_never_emitted():
    """Half of both vocabularies is -inf; ten thousand rows."""
    rows, size = 10_000, 8
    logits = jax.random.normal(jax.random.key(3), (2, rows, 2, size))
    logits = jnp.where(jnp.arange(size) < 4, logits, -jnp.inf)
    log_p, log_q = jax.nn.log_softmax(logits)
    tokens, random = KEYS(rows).draw(log_q[:, 0])
    proposal = chain_of(tokens[:, None], log_q_BxRxV=log_q[:, :1])
    verdict, _ = jax.jit(accept.chain)(random, log_p, proposal)
    assert int(verdict.token_B.max()) < 4


def test_the_walk_needs_the_parent_before_the_child():
    """The grandchild matches, its parent does not."""
    proposal = chain_of([[3, 4, 5]], tree=tree_of((-1, -1, 0)), rule="chosen")
    verdict = accept.greedy_tree(jnp.array([[4, 5, 0, 0]]), proposal)
    assert (int(verdict.accepted_B[0]), int(verdict.path_BxP[0, 0])) == (1, 2)
    assert int(verdict.token_B[0]) == 0
