"""The law of what the runtime emits, enumerated through its own functions, is the target's."""

import jax.numpy as jnp
import pytest
from enumeration import distance, loop_law, round_law, table, true_law

from sdx.decoding.cascades import CascadeDrafter
from sdx.decoding.chains import ChainDrafter, NoDrafter
from sdx.decoding.confidence import TemperatureCalibration
from sdx.decoding.cross_vocabulary import CrossVocabulary
from sdx.decoding.ngram import NgramDrafter
from sdx.decoding.thresholds import ThresholdDrafter
from sdx.decoding.trees import DynamicTreeDrafter, StaticTreeDrafter
from sdx.records import Sampling

TARGET, SMALL, MEDIUM = table(0, 3), table(1, 3), table(2, 3)
# Draft ids of the target's three tokens; the target's token 1 is unknown to the draft.
FOREIGN = CrossVocabulary(
    model=table(5, 4),
    to_draft_V=jnp.array([2, 0, 3]),
    shared_V=jnp.array([True, False, True]),
)
TREE = (-1, -1, 0)
DRAFTERS = {
    "autoregressive": NoDrafter(),
    "chain": ChainDrafter(model=SMALL, lookahead=2),
    "block": ChainDrafter(model=SMALL, lookahead=2, rule="block"),
    "tree-replacement": StaticTreeDrafter(model=SMALL, parents=TREE, children="replacement"),
    "tree-without-replacement": StaticTreeDrafter(model=SMALL, parents=TREE),
    "tree-top": StaticTreeDrafter(model=SMALL, parents=TREE, children="top"),
    "tree-dynamic": DynamicTreeDrafter(model=SMALL, budget=3, depth=2, branching=2),
    "threshold-keep": ThresholdDrafter(model=SMALL, threshold=0.3, max_lookahead=2),
    "threshold-drop": ThresholdDrafter(
        model=SMALL,
        threshold=0.3,
        max_lookahead=2,
        crossing="drop",
        calibration=TemperatureCalibration(temperature=1.5),
    ),
    "ngram": NgramDrafter(lookahead=2, longest=2),
    "cross-vocabulary": ChainDrafter(model=FOREIGN, lookahead=2),
    "cascade": CascadeDrafter(model=MEDIUM, below=ChainDrafter(model=SMALL, lookahead=1), length=2),
    "cascade-threshold": CascadeDrafter(
        model=MEDIUM,
        below=ThresholdDrafter(model=SMALL, threshold=0.5, max_lookahead=1),
        length=2,
        threshold=0.6,
    ),
    "cascade-tree": CascadeDrafter(
        model=MEDIUM, below=StaticTreeDrafter(model=SMALL, parents=(-1, -1)), length=1
    ),
}
SAMPLINGS = {
    "greedy": Sampling(),
    "T0.7": Sampling(temperature=0.7),
    "top-k": Sampling(temperature=1.0, top_k=2),
    "top-p": Sampling(temperature=0.9, top_p=0.8),
}
PROMPT = (1, 2, 0, 1)  # its last token occurred before: the n-gram drafter has something to say


@pytest.mark.parametrize("policy", DRAFTERS)
def test_the_loop_emits_the_targets_law(policy):
    """Three tokens at temperature 1 through prompt, rounds and roll-backs."""
    sampling = Sampling(temperature=1.0)
    law = loop_law(TARGET, DRAFTERS[policy], sampling, PROMPT, 3)
    assert distance(law, true_law(TARGET, sampling, PROMPT, 3)) < 1e-6


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("policy", sorted(DRAFTERS.keys() - {"autoregressive", "cascade-tree"}))
def test_a_round_emits_the_targets_law(policy, sampling):
    """What one round emits, continued by the target, is the target's law at full length."""
    drafter, sampling = DRAFTERS[policy], SAMPLINGS[sampling]
    law = round_law(TARGET, drafter, sampling, PROMPT)
    length = drafter.height + 1
    continued = true_law(TARGET, sampling, PROMPT, length, given=law)
    assert distance(continued, true_law(TARGET, sampling, PROMPT, length)) < 1e-6


@pytest.mark.parametrize("rule", ["replacement", "block"])
@pytest.mark.parametrize("lookahead", [1, 3, 4])
def test_chains_of_every_length(rule, lookahead):
    drafter = ChainDrafter(model=SMALL, lookahead=lookahead, rule=rule)
    sampling = Sampling(temperature=0.8, top_p=0.95)
    law = round_law(TARGET, drafter, sampling, PROMPT)
    continued = true_law(TARGET, sampling, PROMPT, lookahead + 1, given=law)
    assert distance(continued, true_law(TARGET, sampling, PROMPT, lookahead + 1)) < 1e-6


def test_five_tokens_and_a_wide_tree():
    """Every child of the root without replacement, and a second generation."""
    target, draft, sampling = table(7, 5), table(8, 5), Sampling(temperature=1.0)
    drafter = StaticTreeDrafter(model=draft, parents=(-1, -1, -1))
    law = round_law(target, drafter, sampling, (1, 4))
    continued = true_law(target, sampling, (1, 4), 2, given=law)
    assert distance(continued, true_law(target, sampling, (1, 4), 2)) < 1e-6


def test_a_third_level():
    below = CascadeDrafter(model=MEDIUM, below=ChainDrafter(model=SMALL, lookahead=1), length=1)
    drafter = CascadeDrafter(model=table(3, 3), below=below, length=1)
    sampling = Sampling(temperature=1.0)
    law = round_law(TARGET, drafter, sampling, PROMPT)
    length = drafter.height + 1
    continued = true_law(TARGET, sampling, PROMPT, length, given=law)
    assert distance(continued, true_law(TARGET, sampling, PROMPT, length)) < 1e-6


def test_the_enumeration_sees_a_wrong_rule():
    """Children chosen by value but tested as if drawn: not lossless, and it shows."""

    class Mislabelled(StaticTreeDrafter):
        def propose(self, state, sequence, sampling, random):
            kind = {"model": self.model, "parents": self.parents}
            honest = StaticTreeDrafter(**kind).propose(state, sequence, sampling, random)
            chosen = StaticTreeDrafter(**kind, children="top")
            proposal, *rest = chosen.propose(state, sequence, sampling, random)
            fields = {**proposal.__dict__, "rule": "without_replacement"}
            fields |= {"log_q_BxRxV": honest[0].log_q_BxRxV, "tree": honest[0].tree}
            return type(proposal)(**fields), *rest

    sampling = Sampling(temperature=1.0)
    drafter = Mislabelled(model=SMALL, parents=(-1, -1))
    law = round_law(TARGET, drafter, sampling, PROMPT)
    continued = true_law(TARGET, sampling, PROMPT, 2, given=law)
    assert distance(continued, true_law(TARGET, sampling, PROMPT, 2)) > 1e-2
