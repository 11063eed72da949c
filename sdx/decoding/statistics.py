"""What happened, counted inside the compiled loop: no host sync.

Legend: base.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sdx.decoding.base import Proposal, Verdict
from sdx.decoding.confidence import BINS, bin_of
from sdx.records import record


@record
class Statistics:
    """Sums over the rounds of rows that were not finished.

    rounds_B: target passes per row. drafted_P, accepted_P: rounds in which position k was drafted,
    and was accepted (with all before it). offered_PxK, taken_PxK: at depth d + 1 below an accepted
    node, how often a child of rank r was a candidate, and was accepted (trees; a chain has K = 1).
    nodes_N: how often each node was accepted. candidates: nodes read by the target. tested_C,
    passed_C: drafts that the target came to test, and kept, by bin of raw confidence (only where
    the policy computes confidence).
    """

    rounds_B: jax.Array
    drafted_P: jax.Array
    accepted_P: jax.Array
    offered_PxK: jax.Array
    taken_PxK: jax.Array
    nodes_N: jax.Array
    candidates: jax.Array
    tested_C: jax.Array
    passed_C: jax.Array

    @classmethod
    def zeros(cls, batch: int, height: int, branching: int, nodes: int) -> Statistics:
        def zero(*shape):
            return jnp.zeros(shape, jnp.int32)

        return cls(
            rounds_B=zero(batch),
            drafted_P=zero(height),
            accepted_P=zero(height),
            offered_PxK=zero(height, branching),
            taken_PxK=zero(height, branching),
            nodes_N=zero(nodes),
            candidates=zero(),
            tested_C=zero(BINS),
            passed_C=zero(BINS),
        )

    def add(self, proposal: Proposal, verdict: Verdict, active_B: jax.Array) -> Statistics:
        """With one more round of the active rows."""
        B, P = verdict.path_BxP.shape
        live_BxN = proposal.live_BxN & active_B[:, None]
        reached_BxP = (jnp.arange(P) < verdict.accepted_B[:, None]) & active_B[:, None]
        accepted_P = self.accepted_P + reached_BxP.sum(0)
        base = self._replace(
            rounds_B=self.rounds_B + active_B,
            accepted_P=accepted_P,
            candidates=self.candidates + live_BxN.sum(),
        )
        if proposal.confidence_BxN is not None:
            bins_BxPxC = bin_of(proposal.confidence_BxN)[..., None] == jnp.arange(BINS)
            tested_BxP = (jnp.arange(P) <= verdict.accepted_B[:, None]) & live_BxN
            base = base._replace(
                tested_C=self.tested_C + (bins_BxPxC & tested_BxP[..., None]).sum((0, 1)),
                passed_C=self.passed_C + (bins_BxPxC & reached_BxP[..., None]).sum((0, 1)),
            )
        if proposal.tree is None:
            drafted_P = self.drafted_P + live_BxN.sum(0)
            parent_BxP = jnp.pad(reached_BxP[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            offered_P = (live_BxN & parent_BxP[:, :P]).sum(0)
            return base._replace(
                drafted_P=drafted_P,
                offered_PxK=self.offered_PxK + offered_P[:, None],
                taken_PxK=accepted_P[:, None],
                nodes_N=accepted_P,
            )
        tree, row_B = proposal.tree, jnp.arange(B)[:, None]
        depth_BxN = jnp.broadcast_to(tree.depths_XxM[:, 1:], live_BxN.shape)
        at_depth_BxPxN = depth_BxN[:, None, :] == jnp.arange(1, P + 1)[:, None]
        drafted_BxP = (at_depth_BxPxN & live_BxN[:, None, :]).any(-1)
        parent_BxP = jnp.pad(verdict.path_BxP[:, :-1], ((0, 0), (1, 0)))
        open_BxP = (jnp.arange(P) <= verdict.accepted_B[:, None]) & active_B[:, None]
        children = jnp.broadcast_to(tree.children_XxMxK, (B, *tree.children_XxMxK.shape[1:]))
        child_BxPxK = children[row_B, parent_BxP]
        live_BxM = jnp.pad(live_BxN, ((0, 0), (1, 0)))
        offered_BxPxK = (child_BxPxK > 0) & live_BxM[row_B[..., None], child_BxPxK]
        offered_BxPxK &= open_BxP[..., None]
        K = child_BxPxK.shape[-1]
        taken_BxPxK = (jnp.arange(K) == verdict.ranks_BxP[..., None]) & reached_BxP[..., None]
        N = live_BxN.shape[1]
        node_BxPxN = verdict.path_BxP[..., None] == jnp.arange(1, N + 1)
        return base._replace(
            drafted_P=self.drafted_P + drafted_BxP.sum(0),
            offered_PxK=self.offered_PxK + offered_BxPxK.sum(0),
            taken_PxK=self.taken_PxK + taken_BxPxK.sum(0),
            nodes_N=self.nodes_N + (node_BxPxN & reached_BxP[..., None]).sum((0, 1)),
        )

    def _replace(self, **fields) -> Statistics:
        return Statistics(**{**self.__dict__, **fields})
