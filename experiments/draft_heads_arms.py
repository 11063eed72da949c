"""What experiments/draft_heads.py compares, and what its stages share: arms, settings, lines."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Literal

from sdx.calibration.draft_heads import StepCosts
from sdx.training.heads import Plan

PROMPT, NEW, POSITIONS = 32, 96, 8
UNROLLED = 4  # steps that unrolled arms train; PosS has specialists for as many
FUSED = (1, 2, 4)  # EAGLE-3's low, middle and high: of four layers the last one's output is high
CONTEXT, CAPACITY = 80, 128  # of step times
BATCH_ROWS = 4
DEPTHS = (1, 2, 3)  # lookaheads whose tokens per second are measured


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


def koala(k: int, adversarial: float = 0.2) -> Plan:
    return Plan(recipe="koala", layers=k, adversarial=adversarial)


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
LATER = (
    *(
        Arm(f"{TRAINED} {arm.name}", arm.plan, TRAINED)
        for arm in ARMS
        if arm.name in ("EAGLE", "HASS", "PosS-1", "PosS-2", "PosS-3", "KOALA K=1")
    ),
    Arm(f"{TRAINED} KOALA 0.05", koala(1, 0.05), TRAINED),  # the least lambda of the paper's range
)
SAME_NETWORK = {  # arms whose network is another arm's, with other weights
    "HASS": "EAGLE",
    "EAGLE-3 TV": "EAGLE-3",
    "EAGLE-3 throughput": "EAGLE-3",
    "KOALA K=1": "EAGLE",
    "KOALA K=2": "EAGLE K=2",
    "KOALA K=3": "EAGLE K=3",
    **{f"{TRAINED} {name}": "EAGLE" for name in ("EAGLE", "HASS", "KOALA K=1", "KOALA 0.05")},
    **{f"{TRAINED} PosS-{n}": f"PosS-{n}" for n in (1, 2, 3)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run."""

    stage: Literal["all", "data", "costs", "train", "further", "decode", "speed", "report"] = "all"
    minutes: float = float("inf")
    """Stop before the next arm after so long; a later call goes on."""
    updates: int = 600
    """Of four texts, for every arm that starts from random weights."""
    further: int = 80
    """Updates of the arms that go on from the pair's trained head."""
    sequences: int = 1024
    """Training sequences of 128 tokens, 32 of them a prompt."""
    held_out: int = 48
    """Sequences of each temperature that heads are judged on."""
    seeds: tuple[int, ...] = (0, 1, 2)
    only: tuple[str, ...] = ()
    """Train and decode these arms only (with `seeds`: the share of one of several processes)."""
    pair: Path = Path("experiments/small_pair")
    work: Path = Path("out/draft_heads")
    results: Path = Path("experiments/results")

    def takes(self, arm: str, seed: int) -> bool:
        """Whether this process trains or decodes this head."""
        return seed in self.seeds and (not self.only or arm in self.only)


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


def costs_of(settings: Settings) -> StepCosts:
    """What `costs` measured; arms of one network share its numbers."""
    facts = json.loads((settings.work / "costs.json").read_text())
    for part in (facts["first"], facts["step"]):
        part |= {arm: part[network] for arm, network in SAME_NETWORK.items()}
    return StepCosts(**facts | {"target": {int(x): s for x, s in facts["target"].items()}})
