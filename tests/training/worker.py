"""A small training in a process of its own, to be killed, or spread over devices and processes.

    python worker.py FOLDER LAYOUT [COORDINATOR PROCESSES INDEX]

LAYOUT: none (one device, a checkpoint at every step), data, fsdp, or several of them with commas
between, each in a folder of its name below FOLDER.
"""

import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")

import numpy as np  # noqa: E402

from sdx.models.config import ModelConfig  # noqa: E402
from sdx.models.llama import Llama  # noqa: E402
from sdx.training import corpus, devices  # noqa: E402
from sdx.training.losses import language_model_loss  # noqa: E402
from sdx.training.trainer import Rates, Schedule, Trainer  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=16, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_width=16
)
STREAM = np.tile(np.arange(16, dtype=np.int32), 40)  # after i comes i + 1
BATCH, STEPS = 8, 24


def new_trainer(folder=None, layout="none", steps=STEPS, say=print) -> Trainer:
    """One row of the batch per device where there are eight."""
    dataset = corpus.batches(STREAM, BATCH, 8, seed=1)
    rows = devices.own_rows(BATCH)
    return Trainer(
        Llama(CONFIG, jax.random.key(0)),
        language_model_loss,
        lambda step, progress: dataset[step][rows],
        Schedule(steps=steps, warmup_steps=4),
        rates=Rates(newton_schulz_steps=2),
        folder=folder,
        mesh=None if layout == "none" else devices.mesh_of(),
        layout="fsdp" if layout == "fsdp" else "data",
        say=say,
    )


def main(folder: str, layout: str, *processes: str) -> None:
    if processes:
        coordinator, count, index = processes
        devices.join(coordinator, int(count), int(index))
    for each in layout.split(","):
        trainer = new_trainer(Path(folder) / each if "," in layout else Path(folder), each)
        trainer.resume()
        trainer.fit(save_steps=1 if each == "none" else STEPS)


if __name__ == "__main__":
    main(*sys.argv[1:])
