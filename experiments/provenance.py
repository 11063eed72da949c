"""Where a result came from: device, versions, seed, date. Written into every committed result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import date

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "optimistix", "numpy")


def _processor() -> str:
    """Model name of the CPU, as the kernel tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def provenance(seed: int | None = None) -> dict:
    """Facts a reader needs to judge or repeat a run; JSON-ready."""
    device = jax.devices()[0]
    return {
        "date": date.today().isoformat(),
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "platform": device.platform,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "seed": seed,
    }
