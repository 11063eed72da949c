"""A trained pair as it is studied on this machine: its networks, and held-out text to decode.

A pair is a folder with target/, draft_*/, tokenizer.json, and perhaps a draft head in head/.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sdx.decoding.heads import bind
from sdx.decoding.llama_target import as_target
from sdx.models.checkpoint import load_model
from sdx.models.heads import is_head, load_head
from sdx.records import DrafterSpec
from sdx.theory.costs import draft_architecture
from sdx.theory.transformers import Architecture, load_architecture
from sdx.training import corpus


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Which pair, how much it decodes, how often."""

    pair: Path = Path("experiments/small_pair")
    """Folder of the target, its drafts and their tokenizer."""
    prompts: int = 50
    """Held-out prompts to decode."""
    calibration_prompts: int = 50
    """Other held-out prompts: acceptance and step times come from them."""
    prompt_tokens: int = 64
    new_tokens: int = 128
    repeats: int = 3
    """Turns over all prompts."""
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its drafts, as networks and as architectures (float32, as they run here)."""

    target: Any
    drafts: dict[str, Any]
    architectures: dict[str, Architecture]
    calibration_prompts: list[list[int]]
    prompts: list[list[int]]


def load_pair(settings: Settings) -> Pair:
    """The networks, and two disjoint sets of held-out prompts, alternating through the text."""
    folder = settings.pair
    names = sorted(p.parent.name for p in folder.glob("draft_*/config.json"))
    if not names:
        raise FileNotFoundError(
            f"{folder}: no draft_*/config.json; train the pair first "
            "(python -m experiments.train_small_models) or name another folder with --pair"
        )
    models = {name: load_model(folder / name)[0] for name in ("target", *names)}
    architectures = {
        name: load_architecture(str(folder / name), "float32", "float32") for name in models
    }
    target = as_target(models["target"])
    drafts = {name: as_target(models[name]) for name in names}
    if is_head(folder / "head"):
        head = bind(load_head(folder / "head"), target)
        kind, layers = head.head.config.kind, head.head.config.layers
        drafts[f"{kind}_head"] = head
        spec = DrafterSpec(family=kind, layers=layers, weight_dtype="float32")
        architectures[f"{kind}_head"] = draft_architecture(spec, architectures["target"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream = corpus.tokenise(tokenizer, corpus.texts("held_out"))
    count = settings.prompts + settings.calibration_prompts
    windows = corpus.held_out_prompts(stream, count, settings.prompt_tokens).tolist()
    # Every k-th window is for decoding: both sets are spread over all files.
    chosen = set(np.linspace(0, count - 1, settings.prompts).round().astype(int).tolist())
    return Pair(
        target=target,
        drafts=drafts,
        architectures=architectures,
        calibration_prompts=[w for i, w in enumerate(windows) if i not in chosen],
        prompts=[w for i, w in enumerate(windows) if i in chosen],
    )


def is_head_name(name: str) -> bool:
    """Whether a draft of `Pair.drafts` is a head."""
    return name.endswith("_head")


def context_and_capacity(settings: Settings) -> tuple[int, int]:
    """Mean context while decoding, and the slots that the runtime will allocate."""
    longest = settings.prompt_tokens + settings.new_tokens
    capacity = -(-longest // 32) * 32
    return settings.prompt_tokens + settings.new_tokens // 2, capacity
