"""The fitted model behind the FPGA scripts: experiments/results/fpga_fit.json, read back."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import numpy as np

from experiments.fpga_fit import throughput, unpack

RESULT = Path(__file__).parent.parent / "experiments" / "results" / "fpga_fit.json"
LENGTHS = np.arange(1.0, 81.0)
V80 = (128.0 * 128, 819e9)


@functools.cache
def result() -> dict:
    return json.loads(RESULT.read_text(encoding="utf-8"))


def memory_line():
    line = result()["memory_line"]
    return line["weight_bytes"], line["bytes_per_context_token"]


def parameters(held_out: str | None = None):
    """Free parameters of the log-law fit, on all boards or without one."""
    log = result()["log"]
    return log["leave_one_board_out"][held_out]["free"] if held_out else log["free"]


def law_and_roofline():
    with jax.enable_x64(True):
        law, roofline = unpack(jax.numpy.asarray(parameters()), "log", memory_line())
    return jax.tree.map(float, (law, roofline))


def speed(elements, bandwidth, context, length, held_out: str | None = None) -> np.ndarray:
    """Tokens per second, numpy; arguments broadcast."""
    with jax.enable_x64(True):
        free = jax.numpy.asarray(parameters(held_out))
        return np.asarray(
            throughput(free, "log", memory_line(), elements, bandwidth, context, length)
        )


def autoregressive(bandwidth, context) -> float:
    weights, per_token = memory_line()
    return bandwidth / (weights + per_token * context)
