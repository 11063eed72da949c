"""The law of what the loop emits with tiny draft heads, enumerated, is the target's."""

import jax
import jax.numpy as jnp
import pytest
from enumeration import distance, loop_law, round_law, table, true_law

from sdx.decoding.heads import HeadModel
from sdx.decoding.policies import build_drafter
from sdx.decoding.table import TableModel
from sdx.models.config import ModelConfig
from sdx.models.heads import HeadConfig, create_head
from sdx.models.llama import TargetParts
from sdx.records import Chain, DynamicTree, Sampling, StaticTree, record


@record
class TableReading:
    logits_BxTxV: jax.Array
    fresh: object
    hidden_BxTxD: jax.Array
    layers: tuple


@record
class FeatureTable:
    """A table model with features: a linear map of its logits, hence of the last two tokens."""

    table: TableModel
    map_VxD: jax.Array

    vocab_size = 3

    def empty_cache(self, batch, capacity):
        return self.table.empty_cache(batch, capacity)

    def __call__(self, *arguments, **named):
        output = self.table(*arguments, **named)
        hidden = output.logits_BxTxV @ self.map_VxD
        return TableReading(
            logits_BxTxV=output.logits_BxTxV,
            fresh=output.fresh,
            hidden_BxTxD=hidden,
            layers=(hidden, -hidden, jnp.tanh(hidden)),
        )


TINY = ModelConfig(
    vocab_size=3, width=4, layers=3, heads=1, kv_heads=1, head_dim=4, ffn_width=4, max_positions=32
)
TABLE = FeatureTable(
    table=table(0, 3), map_VxD=jax.random.normal(jax.random.key(5), (3, 4), jnp.float32)
)
PARTS = TargetParts(
    embedding_VxD=jax.random.normal(jax.random.key(6), (3, 4)),
    head_DxV=jax.random.normal(jax.random.key(7), (4, 3)),
)
TINY_HEADS = {
    "eagle": {"kind": "eagle"},
    "eagle3": {"kind": "eagle3", "kept": (0, 2)},
    "poss": {"kind": "poss", "specialists": 2, "positions_per_specialist": 1},
    "medusa": {"kind": "medusa", "steps": 2, "own_head": True},
}
TINY_POLICIES = {
    "chain": Chain(lookahead=2),
    "static": StaticTree(parents=(-1, -1, 0)),
    "dynamic": DynamicTree(budget=3, depth=2, branching=2),
}
WARM = Sampling(temperature=1.0)


def tiny_drafter(head, policy):
    config = HeadConfig.for_target(TINY, **TINY_HEADS[head])
    head = create_head(config, jax.random.key(8))
    return build_drafter(policy, HeadModel(head=head, parts=PARTS))


@pytest.mark.parametrize("policy", TINY_POLICIES)
@pytest.mark.parametrize("head", TINY_HEADS)
def test_the_loop_emits_the_targets_law(head, policy):
    """Three tokens at temperature 1 through prompt, rounds and settled features."""
    law = loop_law(TABLE, tiny_drafter(head, TINY_POLICIES[policy]), WARM, (1, 2, 0), 3)
    assert distance(law, true_law(TABLE.table, WARM, (1, 2, 0), 3)) < 1e-6


@pytest.mark.parametrize("children", ["replacement", "top"])
def test_parallel_heads_in_other_trees(children):
    """Medusa's drafts of one depth share a law but not their draws."""
    drafter = tiny_drafter("medusa", StaticTree(parents=(-1, -1, 0, 1), children=children))
    law = round_law(TABLE, drafter, WARM, (1, 2, 0))
    continued = true_law(TABLE.table, WARM, (1, 2, 0), 3, given=law)
    assert distance(continued, true_law(TABLE.table, WARM, (1, 2, 0), 3)) < 1e-6
