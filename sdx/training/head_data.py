"""What draft heads learn from: the target's own continuations, and its features of them.

Self-distillation: prompts from a token stream, continued by the target through our decoder, greedy
and sampled alternately, so that a head sees the text it will have to draft. The target reads every
sequence once; its features go to the disk as float16 and come back memory-mapped through Grain. A
batch is a pure function of the step: an iterator's state is the step, which the trainer keeps.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from sdx.decoding.generation import Sampling, generate
from sdx.decoding.llama_target import as_target
from sdx.models.cache import empty_cache
from sdx.models.llama import Llama
from sdx.training.devices import own_rows
from sdx.training.head_losses import Teacher

TOKENS, LAST, FUSED, FACTS = "tokens.npy", "last.npy", "fused.npy", "data.json"
TRAIN, GREEDY, SAMPLED = "train", "greedy", "sampled"


def teacher_of(target: Llama) -> Teacher:
    """The parts of a target that training reads."""
    return Teacher(target.parts(), target.norm_D[...], target.config.norm_eps)


def continuations(
    target: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperatures: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    batch: int = 32,
    report: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """`[count, prompt + new_tokens]` int32: prompts of one length and what the target makes of
    them; group i of `batch` prompts at temperature i mod len(temperatures)."""
    done = []
    for group, start in enumerate(range(0, len(prompts), batch)):
        part = [list(map(int, prompt)) for prompt in prompts[start : start + batch]]
        padded = part + [part[-1]] * (batch - len(part))  # one shape, one compilation
        sampling = Sampling(temperature=float(temperatures[group % len(temperatures)]))
        found = generate(
            target,
            None,
            padded,
            sampling=sampling,
            max_new_tokens=new_tokens,
            key=seed + group,
            stop_ids=(),
        )
        done += [p + new for p, new in zip(part, found.tokens, strict=False)]
        report(len(done))
    return np.asarray(done, np.int32)


@functools.partial(jax.jit, static_argnames="layers")
def read_layers(target: Llama, tokens_BxT: jax.Array, layers: tuple[int, ...]):
    """float16 (the last layer's output `[B, T, D]`, the outputs of `layers`, joined)."""
    output = target(tokens_BxT, empty_cache(target.config, tokens_BxT.shape[0], 1))
    fused = [output.layers[layer - 1] for layer in layers] or [output.layers[-1][..., :0]]
    return output.layers[-1].astype(jnp.float16), jnp.concatenate(fused, -1).astype(jnp.float16)


def write_features(
    folder: Path,
    target: Llama,
    tokens_NxT: np.ndarray,
    layers: tuple[int, ...] = (),
    batch: int = 16,
    facts: dict[str, Any] | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> None:
    """The target's features of all sequences into `folder`: tokens.npy `[N, T]`, last.npy
    `[N, T, D]`, fused.npy `[N, T, len(layers) * D]` and data.json, written last."""
    folder.mkdir(parents=True, exist_ok=True)
    N, T = tokens_NxT.shape
    np.save(folder / TOKENS, tokens_NxT)
    D = target.config.width
    shapes = {LAST: (N, T, D), FUSED: (N, T, len(layers) * D)}
    files = {
        name: np.lib.format.open_memmap(folder / name, "w+", np.float16, shape)
        for name, shape in shapes.items()
        if shape[-1]
    }
    for start in range(0, N, batch):
        part = tokens_NxT[start : start + batch]
        padded = np.concatenate([part, np.repeat(part[-1:], batch - len(part), axis=0)])
        read = read_layers(target, jnp.asarray(padded), layers)
        for file, value in zip(files.values(), read, strict=False):
            file[start : start + len(part)] = np.asarray(value)[: len(part)]
        report(start + len(part))
    for file in files.values():
        file.flush()
    partial = folder / (FACTS + ".partial")
    partial.write_text(json.dumps({"sequences": N, "tokens": T, "layers": layers, **(facts or {})}))
    os.replace(partial, folder / FACTS)


class Features:
    """The sequences of a folder that `write_features` wrote, memory-mapped; a Grain source.

    Item i: {"tokens" [T], "last" [T, D] float16, "fused" [T, F] float16 if there are some}.
    Raises FileNotFoundError if the folder is missing or was not finished.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / FACTS).is_file():
            raise FileNotFoundError(f"{folder}: no features of a target; write them first")
        self.facts = json.loads((self.folder / FACTS).read_text())
        names = {"tokens": TOKENS, "last": LAST, "fused": FUSED}
        self.arrays = {
            key: np.load(self.folder / name, mmap_mode="r")
            for key, name in names.items()
            if (self.folder / name).is_file()
        }

    def __len__(self) -> int:
        return len(self.arrays["tokens"])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {key: np.asarray(array[int(index)]) for key, array in self.arrays.items()}

    def all(self, most: int | None = None) -> dict[str, np.ndarray]:
        """The first `most` sequences as one batch."""
        return {key: np.asarray(array[:most]) for key, array in self.arrays.items()}


def distil(
    folder: Path,
    target: Llama,
    prompts_NxT: np.ndarray,
    held_out_NxT: np.ndarray,
    new_tokens: int,
    layers: tuple[int, ...] = (),
    seed: int = 0,
    batch: int = 32,
    report: Callable[[str], None] = lambda note: None,
) -> None:
    """What trainings of heads for one target read, in three folders below `folder`: `train`, the
    target's continuations of `prompts`, greedy and sampled in turn; `greedy` and `sampled`, of
    `held_out`, on which heads are judged. Finished folders are left alone.

    layers: whose outputs EAGLE-3 fuses. Raises ValueError for folders of another target or text.
    """
    wanted = {
        TRAIN: (prompts_NxT, (0.0, 1.0), seed),
        GREEDY: (held_out_NxT, (0.0,), seed + 1000),
        SAMPLED: (held_out_NxT, (1.0,), seed + 2000),
    }
    whose = hashlib.sha256(np.asarray(target.norm_D[...]).tobytes()).hexdigest()[:16]
    for name, (prompts, temperatures, seed) in wanted.items():
        facts = {
            "target": whose,
            "prompts": hashlib.sha256(np.asarray(prompts, np.int32).tobytes()).hexdigest()[:16],
            "new_tokens": new_tokens,
            "seed": seed,
        }
        if (folder / name / FACTS).is_file():
            known = Features(folder / name).facts
            if any(known.get(key) != value for key, value in facts.items()):
                raise ValueError(
                    f"{folder / name}: features of another target or text; choose another folder"
                )
            if layers and layers != tuple(known["layers"]):
                raise ValueError(
                    f"{folder / name}: features of layers {known['layers']}, this head fuses "
                    f"{list(layers)}; choose another folder"
                )
            continue
        count = len(prompts)
        text = continuations(
            as_target(target), prompts, new_tokens, temperatures, seed, batch,
            report=lambda done, name=name, count=count: report(f"{name}: {done} of {count} texts"),
        )  # fmt: skip
        write_features(folder / name, target, text, layers, facts=facts)
        report(f"{name}: {len(text)} texts with features")


def feature_batches(
    features: Features, batch: int, seed: int, with_fused: bool = False
) -> Callable[[int, float], dict[str, np.ndarray]]:
    """`batches(step, progress)` for the trainer: this process's rows of the step's batch and the
    step's seed (of noise). Endless, shuffled anew in every pass."""
    if len(features) < batch:
        raise ValueError(f"{len(features)} sequences are fewer than a batch of {batch}")
    dataset = grain.MapDataset.source(features).seed(seed).shuffle().repeat()
    rows = range(batch)[own_rows(batch)]
    names = ("tokens", "last", "fused") if with_fused else ("tokens", "last")

    def batches(step: int, progress: float) -> dict[str, np.ndarray]:
        items = [dataset[step * batch + row] for row in rows]
        joined = {name: np.stack([item[name] for item in items]) for name in names}
        return joined | {"seed": np.uint32(seed * 1_000_003 + step)}

    return batches
