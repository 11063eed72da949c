"""Draft heads of five papers on one small target: same data, same number of updates, three seeds.

    python -m experiments.draft_heads                        (about 45 minutes on two free cores)
    python -m experiments.draft_heads --stage train --minutes 2     (goes on where it stopped)

Stages: `data` (the target's continuations and features, once), `costs` (step times of target and
heads), `train` (every arm and seed), `decode` (tokens per round and per second of the runtime),
`report` (head law, figures, JSON). A stage skips what is in `--work` already.
Expect: heads that unroll (HASS, PosS, EAGLE-3) hold pos-acc at later positions where EAGLE, trained
on the target's features only, falls; all against the distilled small draft. What the papers claim
and what is seen here stands in docs/draft-heads.md.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tokenizers import Tokenizer

from sdx.calibration import measure
from sdx.decoding.generation import generate
from sdx.decoding.heads import bind
from sdx.decoding.llama_target import as_target
from sdx.models.checkpoint import load_model
from sdx.models.heads import HeadConfig, create_head, load_head, save_head
from sdx.models.small_steps import PLAIN
from sdx.records import (
    Autoregressive,
    Chain,
    Design,
    DrafterSpec,
    DynamicTree,
    Sampling,
    StaticTree,
    Workload,
)
from sdx.theory.acceptance import PerPosition
from sdx.theory.throughput import LeviathanCost, predict
from sdx.training import corpus
from sdx.training.head_data import (
    Features,
    continuations,
    feature_batches,
    teacher_of,
    write_features,
)
from sdx.training.heads import KIND, chain_survival, head_trainer, recipe, specialists_from
from sdx.training.trainer import Rates, Schedule

PROMPT, NEW, POSITIONS = 32, 96, 8
UNROLLED = 4  # steps that unrolled arms train; PosS has specialists for as many
FUSED = (1, 2, 4)  # EAGLE-3's low, middle and high: of four layers the last one's output is high
CONTEXT, CAPACITY = 80, 128  # of step times
BATCH_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to make a head. fork: starts from the EAGLE arm's weights at half of the updates
    (HASS and PosS continue a trained EAGLE head), and does the other half."""

    name: str
    recipe: str
    layers: int = 1
    specialist: int = 0
    adversarial: float = 0.0
    objective: str = "ce"
    fork: bool = False

    def config(self, target) -> HeadConfig:
        fields: dict[str, Any] = {"feature_layers": FUSED} if self.recipe == "eagle3" else {}
        if self.specialist:
            fields["positions_per_specialist"] = self.specialist
            fields["specialists"] = -(-UNROLLED // self.specialist)
        kind = KIND.get(self.recipe, self.recipe)
        return HeadConfig.for_target(target, kind, self.layers, **fields)


ARMS = (
    Arm(name="EAGLE", recipe="eagle"),
    Arm(name="HASS", recipe="hass", fork=True),
    Arm(name="PosS-1", recipe="poss", specialist=1, fork=True),
    Arm(name="PosS-2", recipe="poss", specialist=2, fork=True),
    Arm(name="PosS-3", recipe="poss", specialist=3, fork=True),
    Arm(name="EAGLE-3", recipe="eagle3"),
    Arm(name="EAGLE-3 TV", recipe="eagle3", objective="tv"),
    Arm(name="EAGLE-3 throughput", recipe="eagle3", objective="throughput"),
    Arm(name="Medusa K=1", recipe="medusa"),
    Arm(name="Medusa K=2", recipe="medusa", layers=2),
    Arm(name="Medusa K=3", recipe="medusa", layers=3),
    Arm(name="EAGLE K=2", recipe="eagle", layers=2),
    Arm(name="EAGLE K=3", recipe="eagle", layers=3),
    Arm(name="KOALA K=1", recipe="koala", adversarial=0.2),
    Arm(name="KOALA K=2", recipe="koala", layers=2, adversarial=0.2),
    Arm(name="KOALA K=3", recipe="koala", layers=3, adversarial=0.2),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run."""

    stage: Literal["all", "data", "costs", "train", "decode", "report"] = "all"
    minutes: float = float("inf")
    """Stop before the next arm after so long; a later call goes on."""
    updates: int = 120
    sequences: int = 1024
    """Training sequences of 128 tokens, 32 of them a prompt."""
    held_out: int = 96
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
    wanted = {
        "train": ("train", settings.sequences, (0.0, 1.0), 0),
        "greedy": ("held_out", settings.held_out, (0.0,), 1000),
        "sampled": ("held_out", settings.held_out, (1.0,), 2000),
    }
    for name, (split, count, temperatures, seed) in wanted.items():
        folder = settings.work / name
        if (folder / "data.json").exists():
            continue
        stream = corpus.tokenise(tokenizer, corpus.texts(split))
        prompts = corpus.held_out_prompts(stream, count, PROMPT)
        text = continuations(
            as_target(target), prompts, NEW, temperatures, seed, batch=32,
            report=lambda done, name=name: done % 256 or say(f"{name}: {done} texts"),
        )  # fmt: skip
        write_features(folder, target, text, FUSED)
        say(f"{name}: {len(text)} texts with features")


def costs(settings: Settings) -> None:
    """Seconds of the target's pass over x tokens, and of a head's draft step and first pass."""
    path = settings.work / "costs.json"
    if path.exists():
        return
    target = as_target(load_model(settings.pair / "target")[0])
    timers: dict[Any, Callable] = {
        ("target", key[1]): timer
        for key, timer in measure.target_timers(
            target, (1, 2, 3, 4, 5, 7, 9, 13), [CONTEXT], capacity=CAPACITY, rounds=16
        ).items()
    }
    models: dict[str, Any] = {"draft_small": load_model(settings.pair / "draft_small")[0]}
    for arm in (a for a in ARMS if a.objective == "ce" and not a.adversarial and a.name != "HASS"):
        head = create_head(arm.config(target.model.config), jax.random.key(0), target.model.parts())
        models[arm.name] = bind(head, target)
    for name, model in models.items():
        found = measure.draft_timers(model, (1, 4), CONTEXT, capacity=CAPACITY, rounds=16)
        timers |= {(name, lookahead): timer for lookahead, timer in found.items()}
    samples = measure.interleaved(timers, 7)
    seconds = {key: float(np.median(values)) for key, values in samples.items()}
    step = {name: (seconds[name, 4] - seconds[name, 1]) / 3 for name in models}
    facts = {
        "target_seconds": {str(x): s for (name, x), s in seconds.items() if name == "target"},
        "draft_step_seconds": step,
        "draft_first_seconds": {name: seconds[name, 1] for name in models},
    }
    path.write_text(json.dumps(facts, indent=1))
    say(json.dumps(facts))


def cost_of(facts: dict, name: str) -> LeviathanCost:
    """A draft step in units of a one-token pass of the target."""
    step = facts["draft_step_seconds"][name]
    return LeviathanCost(cost_ratio=step / facts["target_seconds"]["1"])


def survival_weights(hazards: np.ndarray, cost: LeviathanCost, lookahead: int) -> np.ndarray:
    """dT/dS(k), k = 1 .. len(hazards), of the objective at a lookahead: the survival of a chain is
    moved, its hazards follow. T in tokens per second of a unit pass."""
    workload = Workload(batch=1, context=CONTEXT, new_tokens=NEW)
    design = Design(drafter=DrafterSpec(family="eagle"), policy=Chain(lookahead=lookahead))

    def throughput(survival):
        rates = survival / jnp.concatenate([jnp.ones(1), survival[:-1]])
        law = PerPosition(rates=rates)
        return predict(design, workload, None, cost, law).tokens_per_second

    with jax.enable_x64(True):
        return np.asarray(jax.grad(throughput)(jnp.cumprod(jnp.asarray(hazards, float))))


def best_lookahead(hazards: np.ndarray, cost: LeviathanCost) -> int:
    """The integer lookahead of the highest predicted throughput, 1 .. 8."""
    tokens = 1 + np.cumsum(np.cumprod(hazards))
    return 1 + int(np.argmax(tokens / (1 + float(cost.cost_ratio) * np.arange(1, len(tokens) + 1))))


# ---------------------------------------------------------------------------- training


def loss_of(arm: Arm, settings: Settings):
    """The arm's recipe at this scale: unrolled arms train `UNROLLED` steps. The throughput loss
    takes dT/dS(k) at what the EAGLE-3 arm of the same seed had reached, or EAGLE's."""
    changes: dict[str, Any] = {}
    if arm.recipe in ("hass", "eagle3", "poss", "medusa"):
        changes["steps"] = UNROLLED
    if arm.objective != "ce":
        changes["objective"] = arm.objective
    if arm.objective == "throughput":
        known = {line["arm"]: line for line in lines_of(settings.work / "trained.jsonl")}
        hazards = np.asarray(known["EAGLE-3"]["hazards"]["0"])
        cost = cost_of(json.loads((settings.work / "costs.json").read_text()), "EAGLE-3")
        weights = survival_weights(hazards, cost, best_lookahead(hazards, cost))[:UNROLLED]
        changes["survival_weights"] = tuple(float(w) for w in weights)
    return recipe(arm.recipe, **changes)


def judged(head, teacher, settings: Settings) -> dict[str, Any]:
    """Survival and hazards (pos-acc) of chains on held-out text, greedy ("0") and sampled ("1")."""
    survival = {}
    for temperature, name in (("0", "greedy"), ("1", "sampled")):
        batch = Features(settings.work / name).all()
        found = chain_survival(head, teacher, batch, PROMPT, POSITIONS, temperature == "0")
        survival[temperature] = found
    return {
        "survival": {t: s.tolist() for t, s in survival.items()},
        "hazards": {
            t: (s / np.maximum(np.r_[1.0, s[:-1]], 1e-12)).tolist() for t, s in survival.items()
        },
    }


def train_one(arm: Arm, seed: int, settings: Settings, target, teacher, features) -> dict:
    """Trains, judges and saves one head; the line of results."""
    config, parts = arm.config(target.config), teacher.parts
    folder = settings.work / "heads"
    half = settings.updates // 2
    key = jax.random.key(seed)
    if arm.fork:
        head = load_head(folder / f"EAGLE-half-{seed}", forms=PLAIN)
        if arm.specialist:
            head = specialists_from(head, config, key)
        schedule, skipped = Schedule(steps=settings.updates - half, warmup_steps=5, decay=0.8), half
    else:
        head = create_head(config, key, parts)
        schedule, skipped = Schedule(steps=settings.updates, warmup_steps=10), 0
    stream = feature_batches(features, BATCH_ROWS, seed, with_fused=arm.recipe == "eagle3")
    loss = loss_of(arm, settings)
    trainer = head_trainer(
        head, teacher, loss, lambda step, progress: stream(step + skipped, progress), schedule,
        rates=Rates(matrix=0.0, rest=3e-3), adversarial=arm.adversarial, key=key,
    )  # fmt: skip
    trainer.fit(stop_step=1)
    compiled = trainer.progress.seconds
    if arm.name == "EAGLE":
        trainer.fit(stop_step=half)
        save_head(folder / f"EAGLE-half-{seed}", trainer.model["head"])
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
        **judged(head, teacher, settings),
    }


def train(settings: Settings) -> bool:
    """All arms and seeds, seed by seed; True when everything is there."""
    path = settings.work / "trained.jsonl"
    known = {(line["arm"], line["seed"]) for line in lines_of(path)}
    left = [(s, a) for s in range(settings.seeds) for a in ARMS if (a.name, s) not in known]
    target, _ = load_model(settings.pair / "target", forms=PLAIN)
    teacher, features = teacher_of(target), Features(settings.work / "train")
    total = settings.seeds * len(ARMS)
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
    rows.sort(key=lambda row: row["arm"])  # equal shapes one after the other
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
    prompts = prompts_of(settings, 4, offset=500)
    runs: dict[str, tuple] = {"autoregression, 0": (Autoregressive(), None)}
    rows = [r for r in lines_of(settings.work / "trained.jsonl") if r["seed"] == 0]
    drafts = {r["arm"]: load_head(settings.work / "heads" / r["head"]) for r in rows}
    drafts["draft_small"] = as_target(load_model(settings.pair / "draft_small")[0])
    for name, draft in drafts.items():
        if name in ("EAGLE-3 TV", "EAGLE-3 throughput") or name.startswith("KOALA"):
            continue  # other weights in the same network
        for lookahead in (1, 2, 3):
            runs[f"{name}, {lookahead}"] = (Chain(lookahead=lookahead), draft)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    tokens: dict[str, int] = {}
    for turn in range(4):  # the first compiles
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
    if want("train") and not train(settings):
        return
    if want("decode"):
        if not decode(settings):
            return
        speed(settings)
    if want("report"):
        from experiments.draft_heads_report import report

        report(settings)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
