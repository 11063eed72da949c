"""A machine's roofline and step tables: timed here, or read from a table measured elsewhere."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sdx.calibration import measure
from sdx.calibration.hardware import HardwareFit, fit_hardware
from sdx.models.checkpoint import load_model
from sdx.models.config import ModelConfig
from sdx.models.llama import Llama
from sdx.records import record, static
from sdx.theory.hardware import StepTable
from sdx.theory.transformers import Architecture, architecture_from_config

# Random weights take the same time as trained ones. Two sizes tell overheads from bandwidth.
DEFAULT_SHAPES = {
    "random 5 M": ModelConfig(
        vocab_size=2048, width=320, layers=4, heads=10, kv_heads=5, head_dim=32, ffn_width=768
    ),
    "random 0.5 M": ModelConfig(
        vocab_size=2048, width=128, layers=1, heads=4, kv_heads=4, head_dim=32, ffn_width=352
    ),
}


@record
class Machine:
    """The fitted roofline beside the tables it was fitted to."""

    fit: HardwareFit
    tables: tuple[StepTable, ...]
    title: str = static(default="")

    def data(self) -> dict[str, Any]:
        """Plain data for JSON: tables, residuals, fitted numbers."""
        hardware = self.fit.hardware
        return {
            "title": self.title,
            "mean_absolute_error": float(self.fit.mean_absolute_error),
            "largest_error": float(self.fit.largest_error),
            "hardware": {
                key: value if isinstance(value, dict | str) else float(value)
                for key, value in vars(hardware).items()
            },
            "residuals": dict(
                zip(
                    self.fit.labels,
                    np.asarray(self.fit.relative_errors, float).tolist(),
                    strict=True,
                )
            ),
            "step_tables": [
                {
                    "model": t.model,
                    "batches": np.asarray(t.batches).tolist(),
                    "new_tokens": np.asarray(t.new_tokens).tolist(),
                    "contexts": np.asarray(t.contexts).tolist(),
                    "seconds": np.asarray(t.seconds).tolist(),
                }
                for t in self.tables
            ],
        }

    def lines(self) -> list[str]:
        """For a person."""
        lines = []
        for table in self.tables:
            contexts = ", ".join(f"{c:g}" for c in np.asarray(table.contexts))
            lines.append(f"{table.model}: milliseconds per step (contexts {contexts})")
            for b, batch in enumerate(np.asarray(table.batches)):
                for t, tokens in enumerate(np.asarray(table.new_tokens)):
                    row = "  ".join(f"{1e3 * s:8.3f}" for s in np.asarray(table.seconds)[b, t])
                    lines.append(f"    batch {batch:g}, {tokens:3g} tokens: {row}")
        h = self.fit.hardware
        ((dtype, rate),) = h.peak_flops_per_second.items()
        lines += [
            f"roofline: {rate / 1e9:.1f} GFLOP/s ({dtype}), "
            f"{h.memory_bandwidth_bytes_per_second / 1e9:.1f} GB/s, "
            f"{1e6 * h.layer_overhead_seconds:.0f} us per layer, "
            f"{1e6 * h.step_overhead_seconds:.0f} us per step",
            f"roofline against the tables: mean error {100 * self.fit.mean_absolute_error:.1f} %, "
            f"largest {100 * self.fit.largest_error:.1f} %",
        ]
        return lines


def time_here(
    folders: Sequence[str],
    tokens: Sequence[int],
    contexts: Sequence[int],
    repeats: int = 7,
    memory_bytes: float = 16e9,
    report: measure.Progress = measure.silent,
) -> Machine:
    """Times forward passes on this machine and fits its roofline.

    folders: checkpoints (none: two random decoders); every pass runs inside the decoding loop, all
    steps in turns, medians of `repeats`.
    """
    if repeats < 1:
        raise ValueError(f"repeats {repeats} must be at least 1")
    models, architectures = {}, []
    for folder in folders:
        model, config = load_model(folder)
        models[Path(folder).name] = model
        architectures.append(_architecture(Path(folder).name, config))
    if not folders:
        for name, config in DEFAULT_SHAPES.items():
            models[name] = Llama(config, jax.random.key(0))
            architectures.append(_architecture(name, config))
    timers = {}
    for name, model in models.items():
        found = measure.target_timers(model, tokens, contexts, rounds=16, report=report)
        timers |= {(name, *key): timer for key, timer in found.items()}
    samples = measure.interleaved(timers, repeats, report)
    tables = tuple(
        measure.table_of_medians(
            {key[1:]: value for key, value in samples.items() if key[0] == name}, name
        )
        for name in models
    )
    title = f"{platform.processor() or platform.machine()}, {jax.default_backend()}, timed by sdx"
    fit = fit_hardware(architectures, tables, memory_capacity_bytes=memory_bytes)
    return Machine(fit=fit, tables=tables, title=title)


def _architecture(name: str, config: ModelConfig) -> Architecture:
    """As it runs here: float32 weights and cache."""
    return architecture_from_config(config.to_hf(), name, "float32", "float32")


def fit_table(
    architecture: Architecture, table: StepTable, memory_bytes: float = 16e9, title: str = ""
) -> Machine:
    """A roofline from one model's steps, measured elsewhere."""
    fit = fit_hardware(
        [architecture],
        [table],
        name=table.name or "measured",
        memory_capacity_bytes=memory_bytes,
    )
    return Machine(fit=fit, tables=(table,), title=title or f"steps of {table.model}")
