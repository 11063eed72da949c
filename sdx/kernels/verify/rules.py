"""Which drafts to keep and what to emit after them, through the streams of `api.py` alone.

Target rows are b * M + node (M = N + 1 nodes, the root first), draft rows b * R + law. A row's
probabilities are read where a decision needs them: p and q of the drafted tokens by gather, sums
by one streamed pass over one row, the emitted token by one more.

The rules are those of the runtime's dense forms: candidates drawn from q ("replacement",
"without_replacement"), chosen by value ("chosen"), block verification ("block"; Sun et al. 2024).
With R the refused siblings of a node and c its constant, the residual is (p - c q)+ outside R:
c_0 = 0, c_{j+1} = c_j + S_j / (undrawn q mass), S_0 = 1.

A source of randomness has `accept(probability_BxK) -> (bool_BxK, source)` and
`seeds() -> (uint32_Bx2, source)`. One without `seeds` is a substitute (a proof walks through all
answers): it gets the log-weights that the streams see, by `draw(log_weights_BxV)`.

Legend: B rows, N drafts, M = N + 1, V vocabulary, K children.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sdx.kernels.verify.laws import Law, Request

NONE = -1  # no excluded token


def chain(
    stream: Callable,
    random: Any,
    target: Law,
    draft: Law | None,
    tokens_BxN,
    live_BxN,
    dropped_B=None,
    rule: str = "replacement",
):
    """A chain, token by token or as a block: (accepted_B, token_B, source).

    stream: `api.surplus` with its implementation bound. draft: None where chosen by value.
    live_BxN: false from where drafting stopped. dropped_B: a token-dependent test dropped the
    token after the last live one (draft rows then hold what the test lets through).
    """
    B, N = tokens_BxN.shape
    rows_BxM = _rows(target, B)
    one_B, none_Bx1 = jnp.ones((B,)), jnp.full((B, 1), NONE, jnp.int32)
    if N == 0:
        request = _request(rows_BxM[:, 0], None, one_B, 0 * one_B, none_Bx1)
        token_B, random = _after(stream, random, target, None, request)
        return jnp.zeros((B,), jnp.int32), token_B, random
    log_p_BxN = target.log_probability(rows_BxM[:, :N], tokens_BxN)
    if rule == "chosen":
        log_ratio_BxN = log_p_BxN
    else:
        laws_BxR = _rows(draft, B)
        log_q_BxN = draft.log_probability(laws_BxR[:, :N], tokens_BxN)
        # q = 0: such a token cannot have been drawn.
        log_ratio_BxN = jnp.where(log_q_BxN > -jnp.inf, log_p_BxN - log_q_BxN, -jnp.inf)
    drafted_B = live_BxN.sum(-1)
    scale_BxM = jnp.ones((B, N + 1))
    if rule == "block":
        scale_BxM, happens_BxN = _block(stream, target, draft, log_ratio_BxN, drafted_B)
        happens_BxN, random = random.accept(happens_BxN)
        accepted_B = jnp.max(jnp.where(happens_BxN, jnp.arange(1, N + 1), 0), axis=1)
    else:
        keep_BxN = jnp.exp(jnp.minimum(log_ratio_BxN, 0.0))
        kept_BxN, random = random.accept(jnp.where(live_BxN, keep_BxN, 0.0))
        accepted_B = jnp.cumprod((kept_BxN & live_BxN).astype(jnp.int32), -1).sum(-1)
    at_B = jnp.minimum(accepted_B, N - 1)[:, None]
    refused_B = accepted_B < drafted_B
    first_Bx1 = jnp.take_along_axis(tokens_BxN, at_B, axis=1)
    # A block may fail although this token alone would have passed: nothing is excluded there.
    excluded_Bx1 = jnp.where(refused_B[:, None] & (rule != "block"), first_Bx1, NONE)
    subtract_B = refused_B if dropped_B is None else refused_B | dropped_B
    row_B = jnp.take_along_axis(rows_BxM, accepted_B[:, None], axis=1)[:, 0]
    if rule == "chosen":
        draft, law_B, c_B, weight_B = None, None, one_B * 0, one_B
    else:
        law_B = jnp.take_along_axis(laws_BxR, at_B, axis=1)[:, 0]
        scale_B = jnp.take_along_axis(scale_BxM, accepted_B[:, None], axis=1)[:, 0]
        c_B, weight_B = subtract_B.astype(jnp.float32), jnp.where(subtract_B, scale_B, 1.0)
    request = _request(row_B, law_B, weight_B, c_B, excluded_Bx1)
    token_B, random = _after(stream, random, target, draft, request)
    return accepted_B, token_B, random


def _block(stream, target, draft, log_ratio_BxN, drafted_B):
    """Prefix weights pi_BxM and the probabilities h_BxN of block verification."""
    B, N = log_ratio_BxN.shape
    steps, pi_BxM = [jnp.zeros((B,))], None
    for i in range(N):
        steps.append(jnp.minimum(0.0, steps[-1] + log_ratio_BxN[:, i]))
    pi_BxM = jnp.exp(jnp.stack(steps, axis=1))
    pi_BxN = pi_BxM[:, 1:]
    happens_BxN = pi_BxN
    if N > 1:
        inner = _rows(target, B)[:, 1:N], _rows(draft, B)[:, 1:N]
        count = B * (N - 1)
        request = Request(
            inner[0].reshape(-1),
            inner[1].reshape(-1),
            pi_BxN[:, : N - 1].reshape(-1),
            jnp.ones((count,)),
            jnp.full((count, 1), NONE, jnp.int32),
        )
        s_BxI = stream(target, draft, request).mass_N.reshape(B, N - 1)
        rest_BxI = s_BxI + (1 - pi_BxN[:, : N - 1])
        h_BxI = jnp.where(rest_BxI > 0, s_BxI / jnp.where(rest_BxI > 0, rest_BxI, 1.0), 1.0)
        last_BxI = jnp.arange(1, N) == drafted_B[:, None]
        h_BxI = jnp.where(last_BxI, pi_BxN[:, : N - 1], h_BxI)
        happens_BxN = jnp.concatenate([h_BxI, pi_BxN[:, N - 1 :]], axis=1)
    live_BxN = jnp.arange(1, N + 1) <= drafted_B[:, None]
    return pi_BxM, jnp.where(live_BxN, happens_BxN, 0.0)


class _Walk(NamedTuple):
    """Where the walks down the trees stand. `c_B`, `excluded_BxK`: of the residual at the current
    node; `stopped_B` once a node refused all its children."""

    node_B: jax.Array
    stopped_B: jax.Array
    c_B: jax.Array
    excluded_BxK: jax.Array
    accepted_B: jax.Array
    path_BxP: jax.Array
    ranks_BxP: jax.Array
    random: Any


def tree(
    stream: Callable,
    random: Any,
    target: Law,
    draft: Law | None,
    tokens_BxM,
    live_BxM,
    children_BxMxK,
    law_M,
    height: int,
    rule: str = "without_replacement",
):
    """The accepted path of a tree: (accepted_B, path_BxP, ranks_BxP, token_B, source).

    Siblings are tested in order; an accepted child is the next node. children_BxMxK: node numbers,
    -1 where there is none; node 0 is the root. law_M: draft law of each node's children.
    """
    B, _, K = children_BxMxK.shape
    rows_BxM, b = _rows(target, B), jnp.arange(B)
    laws_BxR = None if draft is None else _rows(draft, B)

    def residual(walk):
        law_B = None if draft is None else laws_BxR[b, law_M[walk.node_B]]
        row_B = rows_BxM[b, walk.node_B]
        return _request(row_B, law_B, jnp.ones((B,)), walk.c_B, walk.excluded_BxK)

    def descend(depth, walk):
        child_BxK = children_BxMxK[b, walk.node_B]
        token_BxK, live_BxK = tokens_BxM[b[:, None], child_BxK], live_BxM[b[:, None], child_BxK]
        live_BxK &= (child_BxK > 0) & ~walk.stopped_B[:, None]
        moved_B, rank_B, left, random = _first_kept(
            stream, walk.random, target, draft, residual(walk), token_BxK, live_BxK, rule
        )
        node_B = jnp.where(moved_B, child_BxK[b, rank_B], walk.node_B)
        return _Walk(
            node_B=node_B,
            stopped_B=~moved_B,
            c_B=jnp.where(moved_B, 0.0, left.c_N),
            excluded_BxK=jnp.where(moved_B[:, None], NONE, left.excluded_NxK),
            accepted_B=walk.accepted_B + moved_B,
            path_BxP=walk.path_BxP.at[:, depth].set(node_B),
            ranks_BxP=walk.ranks_BxP.at[:, depth].set(rank_B),
            random=random,
        )

    zeros_B, zeros_BxP = jnp.zeros((B,), jnp.int32), jnp.zeros((B, height), jnp.int32)
    walk = _Walk(
        node_B=zeros_B,
        stopped_B=jnp.zeros((B,), bool),
        c_B=jnp.zeros((B,)),
        excluded_BxK=jnp.full((B, K), NONE, jnp.int32),
        accepted_B=zeros_B,
        path_BxP=zeros_BxP,
        ranks_BxP=zeros_BxP,
        random=random,
    )
    walk = jax.lax.fori_loop(0, height, descend, walk)
    token_B, random = _after(stream, walk.random, target, draft, residual(walk))
    return walk.accepted_B, walk.path_BxP, walk.ranks_BxP, token_B, random


def _first_kept(stream, random, target, draft, residual, token_BxK, live_BxK, rule):
    """Tests siblings in order: (whether one was kept, its rank or 0, the residual after those
    refused, source)."""
    B, K = token_BxK.shape
    found_B, rank_B = jnp.zeros((B,), bool), jnp.zeros((B,), jnp.int32)
    for rank in range(K):
        token_B, tested_B = token_BxK[:, rank], live_BxK[:, rank] & ~found_B
        mass_B = undrawn_B = jnp.ones((B,))
        if rank > 0:  # before, nothing is refused yet: both are 1
            mass_B, undrawn_B = _sums(stream, target, draft, residual, tested_B, rule)
        keep_B = _keep_probability(target, draft, residual, token_B, mass_B, undrawn_B, rule)
        kept_Bx1, random = random.accept(jnp.where(tested_B, keep_B, 0.0)[:, None])
        kept_B = kept_Bx1[:, 0] & tested_B
        refused_B = tested_B & ~kept_B
        c_B, excluded_BxK = residual.c_N, residual.excluded_NxK
        if rule != "chosen":
            step_B = mass_B / jnp.where(undrawn_B > 0, undrawn_B, 1.0)
            c_B = jnp.where(refused_B, c_B + step_B, c_B)
        refused = jnp.where(refused_B, token_B, excluded_BxK[:, rank])
        residual = residual._replace(c_N=c_B, excluded_NxK=excluded_BxK.at[:, rank].set(refused))
        rank_B = jnp.where(kept_B, rank, rank_B)
        found_B |= kept_B
    return found_B, rank_B, residual, random


def _sums(stream, target, draft, residual, tested_B, rule):
    """(S or what is left of p, undrawn q); streamed only where some row is tested."""
    one_B = jnp.ones(tested_B.shape)

    def streamed():
        found = stream(target, draft, residual)
        # Undrawn: a sum over what is left, never 1 - Q: near Q = 1 the difference has no digits.
        return found.mass_N, found.undrawn_N if rule == "without_replacement" else one_B

    return jax.lax.cond(tested_B.any(), streamed, lambda: (one_B, one_B))


def _keep_probability(target, draft, residual, token_B, mass_B, undrawn_B, rule):
    """Probability to keep a child; 0 for one that its law cannot have produced."""
    p_B = jnp.exp(target.log_probability(residual.target_rows_N, token_B))
    if rule == "chosen":
        own_B, q_B = p_B, jnp.ones(p_B.shape)
    else:
        q_B = jnp.exp(draft.log_probability(residual.draft_rows_N, token_B))
        own_B = jnp.maximum(p_B - residual.c_N * q_B, 0.0)
    refused_before = (residual.excluded_NxK == token_B[:, None]).any(-1)
    sound_B = (mass_B > 0) & (q_B > 0) & (undrawn_B > 0) & ~refused_before
    ratio_B = own_B * (undrawn_B / jnp.where(sound_B, q_B, 1.0))
    ratio_B = ratio_B / jnp.where(sound_B, mass_B, 1.0)
    return jnp.where(sound_B, jnp.minimum(ratio_B, 1.0), 0.0)


def _after(stream, random, target, draft, request):
    """A token from the surplus; where it vanishes (rounding), from p without the refused tokens;
    where even that does, the likeliest (an event without probability)."""
    best_B = target.best_R[request.target_rows_N]

    def choose(found, surplus_value, left_value, best_value):
        some, left = found.mass_N > 0, found.left_N > 0
        if surplus_value.ndim > 1:
            some, left = some[:, None], left[:, None]
        return jnp.where(some, surplus_value, jnp.where(left, left_value, best_value))

    if hasattr(random, "seeds"):
        seeds_Bx2, random = random.seeds()
        found = stream(target, draft, request, seeds_Nx2=seeds_Bx2)
        return choose(found, found.token_N, found.left_token_N, best_B), random
    found, weights_BxV, left_BxV = log_weights(stream, target, draft, request)
    only_best = jnp.where(jnp.arange(weights_BxV.shape[1]) == best_B[:, None], 0.0, -jnp.inf)
    return random.draw(choose(found, weights_BxV, left_BxV, only_best))


def log_weights(stream, target, draft, request):
    """The law that a draw samples from, as the stream itself sees it: (sums, ln r, ln p), [N, V].

    Token x's log-weight is the best score when the noise is 0 at x and hides everything else.
    For proofs over small vocabularies: V passes.
    """
    n, v = len(request.c_N), target.logits_RxV.shape[1]
    hidden = -1e28  # below every logarithm of a float32, far above ln of an impossible token

    def only(token):
        noise_NxV = jnp.full((n, v), hidden).at[:, token].set(0.0)
        found = stream(target, draft, request, noise_NxV=noise_NxV)
        real = lambda s: jnp.where(s > hidden / 2, s, -jnp.inf)  # noqa: E731
        return found, real(found.score_N), real(found.left_score_N)

    found, weights_VxN, left_VxN = jax.lax.map(only, jnp.arange(v))
    return jax.tree.map(lambda x: x[0], found), weights_VxN.T, left_VxN.T


def _request(row_B, law_B, weight_B, c_B, excluded_BxK) -> Request:
    law_B = jnp.zeros_like(row_B) if law_B is None else law_B
    return Request(row_B, law_B, weight_B, c_B, excluded_BxK)


def _rows(law: Law, batch: int):
    """Row numbers `[B, rows per sequence]` of a law."""
    return jnp.arange(law.logits_RxV.shape[0], dtype=jnp.int32).reshape(batch, -1)
