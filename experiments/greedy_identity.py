"""Greedy decoding under every policy against autoregression, token by token.

    python -m experiments.greedy_identity [--prompts 50] [--new-tokens 256] [--pair DIR]

Held-out prompts, float32, batch 1 and 4 (the batch of 4 is compared with batch 1, so it also shows
that neighbours do not change a row). Passes over one and over several tokens sum in different
orders, so a near-tie of the two best logits (gap < 1e-4 at the first difference) may fall the
other way: such rows are counted apart, anything else is a failure.

Expect: no failure; no or a few near-ties. Writes experiments/results/greedy_identity.json. About
6 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tyro
from tokenizers import Tokenizer

from experiments.provenance import provenance
from sdx.decoding.cross_vocabulary import CrossVocabulary
from sdx.decoding.generation import generate
from sdx.decoding.llama_target import as_target
from sdx.decoding.ngram import NgramDrafter
from sdx.models.checkpoint import load_model
from sdx.records import (
    Autoregressive,
    Cascade,
    Chain,
    DynamicTree,
    Policy,
    StaticTree,
    ThresholdChain,
)
from sdx.training import corpus

NEAR_TIE = 1e-4
RESULT = Path(__file__).parent / "results" / "greedy_identity.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run."""

    pair: Path = Path("experiments/small_pair")
    """Folder with target/, draft_small/, draft_medium/ and tokenizer.json."""
    prompts: int = 50
    prompt_tokens: int = 64
    new_tokens: int = 256
    batches: tuple[int, ...] = (1, 4)
    seed: int = 0
    result: Path = RESULT


def load_pair(folder: Path) -> tuple[Any, Any, Any, Tokenizer]:
    """Target, small draft, medium draft (laid out for small steps), tokenizer."""
    names = ("target", "draft_small", "draft_medium")
    models = [as_target(load_model(folder / name)[0]) for name in names]
    return (*models, Tokenizer.from_file(str(folder / "tokenizer.json")))


def held_out_prompts(tokenizer: Tokenizer, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Windows of held-out text at random places."""
    text = corpus.tokenise(tokenizer, corpus.texts("held_out"))
    starts = np.random.default_rng(seed).integers(0, len(text) - tokens, count)
    return [text[start : start + tokens].tolist() for start in starts]


def foreign(draft: Any, seed: int) -> CrossVocabulary:
    """The same draft behind another vocabulary: ids shuffled, one token in ten not shared."""
    rng, size = np.random.default_rng(seed), draft.vocab_size
    shared = rng.random(size) > 0.1
    shared[:1] = True
    # The draft's embedding is not shuffled: an id map that is the identity on shared tokens and
    # the unknown token elsewhere has the same effect on the law as shuffling both.
    to_draft = np.where(shared, np.arange(size), 0).astype(np.int32)
    return CrossVocabulary(
        model=draft, to_draft_V=jnp.asarray(to_draft), shared_V=jnp.asarray(shared)
    )


def policies(small: Any, medium: Any, seed: int) -> dict[str, tuple[Policy, Any]]:
    """Name -> policy and what drafts for it."""
    tree = (-1, -1, 0, 0, 2)
    return {
        "chain": (Chain(lookahead=3), small),
        "block": (Chain(lookahead=3, verification="block"), medium),
        "tree": (StaticTree(parents=tree, children="without_replacement"), small),
        "tree-dynamic": (DynamicTree(budget=6, depth=3, branching=2), small),
        "threshold-keep": (ThresholdChain(threshold=0.4, max_lookahead=6), small),
        "threshold-drop": (
            ThresholdChain(threshold=0.4, max_lookahead=6, crossing="drop"),
            small,
        ),
        "cascade": (Cascade(lengths=(1, 2)), [small, medium]),
        "cascade-threshold": (Cascade(thresholds=(0.6, 0.4)), [small, medium]),
        "ngram": (Chain(), NgramDrafter(lookahead=4)),
        "cross-vocabulary": (Chain(lookahead=2), foreign(small, seed)),
    }


def gap_after(target: Any, tokens: list[int]) -> float:
    """Gap between the two best logits after these tokens."""
    output = target(jnp.array([tokens]), target.empty_cache(1, 1))
    best = np.sort(np.asarray(output.logits_BxTxV[0, -1]))[-2:]
    return float(best[1] - best[0])


def compare(target: Any, prompts, reference, tokens) -> dict[str, Any]:
    """Identical rows, near-ties, and everything else."""
    near, failures, identical = [], [], 0
    for i, (prompt, expected, row) in enumerate(zip(prompts, reference, tokens, strict=True)):
        if row == expected:
            identical += 1
            continue
        at = next((j for j, (a, b) in enumerate(zip(row, expected, strict=False)) if a != b), None)
        gap = float("inf") if at is None else gap_after(target, prompt + expected[:at])
        (near if gap < NEAR_TIE else failures).append({"prompt": i, "position": at, "gap": gap})
    return {"identical": identical, "near_ties": near, "failures": failures}


def main(settings: Settings) -> dict[str, Any]:
    """Runs all policies and writes the result. Exits 1 if any output differs elsewhere than at a
    near-tie."""
    target, small, medium, tokenizer = load_pair(settings.pair)
    prompts = held_out_prompts(tokenizer, settings.prompts, settings.prompt_tokens, settings.seed)
    fixed = {"max_new_tokens": settings.new_tokens, "stop_ids": ()}

    def decode(policy, drafter, batch):
        rows, rounds = [], 0
        for i in range(0, len(prompts), batch):
            part = prompts[i : i + batch]
            # The last group is filled up, so that it shares the others' compilation.
            filled = part + part[:1] * (batch - len(part))
            result = generate(target, drafter, filled, policy, **fixed)
            rows += result.tokens[: len(part)]
            rounds += int(result.statistics.rounds_B[: len(part)].sum())
        return rows, rounds

    reference, _ = decode(Autoregressive(), None, 1)
    report: dict[str, Any] = {}
    runs = {"autoregressive": (Autoregressive(), None), **policies(small, medium, settings.seed)}
    for name, (policy, drafter) in runs.items():
        for batch in settings.batches:
            if name == "autoregressive" and batch == 1:
                continue
            begun = time.perf_counter()
            rows, rounds = decode(policy, drafter, batch)
            outcome = compare(target, prompts, reference, rows)
            outcome["tokens_per_round"] = len(prompts) * (settings.new_tokens - 1) / rounds
            report[f"{name}, batch {batch}"] = outcome
            print(
                f"{name:18} batch {batch}: {outcome['identical']} of {len(prompts)} identical, "
                f"{len(outcome['near_ties'])} near-ties, {len(outcome['failures'])} failures, "
                f"{outcome['tokens_per_round']:.2f} tokens per round "
                f"({time.perf_counter() - begun:.0f} s)",
                flush=True,
            )
    result = {
        "provenance": provenance(settings.seed),
        "prompts": len(prompts),
        "new_tokens": settings.new_tokens,
        "near_tie": NEAR_TIE,
        "policies": report,
    }
    settings.result.parent.mkdir(parents=True, exist_ok=True)
    settings.result.write_text(json.dumps(result, indent=1) + "\n")
    if any(outcome["failures"] for outcome in report.values()):
        raise SystemExit("some output differs from autoregression elsewhere than at a near-tie")
    return result


if __name__ == "__main__":
    main(tyro.cli(Settings))
