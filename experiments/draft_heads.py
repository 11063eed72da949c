"""Draft heads of five papers on one small target: same data, same number of updates, three seeds.

    python -m experiments.draft_heads                        (about 40 minutes on two free cores)
    python -m experiments.draft_heads --stage train --minutes 2     (goes on where it stopped)

Stages: `data` (the target's continuations and features, once), `costs` (step times of target and
heads), `train` (every arm and seed), `further` (EAGLE, HASS, PosS and KOALA from the pair's
trained head instead of half-trained ones: where the papers' methods start), `decode` (tokens per
round of the runtime), `speed` (tokens per second), `report` (head law, figures, JSON). A stage
skips what is in `--work` already.
Expect: 100 updates from random weights stay below the distilled small draft (tau of chains 1.3 to
1.5), all recipes; the pair's trained head, made by more updates, lies above it, and what HASS, PosS
and KOALA add to it is small or negative at this scale. What the papers claim and what is seen here
stands in docs/draft-heads.md.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from tokenizers import Tokenizer

from sdx.calibration.draft_heads import StepCosts, survival_weights, time_heads
from sdx.decoding.generation import generate
from sdx.decoding.heads import bind
from sdx.decoding.llama_target import as_target
from sdx.models.checkpoint import load_model
from sdx.models.heads import create_head, load_head, save_head
from sdx.models.small_steps import PLAIN
from sdx.records import (
    Autoregressive,
    Chain,
    DynamicTree,
    Sampling,
    StaticTree,
)
from sdx.training import corpus
from sdx.training.head_data import TRAIN, Features, distil, feature_batches, teacher_of
from sdx.training.heads import Plan, head_trainer, judged
from sdx.training.trainer import Rates, Schedule

PROMPT, NEW, POSITIONS = 32, 96, 8
UNROLLED = 4  # steps that unrolled arms train; PosS has specialists for as many
FUSED = (1, 2, 4)  # EAGLE-3's low, middle and high: of four layers the last one's output is high
CONTEXT, CAPACITY = 80, 128  # of step times
BATCH_ROWS = 4


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to make a head. fork: the arm at half of whose updates it starts, to do the other
    half its own way (HASS, PosS and KOALA continue a trained head; a loss that asks for acceptance
    has little to go by at the start)."""

    name: str
    plan: Plan
    fork: str = ""


EAGLE3 = Plan(recipe="eagle3", steps=UNROLLED, feature_layers=FUSED)


def poss(n: int) -> Plan:
    return Plan(recipe="poss", steps=UNROLLED, positions_per_specialist=n)


def koala(k: int) -> Plan:
    return Plan(recipe="koala", layers=k, adversarial=0.2)


ARMS = (
    Arm("EAGLE", Plan(recipe="eagle")),
    Arm("HASS", Plan(recipe="hass", steps=UNROLLED), "EAGLE"),
    *(Arm(f"PosS-{n}", poss(n), "EAGLE") for n in (1, 2, 3)),
    Arm("EAGLE-3", EAGLE3),
    Arm("EAGLE-3 TV", dataclasses.replace(EAGLE3, objective="tv"), "EAGLE-3"),
    Arm("EAGLE-3 throughput", dataclasses.replace(EAGLE3, objective="throughput"), "EAGLE-3"),
    *(Arm(f"Medusa K={k}", Plan(recipe="medusa", layers=k, steps=UNROLLED)) for k in (1, 2, 3)),
    *(Arm(f"EAGLE K={k}", Plan(recipe="eagle", layers=k)) for k in (2, 3)),
    Arm("KOALA K=1", koala(1), "EAGLE"),
    *(Arm(f"KOALA K={k}", koala(k), f"EAGLE K={k}") for k in (2, 3)),
)
FORKED = {arm.fork for arm in ARMS}
TRAINED = "trained"
LATER = tuple(
    Arm(f"{TRAINED} {arm.name}", arm.plan, TRAINED)
    for arm in ARMS
    if arm.name in ("EAGLE", "HASS", "PosS-1", "PosS-2", "PosS-3", "KOALA K=1")
)
SAME_NETWORK = {  # arms whose network is another arm's, with other weights
    "HASS": "EAGLE",
    "EAGLE-3 TV": "EAGLE-3",
    "EAGLE-3 throughput": "EAGLE-3",
    "KOALA K=1": "EAGLE",
    "KOALA K=2": "EAGLE K=2",
    "KOALA K=3": "EAGLE K=3",
    **{f"{TRAINED} {name}": "EAGLE" for name in ("EAGLE", "HASS", "KOALA K=1")},
    **{f"{TRAINED} PosS-{n}": f"PosS-{n}" for n in (1, 2, 3)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run."""

    stage: Literal["all", "data", "costs", "train", "further", "decode", "speed", "report"] = "all"
    minutes: float = float("inf")
    """Stop before the next arm after so long; a later call goes on."""
    updates: int = 100
    further: int = 80
    """Updates of the arms that go on from the pair's trained head."""
    sequences: int = 1024
    """Training sequences of 128 tokens, 32 of them a prompt."""
    held_out: int = 48
    """Sequences of each temperature that heads are judged on."""
    seeds: int = 3
    pair: Path = Path("experiments/small_pair")
    work: Path = Path("out/draft_heads")
    results: Path = Path("experiments/results")


START = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - START:7.1f} s  {text}", flush=True)


def in_time(settings: Settings) -> bool:
    return time.monotonic() - START < 60 * settings.minutes


def lines_of(path: Path) -> list[dict]:
    """The JSON lines of a file that may not exist yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_line(path: Path, line: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


# ---------------------------------------------------------------------------- data and costs


def data(settings: Settings) -> None:
    """Training text (greedy and sampled), held-out text (one folder per temperature)."""
    target, _ = load_model(settings.pair / "target", forms=PLAIN)
    tokenizer = Tokenizer.from_file(str(settings.pair / "tokenizer.json"))
    prompts = [
        corpus.held_out_prompts(corpus.tokenise(tokenizer, corpus.texts(split)), count, PROMPT)
        for split, count in (("train", settings.sequences), ("held_out", settings.held_out))
    ]
    distil(settings.work, target, *prompts, NEW, FUSED, report=say)


def costs(settings: Settings) -> None:
    """Seconds of the target's pass over x tokens, and of a head's draft step and first pass."""
    path = settings.work / "costs.json"
    if path.exists():
        return
    target = as_target(load_model(settings.pair / "target")[0])
    drafts: dict[str, Any] = {"draft_small": load_model(settings.pair / "draft_small")[0]}
    for arm in (a for a in ARMS if a.name not in SAME_NETWORK):
        config = arm.plan.config(target.model.config)
        head = create_head(config, jax.random.key(0), target.model.parts())
        drafts[arm.name] = bind(head, target)
    sizes = (1, 2, 3, 4, 5, 7, 9, 13)
    found = time_heads(target, drafts, sizes, context=CONTEXT, capacity=CAPACITY)
    path.write_text(json.dumps(dataclasses.asdict(found), indent=1))
    say(path.read_text())


def costs_of(settings: Settings) -> StepCosts:
    """What `costs` measured; arms of one network share its numbers."""
    facts = json.loads((settings.work / "costs.json").read_text())
    for part in (facts["first"], facts["step"]):
        part |= {arm: part[network] for arm, network in SAME_NETWORK.items()}
    return StepCosts(**facts | {"target": {int(x): s for x, s in facts["target"].items()}})


# ---------------------------------------------------------------------------- training


def weights_of(arm: Arm, seed: int, settings: Settings) -> tuple[float, ...]:
    """The throughput loss takes dT/dS(k) where the EAGLE-3 arm of the same seed ended; () for
    other losses."""
    if arm.plan.objective != "throughput":
        return ()
    lines = lines_of(settings.work / "trained.jsonl")
    known = {line["seed"]: line for line in lines if line["arm"] == "EAGLE-3"}
    hazards = known[seed]["hazards"]["0"]
    weights = survival_weights(hazards, costs_of(settings), "EAGLE-3")[: arm.plan.unrolled]
    return tuple(float(w) for w in weights / weights.sum())


def train_one(arm: Arm, seed: int, settings: Settings, target, teacher, features) -> dict:
    """Trains, judges and saves one head; the line of results."""
    folder = settings.work / "heads"
    half = settings.updates // 2
    key = jax.random.key(seed)
    given = settings.pair / "head" if arm.fork == TRAINED else folder / f"{arm.fork}-half-{seed}"
    start = load_head(given, forms=PLAIN) if arm.fork else None
    head = arm.plan.first_head(target.config, teacher.parts, key, start)
    rate = 1e-3 if arm.fork == TRAINED else 3e-3
    if arm.fork == TRAINED:
        schedule, skipped = Schedule(steps=settings.further, warmup_steps=5, decay=0.8), 0
    elif arm.fork:
        schedule, skipped = Schedule(steps=settings.updates - half, warmup_steps=5, decay=0.8), half
    else:
        schedule, skipped = Schedule(steps=settings.updates, warmup_steps=10), 0
    fused = bool(head.config.feature_layers)
    stream = feature_batches(features, BATCH_ROWS, seed, with_fused=fused)
    loss = arm.plan.loss(weights_of(arm, seed, settings))
    trainer = head_trainer(
        head, teacher, loss, lambda step, progress: stream(step + skipped, progress), schedule,
        rates=Rates(matrix=0.0, rest=rate), adversarial=arm.plan.adversarial, key=key,
    )  # fmt: skip
    trainer.fit(stop_step=1)
    compiled = trainer.progress.seconds
    if arm.name in FORKED:
        trainer.fit(stop_step=half)
        save_head(folder / f"{arm.name}-half-{seed}", trainer.model["head"])
    done = trainer.fit()
    head = trainer.model["head"]
    name = f"{arm.name}-{seed}".replace(" ", "-").replace("=", "")
    save_head(folder / name, head, "bfloat16")
    numbers = sum(leaf.size for leaf in jax.tree.leaves(head))
    return {
        "arm": arm.name,
        "seed": seed,
        "head": name,
        "updates": done.step + skipped,
        "seconds": done.seconds,
        "seconds_per_update": (done.seconds - compiled) / (done.step - 1),
        "final_loss": done.loss,
        "survival_weights": loss.survival_weights,
        "parameters": numbers,
        "bytes_bfloat16": 2 * numbers,
        **judged(head, teacher, settings.work, PROMPT, POSITIONS),
    }


def train(settings: Settings, arms: tuple[Arm, ...]) -> bool:
    """All arms and seeds, seed by seed; True when everything is there."""
    path = settings.work / "trained.jsonl"
    known = {(line["arm"], line["seed"]) for line in lines_of(path)}
    left = [(s, a) for s in range(settings.seeds) for a in arms if (a.name, s) not in known]
    target, _ = load_model(settings.pair / "target", forms=PLAIN)
    teacher, features = teacher_of(target), Features(settings.work / TRAIN)
    total = settings.seeds * len(arms)
    for place, (seed, arm) in enumerate(left):
        if not in_time(settings):
            return False
        line = train_one(arm, seed, settings, target, teacher, features)
        add_line(path, line)
        tau = {t: 1 + sum(s) for t, s in line["survival"].items()}
        say(
            f"{total - len(left) + place + 1}/{total} {arm.name}, seed {seed}: tau {tau['0']:.3f} "
            f"(T = 0), {tau['1']:.3f} (T = 1), {line['seconds']:.0f} s"
        )
    return True


# ---------------------------------------------------------------------------- decoding

STATIC = StaticTree(parents=(-1, -1, -1, 0, 0, 1, 3, 3, 4, 6), children="top")
POLICIES = {
    "chain": Chain(lookahead=4),
    "static tree": STATIC,
    "dynamic tree": DynamicTree(budget=10, depth=4, branching=3),
}


def prompts_of(settings: Settings, count: int, offset: int = 0) -> list[list[int]]:
    """Held-out prompts, between those of the held-out features."""
    tokenizer = Tokenizer.from_file(str(settings.pair / "tokenizer.json"))
    stream = corpus.tokenise(tokenizer, corpus.texts("held_out"))[997 + offset :]
    return corpus.held_out_prompts(stream, count, PROMPT).tolist()


def per_round(result) -> float:
    """Tokens per round of all rows together."""
    measured = result.measurement()
    return measured.tokens / measured.rounds


def decode(settings: Settings) -> bool:
    """tau of every head under every policy, T = 0 and 1, and of the small draft; 12 prompts."""
    path = settings.work / "decoded.jsonl"
    known = {line["head"] for line in lines_of(path)}
    target = as_target(load_model(settings.pair / "target")[0])
    prompts = prompts_of(settings, 12)
    rows = [{"arm": "draft_small", "seed": 0, "head": "draft_small"}]
    rows += lines_of(settings.work / "trained.jsonl")
    # Equal shapes one after the other, the best heads first.
    order = lambda arm: (arm != "draft_small", TRAINED not in arm, arm)  # noqa: E731
    rows.sort(key=lambda row: order(row["arm"]))
    for row in rows:
        if row["head"] in known:
            continue
        if not in_time(settings):
            return False
        independent = row["arm"] == "draft_small"
        draft = (
            as_target(load_model(settings.pair / "draft_small")[0])
            if independent
            else load_head(settings.work / "heads" / row["head"])
        )
        taus = {}
        for name, policy in POLICIES.items():
            for temperature in (0.0, 1.0):
                result = generate(
                    target, draft, prompts, policy, Sampling(temperature=temperature), NEW,
                    key=row["seed"], stop_ids=(),
                )  # fmt: skip
                taus[f"{name}, T = {temperature:g}"] = per_round(result)
        add_line(path, {"arm": row["arm"], "seed": row["seed"], "head": row["head"], "tau": taus})
        say(f"{row['head']}: " + ", ".join(f"{k} {v:.2f}" for k, v in taus.items()))
    return True


def speed(settings: Settings) -> None:
    """Tokens per second at batch 1, greedy, chains of 1 to 4 drafts of the first seed's heads."""
    path = settings.work / "speed.json"
    if path.exists():
        return
    target = as_target(load_model(settings.pair / "target")[0])
    prompts = prompts_of(settings, 3, offset=500)
    runs: dict[str, tuple] = {"autoregression, 0": (Autoregressive(), None)}
    rows = [r for r in lines_of(settings.work / "trained.jsonl") if r["seed"] == 0]
    drafts = {r["arm"]: load_head(settings.work / "heads" / r["head"]) for r in rows}
    drafts["draft_small"] = as_target(load_model(settings.pair / "draft_small")[0])
    for name, draft in drafts.items():
        for lookahead in (1, 2, 3):
            runs[f"{name}, {lookahead}"] = (Chain(lookahead=lookahead), draft)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    tokens: dict[str, int] = {}
    for turn in range(5):  # the first compiles
        for name, (policy, draft) in runs.items():
            found = [
                generate(target, draft, [p], policy, max_new_tokens=64, stop_ids=())
                for p in prompts
            ]
            tokens[name] = sum(len(f.tokens[0]) - 1 for f in found)
            if turn:
                seconds[name].append(sum(f.seconds for f in found))
    facts = {
        name: {
            "tokens_per_second": tokens[name] / float(np.median(values)),
            "low": tokens[name] / max(values),
            "high": tokens[name] / min(values),
        }
        for name, values in seconds.items()
    }
    path.write_text(json.dumps(facts, indent=1))
    for name, fact in facts.items():
        say(f"{name}: {fact['tokens_per_second']:.0f} tokens/s")


def main(settings: Settings) -> None:
    settings.work.mkdir(parents=True, exist_ok=True)
    want = lambda *names: settings.stage in ("all", *names)  # noqa: E731
    if want("data"):
        data(settings)
    if want("costs"):
        costs(settings)
    if want("train") and not train(settings, ARMS):
        return
    if want("further") and not train(settings, LATER):
        return
    if want("decode") and not decode(settings):
        return
    if want("speed"):
        speed(settings)
    if want("report"):
        from experiments.draft_heads_report import report

        report(settings)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
