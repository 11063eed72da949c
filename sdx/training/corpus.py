"""Real text that is on every machine: the Python sources of the running standard library.

Files are split into train and held-out by a hash of their path, so that the split is the same on
every machine and no held-out file is ever trained on. A batch is a pure function of the step
(Grain's random access), so that a resumed training sees what an unbroken one would have seen.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import grain
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
SKIPPED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}
SKIPPED |= {"site-packages", "dist-packages", "__pycache__"}
HELD_OUT_SHARE = 12  # one file in so many
Split = Literal["train", "held_out"]


def standard_library(root: Path | None = None) -> dict[str, str]:
    """Path within the library -> source text; without tests, code tables and vendored packages.

    Raises FileNotFoundError where the interpreter carries no sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not SKIPPED & set(relative.parts):
            files[relative.as_posix()] = path.read_text(encoding="utf-8", errors="replace")
    if not files:
        raise FileNotFoundError(f"{root}: no Python sources; use an interpreter that has them")
    return files


def split_of(path: str) -> Split:
    """Which side a file is on."""
    digest = hashlib.sha256(path.encode()).digest()
    return "held_out" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def texts(split: Split, files: dict[str, str] | None = None) -> list[str]:
    """The files of one side, in order of their paths."""
    files = standard_library() if files is None else files
    return [text for path, text in sorted(files.items()) if split_of(path) == split]


def train_tokenizer(train_texts: list[str], vocab_size: int = 2048) -> Tokenizer:
    """Byte-level BPE; id 0 is the end-of-text mark. Any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(train_texts, trainer)
    return tokenizer


def tokenise(tokenizer: Tokenizer, documents: list[str], mark: int | None = None) -> np.ndarray:
    """All documents in one int32 stream, an end-of-text mark (or the id `mark`) before each and at
    the end."""
    mark = tokenizer.token_to_id(END_OF_TEXT) if mark is None else mark
    stream = [mark]
    for encoding in tokenizer.encode_batch(documents):
        stream += [*encoding.ids, mark]
    return np.asarray(stream, np.int32)


class Windows:
    """Windows of `length + 1` tokens (inputs and their successors), `length` apart."""

    def __init__(self, stream: np.ndarray, length: int, offset: int = 0):
        if len(stream) < length + 1 + offset:
            raise ValueError(f"{len(stream)} tokens: a window of {length} needs more text")
        self.stream, self.length, self.offset = stream, length, offset

    def __len__(self) -> int:
        return (len(self.stream) - 1 - self.offset) // self.length

    def __getitem__(self, index: int) -> np.ndarray:
        start = self.offset + int(index) * self.length
        return self.stream[start : start + self.length + 1]


def batches(stream: np.ndarray, batch: int, length: int, seed: int) -> grain.MapDataset:
    """An endless shuffled dataset of `[batch, length + 1]`; `dataset[step]` is step's batch."""
    dataset = grain.MapDataset.source(Windows(stream, length)).seed(seed).shuffle().repeat()
    return dataset.batch(batch, drop_remainder=True)


def lengthening_batches(
    stream: np.ndarray, tokens: int, lengths: tuple[int, int], switch: float, seed: int
) -> Callable[[int, float], np.ndarray]:
    """batch(step, progress): `tokens` tokens per step, in short windows up to progress `switch`
    and in long ones after: short contexts are cheaper, the last part teaches long ones."""
    short, long = (batches(stream, tokens // n, n, seed) for n in lengths)
    return lambda step, progress: (short if progress < switch else long)[step]


def held_out_prompts(stream: np.ndarray, count: int, length: int) -> np.ndarray:
    """`[count, length]` prompts, evenly spread over a (held-out) token stream."""
    starts = np.linspace(0, len(stream) - length - 1, count).astype(int)
    return np.stack([stream[s : s + length] for s in starts])
