"""The runtime's share of experiments/draft_heads.py: tokens per round, and per second.

    python -m experiments.draft_heads --stage decode
    python -m experiments.draft_heads --stage speed

The second is timed and wants the machine for itself.
"""

from __future__ import annotations

import json

import numpy as np
from tokenizers import Tokenizer

from experiments.draft_heads_arms import (
    DEPTHS,
    NEW,
    PROMPT,
    TRAINED,
    Settings,
    add_line,
    in_time,
    lines_of,
    say,
)
from sdx.decoding.generation import generate
from sdx.decoding.llama_target import as_target
from sdx.models.checkpoint import load_model
from sdx.models.heads import load_head
from sdx.records import Autoregressive, Chain, DynamicTree, Policy, Sampling, StaticTree
from sdx.training import corpus

CALIBRATION_PROMPTS, SPEED_PROMPTS = 12, 12
PLAIN_RUN = "autoregression, 0"
TREE = (-1, -1, -1, 0, 0, 1, 3, 3, 4, 6)


def policies_at(temperature: float) -> dict[str, Policy]:
    """The likeliest tokens as children at T = 0; at T = 1 the static tree's are drawn, so that a
    child is accepted with more than the target's probability of it. A dynamic tree chooses by
    value at any temperature, as EAGLE-2 does."""
    return {
        "chain": Chain(lookahead=4),
        "static tree": StaticTree(
            parents=TREE, children="without_replacement" if temperature else "top"
        ),
        "dynamic tree": DynamicTree(budget=10, depth=4, branching=3),
    }


def prompts_of(settings: Settings, count: int, offset: int = 0) -> list[list[int]]:
    """Held-out prompts, between those of the held-out features."""
    tokenizer = Tokenizer.from_file(str(settings.pair / "tokenizer.json"))
    stream = corpus.tokenise(tokenizer, corpus.texts("held_out"))[997 + offset :]
    return corpus.held_out_prompts(stream, count, PROMPT).tolist()


def decode(settings: Settings) -> bool:
    """tau of every head under every policy, T = 0 and 1, and of the small draft; what its chains
    accepted by position; 12 prompts."""
    path = settings.work / "decoded.jsonl"
    known = {line["head"] for line in lines_of(path)}
    target = as_target(load_model(settings.pair / "target")[0])
    prompts = prompts_of(settings, CALIBRATION_PROMPTS)
    rows = [{"arm": "draft_small", "seed": 0, "head": "draft_small"}]
    rows += lines_of(settings.work / "trained.jsonl")
    # Equal shapes one after the other, the best heads first.
    order = lambda arm: (arm != "draft_small", TRAINED not in arm, arm)  # noqa: E731
    rows.sort(key=lambda row: order(row["arm"]))
    for row in rows:
        if row["head"] in known or not settings.takes(row["arm"], row["seed"]):
            continue
        if not in_time(settings):
            return False
        independent = row["arm"] == "draft_small"
        draft = (
            as_target(load_model(settings.pair / "draft_small")[0])
            if independent
            else load_head(settings.work / "heads" / row["head"])
        )
        taus, chains = {}, {}
        for temperature in (0.0, 1.0):
            for name, policy in policies_at(temperature).items():
                result = generate(
                    target, draft, prompts, policy, Sampling(temperature=temperature), NEW,
                    key=row["seed"], stop_ids=(),
                )  # fmt: skip
                found = result.measurement()
                taus[f"{name}, T = {temperature:g}"] = found.tokens / found.rounds
                if name == "chain":
                    chains[f"{temperature:g}"] = [
                        a / max(d, 1)
                        for a, d in zip(
                            found.accepted_per_position, found.drafted_per_position, strict=True
                        )
                    ]
        line = {"arm": row["arm"], "seed": row["seed"], "head": row["head"], "tau": taus}
        add_line(path, line | {"chain_hazards": chains})
        say(f"{row['head']}: " + ", ".join(f"{k} {v:.2f}" for k, v in taus.items()))
    return True


def timed(target, runs: dict[str, tuple], prompts: list[list[int]]) -> dict[str, dict]:
    """Tokens per second, and seconds per round, of every policy at batch 1, greedy: medians over
    turns of all prompts, policies in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    counts: dict[str, tuple[int, int]] = {}
    for turn in range(5):  # the first compiles
        for name, (policy, draft) in runs.items():
            found = [
                generate(target, draft, [p], policy, max_new_tokens=64, stop_ids=())
                for p in prompts
            ]
            counts[name] = (
                sum(len(f.tokens[0]) - 1 for f in found),
                sum(f.measurement().rounds for f in found),
            )
            if turn:
                seconds[name].append(sum(f.seconds for f in found))
        say(f"speed: turn {turn + 1} of 5")
    return {
        name: {
            "tokens_per_second": counts[name][0] / float(np.median(values)),
            "low": counts[name][0] / max(values),
            "high": counts[name][0] / min(values),
            "seconds_per_round": float(np.median(values)) / counts[name][1],
        }
        for name, values in seconds.items()
    }


def speed(settings: Settings) -> None:
    """Chains of 1 to 3 drafts of the first seed's heads; and EAGLE's on the prompts that acceptance
    was calibrated on, for what a round costs beyond its steps timed alone."""
    path = settings.work / "speed.json"
    if path.exists():
        return
    target = as_target(load_model(settings.pair / "target")[0])
    runs: dict[str, tuple] = {PLAIN_RUN: (Autoregressive(), None)}
    rows = [r for r in lines_of(settings.work / "trained.jsonl") if r["seed"] == 0]
    drafts = {r["arm"]: load_head(settings.work / "heads" / r["head"]) for r in rows}
    drafts["draft_small"] = as_target(load_model(settings.pair / "draft_small")[0])
    for name, draft in drafts.items():
        for lookahead in DEPTHS:
            runs[f"{name}, {lookahead}"] = (Chain(lookahead=lookahead), draft)
    known = {name: runs[name] for name in (PLAIN_RUN, *(f"EAGLE, {d}" for d in DEPTHS))}
    facts = {
        "calibration": timed(target, known, prompts_of(settings, CALIBRATION_PROMPTS)),
        "measured": timed(target, runs, prompts_of(settings, SPEED_PROMPTS, offset=500)),
    }
    path.write_text(json.dumps(facts, indent=1))
    for name, fact in facts["measured"].items():
        say(f"{name}: {fact['tokens_per_second']:.0f} tokens/s")
