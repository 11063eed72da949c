"""What the parts of a round say to each other.

One round of speculative decoding (gamma = 3 drafts, 2 accepted):

    known     ... the cat            sequence: every token but the last is in the target's cache
                      |
    propose           +-- sat -- on -- a            Drafter.propose -> Proposal (a chain or a tree)
                      |
    read      p1     p2     p3    p4                one target pass over the last token and drafts
                      |
    accept            sat   on   x                  accept.py -> Verdict(accepted = 2, token: the)
                      |
    commit    ... the cat  sat  on  the             both caches keep the accepted path only

The loop (loop.py) knows no algorithm: a policy becomes a drafter here, and the rule by which its
candidates came to be decides how they are tested. Legend: B rows, L slots of the token buffer,
N drafted nodes, M = N + 1 nodes with the root, P height of the tree, K children, V vocabulary,
R stored draft laws.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import jax

from sdx.decoding.random import RandomSource
from sdx.records import Sampling, record, static

Rule = Literal["replacement", "without_replacement", "chosen", "block"]


@record
class Sequence:
    """The tokens known so far, prompts included; row b holds `lengths_B[b]` of L slots."""

    tokens_BxL: jax.Array
    lengths_B: jax.Array


@record
class Tree:
    """Topology of N drafted nodes, numbered 1 .. N below the root 0; X is B, or 1 if all rows
    share it. Nodes are in topological order and siblings in the order in which they are tested.

    children_XxMxK: node numbers, -1 where there is none. depths_XxM: the root has 0.
    ancestors_XxMxM: true where a node (row) sees a node (column), itself included.
    law_M: which stored draft law the children of a node were drawn from (unused if chosen).
    """

    children_XxMxK: jax.Array
    depths_XxM: jax.Array
    ancestors_XxMxM: jax.Array
    law_M: jax.Array
    height: int = static(default=1)


@record
class Proposal:
    """Candidates of one round.

    tokens_BxN; live_BxN: false where nothing was drafted (a chain that stopped, a child beyond
    the support of its law). log_q_BxRxV: the laws that the candidates were drawn from, -inf where
    impossible and unnormalised where a token-dependent test dropped some mass; None if they were
    chosen by value, or under greedy decoding. dropped_B: a token was drawn after the last live
    one and dropped by that test. confidence_BxN: raw confidences, where the policy computed them.
    tree: None is a chain.
    `rule`: how siblings came to be, which decides the lossless test (accept.py).
    """

    tokens_BxN: jax.Array
    live_BxN: jax.Array
    log_q_BxRxV: jax.Array | None = None
    dropped_B: jax.Array | None = None
    confidence_BxN: jax.Array | None = None
    tree: Tree | None = None
    rule: Rule = static(default="replacement")


@record
class Verdict:
    """What the target made of a proposal.

    accepted_B nodes; path_BxP their numbers and ranks_BxP their ranks among siblings (entries from
    `accepted` on are meaningless); token_B, the target's own token after them.
    """

    accepted_B: jax.Array
    path_BxP: jax.Array
    ranks_BxP: jax.Array
    token_B: jax.Array


class Cache(Protocol):
    """Committed context of a model; row b holds `lengths_B[b]` tokens."""

    lengths_B: jax.Array

    def commit(self, fresh: Any, path_BxP: jax.Array, counts_B: jax.Array) -> Cache:
        """Appends fresh tokens `path_BxP[b, :counts_B[b]]` to row b."""
        ...

    def rollback(self, lengths_B: jax.Array) -> Cache:
        """The same cache with shorter rows; costs nothing."""
        ...


class Target(Protocol):
    """A language model that reads T tokens (a chain, or a tree under a mask) after a cache.

    A pytree: it is an argument of the compiled loop. Models of drafters satisfy it too.
    """

    @property
    def vocab_size(self) -> int: ...

    def empty_cache(self, batch: int, capacity: int) -> Any: ...

    def __call__(
        self,
        tokens_BxT: jax.Array,
        cache: Any,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        pending: Any = None,
        last: int | None = None,
    ) -> Any:
        """An output with `logits_BxTxV` and `fresh` (what `commit` of the cache takes); a target
        that draft heads draft for adds its features, `hidden_BxTxD` and `layers`.

        `pending`: fresh of earlier passes that are not committed; then `mask` is
        `[T, pending + T]` or `[B, T, pending + T]`. `last`: logits of the last so many tokens
        only; None is all T.
        """
        ...

    def join(self, parts: list[Any]) -> Any:
        """Fresh of several passes as one, in order."""
        ...

    def pad(self, fresh: Any, tokens: int) -> Any:
        """Fresh of T tokens, padded to so many; the padding is never committed."""
        ...


class Drafter(Protocol):
    """Where candidates come from. A pytree; what it learns of the context is its state."""

    height: int  # P, the longest path it can propose
    branching: int  # K, the most children of a node
    nodes: int  # N, candidates per round
    ragged: bool  # a chain that is often shorter than N: worth a pass of fitting width
    least: int  # of a ragged drafter: drafts that every unfinished row has

    def prepare(
        self, sequence: Sequence, prompt_slots: int, capacity: int, reading: Any = None
    ) -> Any:
        """State after the prompts; all of a prompt lies in the first `prompt_slots` slots.
        `reading`: the target's output for them (draft heads need its features)."""
        ...

    def propose(
        self, state: Any, sequence: Sequence, sampling: Sampling, random: RandomSource
    ) -> tuple[Proposal, Any, RandomSource]:
        """Candidates for the tokens after `sequence`."""
        ...

    def commit(self, state: Any, proposal: Proposal, verdict: Verdict, reading: Any = None) -> Any:
        """The state for the next round. `reading`: the target's output for root and nodes."""
        ...
