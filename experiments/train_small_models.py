"""Trains the small real pair: a 5.5 M target and two drafts distilled from it.

    python -m experiments.train_small_models --target-minutes 70 --draft-minutes 9

Corpus: the Python sources of the running interpreter's standard library, split by file. A draft
first learns from the text alone (cheap: no teacher pass), then from the target's distributions
over the text and over the target's own continuations of it (what it meets when it is used).
Every stage keeps Orbax checkpoints under `--work` and resumes from them; stages can run in
processes of their own; `--stage report` measures what is there. Expect after about an hour on two
free cores: held-out loss of the target at least 0.15 nats below both drafts' (the gate; exit code
1 where it fails), all weights together under 15 MB.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tokenizers import Tokenizer

from sdx.decoding.llama_target import as_target
from sdx.models.cache import Cache, empty_cache
from sdx.models.checkpoint import load_model, save_model
from sdx.models.config import ModelConfig
from sdx.models.llama import Llama
from sdx.models.small_steps import PLAIN
from sdx.training import corpus
from sdx.training.head_data import continuations
from sdx.training.losses import distillation_loss, language_model_loss
from sdx.training.trainer import Schedule, Trainer

VOCABULARY = 2048
shape = functools.partial(
    ModelConfig, vocab_size=VOCABULARY, head_dim=32, max_positions=1024, bos_id=0, eos_id=0
)
CONFIGS = {
    "target": shape(width=320, layers=4, heads=10, kv_heads=5, ffn_width=768),
    "draft_small": shape(
        width=128, layers=1, heads=4, kv_heads=4, ffn_width=352, tie_embedding=True
    ),
    "draft_medium": shape(
        width=160, layers=2, heads=5, kv_heads=5, ffn_width=448, tie_embedding=True
    ),
}
GATE_NATS = 0.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args:
    """How long, where, which part."""

    stage: Literal[
        "all", "target", "draft_small.text", "draft_medium.text", "draft_small", "draft_medium",
        "report",
    ] = "all"  # fmt: skip
    target_minutes: float = 70.0
    text_minutes: float = 5.0
    """Each draft's first part."""
    draft_minutes: float = 9.0
    """Each draft's second part."""
    target_tokens_per_step: int = 4096
    draft_tokens_per_step: int = 2048
    seed: int = 0
    work: Path = Path("out/train_small_models")
    """Checkpoints of unfinished runs."""
    out: Path = Path("experiments/small_pair")
    """Where the finished pair goes."""
    refresh_minutes: float = 5.0
    """The weights in `out` are renewed so often while a run goes on."""


def say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", flush=True)


def tokenizer_of(args: Args) -> Tokenizer:
    """The pair's tokenizer, trained on the train split if it is not there yet."""
    path = args.out / "tokenizer.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        corpus.train_tokenizer(corpus.texts("train"), VOCABULARY).save(str(path))
    return Tokenizer.from_file(str(path))


@jax.jit
def window_loss(model: Llama, window_BxT: jax.Array) -> jax.Array:
    return language_model_loss(model, window_BxT)


def held_out_loss(model: Llama, stream: np.ndarray, tokens: int, length: int = 256) -> float:
    """Mean nats per token over about `tokens` held-out tokens, spread over all files."""
    windows = corpus.held_out_prompts(stream, max(1, tokens // (16 * length)) * 16, length + 1)
    losses = [window_loss(model, jnp.asarray(w)) for w in windows.reshape(-1, 16, length + 1)]
    return float(np.mean(losses))


@functools.partial(jax.jit, static_argnames="count")
def greedy(model: Llama, prompt_BxT: jax.Array, cache: Cache, count: int) -> jax.Array:
    """`[B, count]` greedy tokens after the prompts; `cache` is empty."""
    output = model(prompt_BxT, cache)
    first_B = jnp.argmax(output.logits_BxTxV[:, -1], axis=-1)

    def step(carry, _):
        token_B, cache = carry
        output = model(token_B[:, None], cache)
        return (
            jnp.argmax(output.logits_BxTxV[:, -1], axis=-1),
            cache.append(output.fresh),
        ), token_B

    _, tokens = jax.lax.scan(step, (first_B, cache.append(output.fresh)), None, length=count)
    return tokens.T


def distinct_ngrams(tokens_BxN: np.ndarray, n: int = 8) -> float:
    """Share of distinct n-grams among all n-grams of each text, averaged over texts."""
    shares = []
    for row in np.asarray(tokens_BxN):
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        shares.append(len(set(grams)) / len(grams))
    return float(np.mean(shares))


OWN_TEXTS, PROMPT = 1536, 64  # continuations, tokens of a prompt


def own_text(args: Args, stream: np.ndarray, length: int = 256) -> np.ndarray:
    """The target's continuations of training text, half greedy and half sampled, as one stream of
    `length` tokens each: what a draft sees when it is used. Written once to `work`."""
    path = args.work / "own_text.npy"
    if not path.exists():
        target = as_target(load_model(args.out / "target")[0])
        prompts = corpus.held_out_prompts(stream, OWN_TEXTS, PROMPT)
        text = continuations(
            target,
            prompts,
            length - PROMPT,
            batch=64,
            report=lambda done: say(f"the target's own text: {done} of {OWN_TEXTS}"),
        )
        np.save(path, text.ravel())
    return np.load(path)


def batches_of(stage: str, args: Args, stream: np.ndarray, tokens: int, seed: int) -> Callable:
    """batch(step, progress) of a stage; a draft that learns from the target sees the corpus and
    the target's own text in turns."""
    real = corpus.lengthening_batches(stream, tokens, (256, 512), 0.75, seed)
    if stage not in ("draft_small", "draft_medium"):
        return real
    own = corpus.batches(own_text(args, stream), tokens // 256, 256, seed)
    return lambda step, progress: own[step // 2] if step % 2 else real(step // 2, progress)


STAGES = ("target", "draft_small.text", "draft_medium.text", "draft_small", "draft_medium")


def plan(stage: str, args: Args) -> tuple[Llama, Callable, tuple, Schedule, int]:
    """Of one stage: the model it starts from, its loss and context, its schedule, its batch."""
    name, _, part = stage.partition(".")
    seconds = 60.0
    if name == "target":
        model = Llama(CONFIGS[name], jax.random.key(args.seed))
        schedule = Schedule(seconds=seconds * args.target_minutes)
        return model, language_model_loss, (), schedule, args.target_tokens_per_step
    if part:
        model = Llama(CONFIGS[name], jax.random.key(args.seed + 1))
        schedule = Schedule(seconds=seconds * args.text_minutes, decay=0.1)
        return model, language_model_loss, (), schedule, args.draft_tokens_per_step
    model, _ = load_model(args.work / f"{name}.text", forms=PLAIN)
    teacher, _ = load_model(args.out / "target", forms=PLAIN)
    schedule = Schedule(seconds=seconds * args.draft_minutes, warmup_steps=20, decay=0.6)
    return model, distillation_loss, (teacher,), schedule, args.draft_tokens_per_step


def train(stage: str, args: Args, streams: dict[str, np.ndarray]) -> None:
    """Trains (or goes on training) one model and writes it: text stages to `work`, others to the
    pair's folder."""
    model, loss, context, schedule, tokens = plan(stage, args)
    seed = args.seed + STAGES.index(stage)
    trainer = Trainer(
        model,
        loss,
        batches_of(stage, args, streams["train"], tokens, seed),
        schedule,
        context=context,
        folder=args.work / "checkpoints" / stage,
    )
    resumed = f", resumed at step {trainer.progress.step}" if trainer.resume() else ""
    size, minutes = model.config.parameters() / 1e6, schedule.seconds / 60
    say(f"{stage}: {size:.2f} M parameters, {minutes:g} minutes{resumed}")
    refreshed = trainer.progress.seconds
    folder = (args.work if "." in stage else args.out) / stage

    def report(trainer: Trainer) -> None:
        nonlocal refreshed
        now = trainer.progress
        share = schedule.progress(now.step, now.seconds)
        text = f"{stage} {share:4.0%} step {now.step} loss {now.loss:.3f}"
        if now.seconds - refreshed > 60 * args.refresh_minutes:
            refreshed = now.seconds
            save_model(folder, trainer.model)
            text += f" held-out {held_out_loss(trainer.model, streams['held_out'], 8192):.3f}"
        say(text + f" ({now.steps_per_second * tokens:.0f} tokens/s)")

    done = trainer.fit(report)
    save_model(folder, trainer.model)
    record = {
        "steps": done.step,
        "tokens": done.step * tokens,
        "tokens_per_step": tokens,
        "seconds": round(done.seconds, 1),
        "seed": seed,
    }
    (args.work / f"{stage}.json").write_text(json.dumps(record))


def measure(args: Args, streams: dict[str, np.ndarray]) -> dict:
    """Losses, distinct 8-grams and how the models were made: `training.json`."""
    prompts = jnp.asarray(corpus.held_out_prompts(streams["held_out"], 20, 64))
    models = {}
    for name, config in CONFIGS.items():
        model, _ = load_model(args.out / name)
        models[name] = {
            "parameters": config.parameters(),
            "held_out_loss_nats": round(held_out_loss(model, streams["held_out"], 32768), 4),
            "train_loss_nats": round(held_out_loss(model, streams["train"], 16384), 4),
            "distinct_8_grams_greedy": round(
                distinct_ngrams(greedy(model, prompts, empty_cache(config, 20, 320), 256)), 4
            ),
            "stages": {
                stage: _facts(args.work / f"{stage}.json")
                for stage in STAGES
                if stage.split(".")[0] == name
            },
        }
    text = corpus.held_out_prompts(streams["held_out"], 20, 256)
    loss = {name: entry["held_out_loss_nats"] for name, entry in models.items()}
    margin = min(loss["draft_small"], loss["draft_medium"]) - loss["target"]
    return {
        "models": models,
        "gate_nats": GATE_NATS,
        "margin_nats": round(margin, 4),
        "distinct_8_grams_of_real_text": round(distinct_ngrams(text), 4),
        "corpus": {name: len(stream) for name, stream in streams.items()},
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
            "numpy": np.__version__,
        },
        "device": f"{platform.machine()} CPU",
    }


def _facts(path: Path) -> dict:
    """What a finished stage left: steps, tokens, seconds, seed."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: this model's training has not finished; run its stage")
    return json.loads(path.read_text())


def main(args: Args) -> int:
    start = time.monotonic()
    tokenizer = tokenizer_of(args)
    streams = {
        split: corpus.tokenise(tokenizer, corpus.texts(split)) for split in ("train", "held_out")
    }
    args.work.mkdir(parents=True, exist_ok=True)
    for stage in STAGES:
        if args.stage in ("all", stage):
            train(stage, args, streams)
    if args.stage not in ("all", "report"):
        return 0
    record = measure(args, streams)
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    for name, entry in record["models"].items():
        say(f"{name}: held-out {entry['held_out_loss_nats']:.3f} nats")
    say(f"margin {record['margin_nats']:.3f} nats; {time.monotonic() - start:.0f} s in all")
    if record["margin_nats"] < GATE_NATS:
        say(f"the target is not {GATE_NATS} nats below both drafts: train it longer")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
