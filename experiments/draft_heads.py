"""Draft heads of five papers on one small target: same data, same number of updates, three seeds.

    python -m experiments.draft_heads                    (about an hour and a half on two cores)
    python -m experiments.draft_heads --stage train --minutes 2     (goes on where it stopped)

Stages: `data` (the target's continuations and features, once), `costs` (step times of target and
heads), `train` (every arm and seed), `further` (EAGLE, HASS, PosS and KOALA from the pair's
trained head instead of half-trained ones: where the papers' methods start), `decode` (tokens per
round of the runtime), `speed` (tokens per second), `report` (head law, figures, JSON). A stage
skips what is in `--work` already; several processes can share `train` and `decode` by `--seeds`
and `--only`.
Expect: at T = 1 PosS above EAGLE above HASS, from random weights; heads from random weights about
level with the distilled small draft, those that go on from the pair's trained head above it; the
adversary at its usual weight shortens. What the papers claim and what is seen here stands in
docs/draft-heads.md.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import tyro
from tokenizers import Tokenizer

from experiments.draft_heads_arms import (
    ARMS,
    BATCH_ROWS,
    CAPACITY,
    CONTEXT,
    FORKED,
    FUSED,
    LATER,
    NEW,
    POSITIONS,
    PROMPT,
    SAME_NETWORK,
    TRAINED,
    Arm,
    Settings,
    add_line,
    costs_of,
    in_time,
    lines_of,
    say,
)
from experiments.draft_heads_runtime import decode, speed
from sdx.calibration.draft_heads import survival_weights, time_heads
from sdx.decoding.heads import bind
from sdx.decoding.llama_target import as_target
from sdx.models.checkpoint import load_model
from sdx.models.heads import create_head, load_head, save_head
from sdx.models.small_steps import PLAIN
from sdx.training import corpus
from sdx.training.head_data import TRAIN, Features, distil, feature_batches, teacher_of
from sdx.training.heads import head_trainer, judged
from sdx.training.trainer import Rates, Schedule

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
    wanted = [(s, a) for s in settings.seeds for a in arms if settings.takes(a.name, s)]
    left = [(s, a) for s, a in wanted if (a.name, s) not in known]
    target, _ = load_model(settings.pair / "target", forms=PLAIN)
    teacher, features = teacher_of(target), Features(settings.work / TRAIN)
    total = len(wanted)
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
