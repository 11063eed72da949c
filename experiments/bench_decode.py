"""Decoding speed: every policy of sdx, and Hugging Face transformers, same weights, same prompts.

    python -m venv peers && peers/bin/pip install torch==2.13.0 transformers
    python -m experiments.bench_decode --peer-python peers/bin/python [--prompts 20] [--pair DIR]

Greedy, float32, batch 1, the same number of threads. The target and the small draft are exported as
float32 Llama checkpoints for the peer, which runs in a process of its own and is idle while sdx
runs (and the other way round). Prompt by prompt all contestants take turns, in a new order each
time; ratios are paired per prompt. The best policy is chosen on the first half of the prompts and
judged on the second. The time of reading the prompt is included on both sides.

Expect: sdx autoregression >= 2 x transformers' and the best sdx policy >= 2.5 x its assisted
generation; the best policy >= 1.3 x sdx's own autoregression; a round's overhead beyond its
forward passes <= 10 %. Writes experiments/results/bench_decode.json. About 5 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.greedy_identity import held_out_prompts, load_pair
from experiments.provenance import provenance
from sdx.decoding.generation import generate
from sdx.decoding.ngram import NgramDrafter
from sdx.decoding.steps import pass_seconds
from sdx.decoding.table import TableFresh, TableModel, TableOutput
from sdx.models.checkpoint import load_model, save_model
from sdx.records import (
    Autoregressive,
    Cascade,
    Chain,
    Policy,
    StaticTree,
    ThresholdChain,
    record,
)

RESULT = Path(__file__).parent / "results" / "bench_decode.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run."""

    pair: Path = Path("experiments/small_pair")
    """Folder with target/, draft_small/, draft_medium/ and tokenizer.json."""
    peer_python: Path | None = None
    """Interpreter that has torch and transformers; without it only sdx is measured."""
    prompts: int = 20
    turns: int = 1
    """Times that each prompt is decoded by each contestant; its median counts."""
    prompt_tokens: int = 64
    new_tokens: int = 128
    threads: int = os.cpu_count() or 1
    seed: int = 1
    result: Path = RESULT


class Peer:
    """The other process: one request, one answer."""

    def __init__(self, python: Path, folder: Path, settings: Settings):
        for name in ("target", "draft_small"):
            save_model(folder / name, load_model(settings.pair / name)[0], dtype="float32")
        script = Path(__file__).with_name("peer_transformers.py")
        command = [python, script, folder / "target", folder / "draft_small", settings.threads]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions = json.loads(self.process.stdout.readline())["versions"]

    def __call__(self, mode: str, prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
        request = {"mode": mode, "prompt": prompt, "new_tokens": new_tokens}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        return answer["tokens"], answer["seconds"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


def policies(small: Any, medium: Any) -> dict[str, tuple[Policy, Any]]:
    """Name -> policy and what drafts for it."""
    runs: dict[str, tuple[Policy, Any]] = {"autoregressive": (Autoregressive(), None)}
    for k in (1, 2, 3, 4):
        runs[f"chain {k}, small draft"] = (Chain(lookahead=k), small)
    for k in (2, 3):
        runs[f"chain {k}, medium draft"] = (Chain(lookahead=k), medium)
    runs["threshold 0.5, small draft"] = (ThresholdChain(threshold=0.5, max_lookahead=4), small)
    runs["tree of 4, small draft"] = (StaticTree(parents=(-1, -1, 0, 2), children="top"), small)
    runs["cascade 1-2"] = (Cascade(lengths=(1, 2)), [small, medium])
    for k in (3, 7):
        runs[f"n-gram {k}"] = (Chain(), NgramDrafter(lookahead=k))
    return runs


def contest(settings: Settings, runs, target, prompts, peer: Peer | None):
    """seconds[name][prompt]: medians over turns; rounds of sdx; outputs that differ from sdx's
    autoregression (near-ties of the best logits may flip between summation orders)."""
    rng = np.random.default_rng(settings.seed)
    names = [*runs] + (["transformers", "transformers assisted"] if peer else [])
    seconds: dict[str, list[float]] = {name: [] for name in names}
    rounds: dict[str, list[int]] = {name: [] for name in runs}
    differing = dict.fromkeys(names, 0)

    def decode(name, prompt):
        if name in runs:
            policy, drafter = runs[name]
            fixed = {"max_new_tokens": settings.new_tokens, "stop_ids": ()}
            result = generate(target, drafter, [prompt], policy, **fixed)
            return result.tokens[0], result.prompt_seconds + result.seconds, result.rounds
        mode = "assisted" if name.endswith("assisted") else "autoregressive"
        return (*peer(mode, prompt, settings.new_tokens), 0)

    for name in names:
        decode(name, prompts[0])  # compiles, warms up
    for i, prompt in enumerate(prompts):
        taken: dict[str, list[float]] = {name: [] for name in names}
        texts, steps = {}, {}
        for _ in range(settings.turns):
            for name in rng.permutation(names):
                texts[name], time, steps[name] = decode(name, prompt)
                taken[name].append(time)
        for name in names:
            seconds[name].append(float(np.median(taken[name])))
            differing[name] += texts[name] != texts["autoregressive"]
            if name in runs:
                rounds[name].append(steps[name])
        print(f"prompt {i + 1} of {len(prompts)}", flush=True)
    return seconds, rounds, differing


def ratio(slow: list[float], fast: list[float], seed: int) -> dict[str, float]:
    """Median of paired ratios with a 95 % bootstrap interval over prompts."""
    pairs = np.array(slow) / np.array(fast)
    picks = np.random.default_rng(seed).integers(0, len(pairs), (2000, len(pairs)))
    low, high = np.quantile(np.median(pairs[picks], axis=1), [0.025, 0.975])
    return {"median": float(np.median(pairs)), "low": float(low), "high": float(high)}


@record
class Lookup(TableModel):
    """A model whose pass is one look-up, `logits_VxVxV[0, last]`: what is left of a round is the
    loop itself."""

    def __call__(
        self, tokens_BxT, cache, mask=None, positions=None, pending=None, last=None
    ) -> TableOutput:
        B, T = tokens_BxT.shape
        positions_BxT = jnp.broadcast_to(jnp.arange(T), (B, T))
        fresh = TableFresh(tokens_BxT=tokens_BxT, positions_BxT=positions_BxT)
        logits_BxTxV = self.logits_VxVxV[0, tokens_BxT]
        return TableOutput(logits_BxTxV=logits_BxTxV[:, -(last or T) :], fresh=fresh)


def overhead(settings: Settings, target, draft) -> dict[str, dict[str, float]]:
    """What a round costs beside its forward passes, in microseconds and as a share of the round:
    the same loop with models whose pass is a look-up (acceptance, statistics, token buffer, argmax
    over the whole vocabulary included). `apart_us`: the same passes timed alone, one after the
    other; they are faster there, because the draft's weights stay in the second-level cache."""
    fixed = {"max_new_tokens": settings.new_tokens, "stop_ids": ()}
    prompt = list(range(1, settings.prompt_tokens + 1))
    V = target.vocab_size
    empty = Lookup(logits_VxVxV=jax.random.normal(jax.random.key(0), (1, V, V)))
    timing = {
        "context": settings.prompt_tokens + settings.new_tokens // 2,
        "capacity": -(-(settings.prompt_tokens + settings.new_tokens) // 32) * 32,
        "repeats": 60,
        "trials": 1,
    }

    def one(model, tokens, every_logit=True):
        return pass_seconds(model, 1, tokens, every_logit=every_logit, **timing)[0] * 1e6

    def per_round(model, drafter, policy):
        result = generate(model, drafter, [prompt], policy, **fixed)
        return result.seconds / result.rounds * 1e6

    taken: dict[str, list[list[float]]] = {"autoregressive": [], "chain 2, small draft": []}
    for _ in range(10):
        taken["autoregressive"].append(
            [
                per_round(target, None, Autoregressive()),
                per_round(empty, None, Autoregressive()),
                one(target, 1),
            ]
        )
        pair = Chain(lookahead=2)
        taken["chain 2, small draft"].append(
            [
                per_round(target, draft, pair),
                per_round(empty, empty, pair),
                one(target, 3) + one(draft, 2, False) + one(draft, 1, False),
            ]
        )
    shares = {}
    for name, rows in taken.items():
        whole, loop, apart = np.median(rows[2:], axis=0)
        shares[name] = {
            "round_us": float(whole),
            "loop_us": float(loop),
            "share": float(loop / whole),
            "apart_us": float(apart),
        }
    return shares


def main(settings: Settings) -> dict[str, Any]:
    """Runs the contest and writes the result."""
    target, small, medium, tokenizer = load_pair(settings.pair)
    prompts = held_out_prompts(tokenizer, settings.prompts, settings.prompt_tokens, settings.seed)
    runs = policies(small, medium)
    with tempfile.TemporaryDirectory() as folder:
        peer = None
        if settings.peer_python:
            peer = Peer(settings.peer_python, Path(folder), settings)
        try:
            seconds, rounds, differing = contest(settings, runs, target, prompts, peer)
        finally:
            if peer:
                peer.close()
    half = len(prompts) // 2
    own, speculative = (
        seconds["autoregressive"],
        [name for name in runs if name != "autoregressive"],
    )
    best = max(speculative, key=lambda n: ratio(own[:half], seconds[n][:half], 0)["median"])
    result = {
        "provenance": provenance(settings.seed),
        "settings": {"prompts": len(prompts), "turns": settings.turns}
        | {name: getattr(settings, name) for name in ("prompt_tokens", "new_tokens", "threads")},
        "peer": peer.versions if peer else None,
        "tokens_per_second": {
            name: settings.new_tokens / float(np.median(times)) for name, times in seconds.items()
        },
        "tokens_per_round": {
            name: (settings.new_tokens - 1) / float(np.mean(counts))
            for name, counts in rounds.items()
        },
        "speedup_over_own_autoregression": {
            name: ratio(own, seconds[name], settings.seed) for name in speculative
        },
        "outputs_that_differ": differing,
        "best_policy": best,
        "best_over_own_autoregression": ratio(own[half:], seconds[best][half:], settings.seed),
        "overhead": overhead(settings, target, small),
    }
    if peer:
        result["over_transformers"] = {
            "autoregressive": ratio(seconds["transformers"], own, settings.seed),
            "best_over_assisted": ratio(
                seconds["transformers assisted"][half:], seconds[best][half:], settings.seed
            ),
        }
    settings.result.parent.mkdir(parents=True, exist_ok=True)
    settings.result.write_text(json.dumps(result, indent=1) + "\n")
    for name, rate in result["tokens_per_second"].items():
        print(f"{name:28} {rate:7.0f} tokens/s")
    for name in ("best_policy", "best_over_own_autoregression", "overhead"):
        print(f"{name}: {result[name]}")
    if peer:
        print(f"over transformers: {result['over_transformers']}")
    return result


if __name__ == "__main__":
    main(tyro.cli(Settings))
