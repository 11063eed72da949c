"""Trees and cascades: predicted against measured tokens per second on this machine.

    python -m experiments.predicted_trees [--prompts 12] [--pair DIR]

Step times come from single passes timed apart, acceptance (per depth and rank; per pair of models)
from calibration prompts. The models push each other's weights out of the cache, so a pass within a
round takes longer than one alone: by how much per pass of each model is fitted to chains and one
cascade, none of them predicted, decoded on the calibration prompts. Then other held-out prompts are
decoded greedily, batch 1, all configurations in turns. Trees are predicted by the path products of
theory.trees, cascades by the exact process of theory.cascades.

Expect: median |predicted / measured - 1| of tokens per second <= 15 % over all configurations.
Writes experiments/results/predicted_trees.json. About 3 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from experiments.greedy_identity import held_out_prompts, load_pair
from experiments.provenance import provenance
from sdx.decoding.generation import generate
from sdx.decoding.steps import pass_seconds
from sdx.decoding.trees import topology
from sdx.records import Cascade, Chain, StaticTree
from sdx.theory.cascades import cascade
from sdx.theory.trees import expected_tokens_of_tree

RESULT = Path(__file__).parent / "results" / "predicted_trees.json"
# The calibration tree holds every tree that is predicted: depth 3, two children everywhere.
WHOLE = (-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
TREES = ((-1,), (-1, -1), (-1, 0), (-1, -1, 0), (-1, -1, 0, 2), (-1, -1, 0, 0, 1, 2))
CASCADES = ((1, 1), (1, 2), (2, 2), (1, 3), (2, 3))
CALIBRATION_LOOKAHEADS, CALIBRATION_CASCADE = (1, 3), (3, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run."""

    pair: Path = Path("experiments/small_pair")
    prompts: int = 12
    prompt_tokens: int = 64
    new_tokens: int = 128
    seed: int = 2
    result: Path = RESULT


def measured_acceptance(target, small, medium, prompts, fixed) -> tuple[np.ndarray, list[float]]:
    """q[depth, rank] of the small draft's tree under the target, and the acceptance rates small by
    medium and medium by target, all from the same prompts."""
    offered = taken = 0
    for prompt in prompts:
        policy = StaticTree(parents=WHOLE, children="top")
        counts = generate(target, small, [prompt], policy, **fixed).statistics
        offered, taken = offered + counts.offered_PxK, taken + counts.taken_PxK
    rates = []
    for verifier, draft in ((medium, small), (target, medium)):
        accepted = drafted = 0
        for prompt in prompts:
            counts = generate(verifier, draft, [prompt], Chain(lookahead=1), **fixed).statistics
            accepted, drafted = accepted + counts.accepted_P[0], drafted + counts.drafted_P[0]
        rates.append(float(accepted / drafted))
    return np.asarray(taken / np.maximum(offered, 1)), rates


class Clock:
    """Seconds of a pass of so many tokens, each measured once, and what a pass of each model takes
    more in company (`more`, zero until fitted)."""

    def __init__(self, settings: Settings):
        self.capacity = -(-(settings.prompt_tokens + settings.new_tokens) // 32) * 32
        self.context = settings.prompt_tokens + settings.new_tokens // 2
        self.known: dict[tuple, float] = {}
        self.more: dict[int, float] = {}

    def __call__(self, model: Any, tokens: int, every_logit: bool = True) -> float:
        key = (id(model), tokens, every_logit)
        if key not in self.known:
            self.known[key] = float(
                np.median(
                    pass_seconds(
                        model, 1, tokens, self.context,
                        capacity=self.capacity, every_logit=every_logit, trials=9,
                    )
                )
            )  # fmt: skip
        return self.known[key] + self.more.get(id(model), 0.0)


def chain_seconds(lookahead, clock, target, draft) -> float:
    """Seconds of a chain's round: the first draft's pass also reads the token before."""
    drafting = clock(draft, 2, False) + (lookahead - 1) * clock(draft, 1, False)
    return drafting + clock(target, lookahead + 1)


def predict_tree(parents, q, clock, target, draft) -> float:
    """Tokens per second: the target reads root and nodes, the draft one level after the other."""
    shape = topology(parents)
    inner = (shape["children"] > 0).any(1)
    levels = [int((inner & (shape["depths"] == d)).sum()) for d in range(shape["depths"].max())]
    drafting = clock(draft, 2, False) + sum(clock(draft, width) for width in levels[1:])
    tokens = float(expected_tokens_of_tree(parents, q))
    return tokens / (clock(target, len(parents) + 1) + drafting)


def cascade_round(lengths, rates, clock, target, small, medium) -> tuple[float, float]:
    """(tokens, seconds) of a round: every pass of the two drafters also reads one or two known
    tokens."""
    k, held = lengths
    # The smallest model's k passes as one cost per token; the next reads two known tokens and k.
    first = (clock(small, 2, False) + (k - 1) * clock(small, 1, False)) / k
    costs = [first, clock(medium, k + 2), clock(target, held + k + 1)]
    outcome = cascade(rates, costs, lengths)
    return float(outcome.tokens), float(outcome.cost)


def fit_company(target, small, medium, rates, prompts, clock, fixed) -> None:
    """Fits `clock.more`: extra seconds per pass of each model, by least relative squares over
    decoded rounds. How often a model runs in a round is the growth of the round's predicted
    seconds with the model's pass."""
    models = (small, medium, target)
    runs = [
        (Chain(lookahead=g), draft, lambda g=g, d=draft: chain_seconds(g, clock, target, d))
        for draft in (small, medium)
        for g in CALIBRATION_LOOKAHEADS
    ]
    lengths = CALIBRATION_CASCADE
    fixed_cascade = lambda: cascade_round(lengths, rates, clock, target, small, medium)[1]  # noqa: E731
    runs.append((Cascade(lengths=lengths), [small, medium], fixed_cascade))
    rows, rest = [], []
    for policy, drafter, predicted in runs:
        generate(target, drafter, prompts[:1], policy, **fixed)  # compiles
        found = [generate(target, drafter, [prompt], policy, **fixed) for prompt in prompts]
        seconds = sum(f.seconds for f in found) / sum(int(f.rounds) for f in found)
        alone, passes = predicted(), []
        for model in models:
            clock.more = {id(model): 1.0}
            passes.append(predicted() - alone)
            clock.more = {}
        rows.append(np.asarray(passes) / seconds)
        rest.append(1 - alone / seconds)
    more = np.linalg.lstsq(np.asarray(rows), np.asarray(rest))[0]
    clock.more = {id(model): float(m) for model, m in zip(models, more, strict=True)}


def main(settings: Settings) -> dict[str, Any]:
    """Calibrates, predicts, measures, writes the result."""
    target, small, medium, tokenizer = load_pair(settings.pair)
    count = settings.prompts
    both = held_out_prompts(tokenizer, 2 * count, settings.prompt_tokens, settings.seed)
    fixed = {"max_new_tokens": settings.new_tokens, "stop_ids": ()}
    q, rates = measured_acceptance(target, small, medium, both[:count], fixed)
    clock, drafts = Clock(settings), [small, medium]
    fit_company(target, small, medium, rates, both[:count], clock, fixed)
    runs = {}
    for parents in TREES:
        policy = StaticTree(parents=parents, children="top")
        runs[f"tree {parents}"] = (policy, small, predict_tree(parents, q, clock, target, small))
    for lengths in CASCADES:
        tokens, seconds = cascade_round(lengths, rates, clock, target, small, medium)
        runs[f"cascade {lengths}"] = (Cascade(lengths=lengths), drafts, tokens / seconds)
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    per_round: dict[str, list[float]] = {name: [] for name in runs}
    rng = np.random.default_rng(settings.seed)
    for policy, drafter, _ in runs.values():
        generate(target, drafter, both[:1], policy, **fixed)  # compiles
    for prompt in both[count:]:
        for name in rng.permutation(list(runs)):
            policy, drafter, _ = runs[name]
            result = generate(target, drafter, [prompt], policy, **fixed)
            speeds[name].append((settings.new_tokens - 1) / result.seconds)
            per_round[name].append((settings.new_tokens - 1) / result.rounds)
    rows = {}
    for name, (_, _, predicted) in runs.items():
        # Tokens over seconds of all prompts: the harmonic mean of equal numbers of tokens.
        measured = float(1 / np.mean(1 / np.array(speeds[name])))
        rows[name] = {
            "predicted_tokens_per_second": predicted,
            "measured_tokens_per_second": measured,
            "error": predicted / measured - 1,
            "measured_tokens_per_round": float(1 / np.mean(1 / np.array(per_round[name]))),
        }
        print(f"{name:28} {predicted:7.0f} predicted {measured:7.0f} measured", flush=True)
    errors = [abs(row["error"]) for row in rows.values()]
    result = {
        "provenance": provenance(settings.seed),
        "acceptance_by_depth_and_rank": q.tolist(),
        "acceptance_rates": rates,
        "more_seconds_per_pass": dict(
            zip(("draft_small", "draft_medium", "target"), clock.more.values(), strict=True)
        ),
        "configurations": rows,
        "median_error": float(np.median(errors)),
        "largest_error": float(np.max(errors)),
    }
    settings.result.parent.mkdir(parents=True, exist_ok=True)
    settings.result.write_text(json.dumps(result, indent=1) + "\n")
    print(f"median error {result['median_error']:.3f}, largest {result['largest_error']:.3f}")
    return result


if __name__ == "__main__":
    main(tyro.cli(Settings))
