"""Devices: the Hardware record, its TOML files, and the seconds of a transformer step.

    seconds = sum over op groups (linear layers, attention, head) of
                  (compute_seconds^p + memory_seconds^p)^(1/p)
              + layers * layer_overhead + step_overhead + collectives

A measured `StepTable` can stand in for the roofline wherever a Hardware is accepted: real devices
have steps that no roofline has.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from sdx.records import Number, record, static
from sdx.theory.architectures import nearest
from sdx.theory.numerics import float64, p_norm_maximum
from sdx.theory.transformers import (
    Architecture,
    kv_cache_bytes,
    step_operations,
    weight_bytes,
)


@record
class Hardware:
    """One device. Peak rates are the datasheet's (dense); efficiencies are the share that real
    kernels reach; `roofline_exponent` is p. Interconnect: bytes per second in one direction.

    `watts` is the board's power limit, so energy is an upper bound; dollars are per device-hour.
    `on_chip_memory_bytes` is memory that a program can keep a draft in (FPGA block RAM; a GPU's
    cache is none): what of the draft fits is not read from memory in a draft pass.
    """

    peak_flops_per_second: dict[str, Number]
    memory_bandwidth_bytes_per_second: Number
    memory_capacity_bytes: Number
    linear_compute_efficiency: Number = 0.8
    linear_memory_efficiency: Number = 0.85
    attention_compute_efficiency: Number = 0.4
    attention_memory_efficiency: Number = 0.75
    linear_roofline_exponent: Number = 3.0
    attention_roofline_exponent: Number = 3.0
    layer_overhead_seconds: Number = 0.0
    step_overhead_seconds: Number = 0.0
    interconnect_bandwidth_bytes_per_second: Number = 32e9
    interconnect_latency_seconds: Number = 1e-5
    watts: Number = 0.0
    dollars_per_hour: Number = 0.0
    on_chip_memory_bytes: Number = 0.0
    name: str = static(default="")


@record
class GroupTime:
    """One op group's seconds, and what they would be if only one resource existed."""

    compute_seconds: Number
    memory_seconds: Number
    seconds: Number

    @property
    def bound(self) -> str:
        """ "compute" or "memory" (concrete values only)."""
        return "compute" if float(self.compute_seconds) > float(self.memory_seconds) else "memory"


@record
class StepBreakdown:
    """Where a step's seconds go, per device."""

    linear: GroupTime
    attention: GroupTime
    head: GroupTime
    overhead_seconds: Number
    collective_seconds: Number
    seconds: Number

    @property
    def bound(self) -> str:
        """The largest part: "linear/memory", "attention/compute", ..., "overhead", "collective"
        (concrete values only)."""
        groups = {"linear": self.linear, "attention": self.attention, "head": self.head}
        parts = {f"{k}/{g.bound}": float(g.seconds) for k, g in groups.items()}
        parts["overhead"] = float(self.overhead_seconds)
        parts["collective"] = float(self.collective_seconds)
        return max(parts, key=parts.get)


@record
class StepTable:
    """Measured seconds of one model's step on one machine: seconds[batch, new_tokens, context].

    The three grids increase strictly. Between nodes ln seconds is multilinear in ln batch,
    ln new_tokens, ln(1 + context): monotone wherever the data are, never beyond the neighbours,
    differentiable inside cells and one-sided at nodes. Below the grid the edge value holds; above
    it the last slope goes on, if it is positive.
    """

    batches: Any
    new_tokens: Any
    contexts: Any
    seconds: Any
    model: str = static(default="")
    name: str = static(default="")


# ------------------------------------------------------------------------------ roofline


def peak_flops_per_second(hardware: Hardware, dtype: str):
    """Peak rate of matmuls with weights of `dtype`. Formats the device does not multiply in are
    widened: int4 and float4 weights to 16 bits, 16 bits to each other, then to float32."""
    peaks = hardware.peak_flops_per_second
    for choice in (dtype, "bfloat16", "float16", "float32"):
        if choice in peaks:
            return peaks[choice]
    raise ValueError(
        f"{hardware.name}: no peak rate for {dtype} nor a 16 or 32 bit float; "
        "add bfloat16_flops_per_second to its TOML"
    )


def _group(flops, bytes_, rate, bandwidth, exponent) -> GroupTime:
    compute, memory = flops / rate, bytes_ / bandwidth
    return GroupTime(
        compute_seconds=compute,
        memory_seconds=memory,
        seconds=p_norm_maximum(compute, memory, exponent),
    )


def linear_seconds(hardware: Hardware, flops, bytes_, dtype: str = "bfloat16") -> GroupTime:
    """Dense matmuls of `flops` FLOPs that move `bytes_` bytes."""
    h = hardware
    rate = peak_flops_per_second(h, dtype) * h.linear_compute_efficiency
    bandwidth = h.memory_bandwidth_bytes_per_second * h.linear_memory_efficiency
    return _group(flops, bytes_, rate, bandwidth, h.linear_roofline_exponent)


def attention_seconds(hardware: Hardware, flops, bytes_, dtype: str = "bfloat16") -> GroupTime:
    """Attention of `flops` FLOPs over `bytes_` bytes of KV. It multiplies in 16 bits or wider
    whatever the KV's storage."""
    h = hardware
    dtype = dtype if dtype in ("float32", "float16") else "bfloat16"
    rate = peak_flops_per_second(h, dtype) * h.attention_compute_efficiency
    bandwidth = h.memory_bandwidth_bytes_per_second * h.attention_memory_efficiency
    return _group(flops, bytes_, rate, bandwidth, h.attention_roofline_exponent)


@float64
def step_breakdown(
    architecture: Architecture,
    hardware: Hardware,
    batch,
    new_tokens,
    context,
    tensor_parallel=1.0,
    ancestors=None,
    resident_bytes=0.0,
) -> StepBreakdown:
    """Seconds of one step by op group; arguments as `step_seconds`, Hardware only."""
    a, h, tp = architecture, hardware, tensor_parallel
    if isinstance(h, StepTable):
        raise ValueError(f"step table {h.name!r} has no op groups: only step_seconds reads it")
    s = step_operations(a, batch, new_tokens, context, tp, ancestors)
    layers, vocabulary, cache = _read(
        (s.linear_bytes, s.head_bytes, s.attention_bytes), resident_bytes
    )
    linear = linear_seconds(h, s.linear_flops, layers, a.weight_dtype)
    head = linear_seconds(h, s.head_flops, vocabulary, a.weight_dtype)
    attention = attention_seconds(h, s.attention_flops, cache, a.kv_dtype)
    overhead = a.layers * h.layer_overhead_seconds + h.step_overhead_seconds
    # Two all-reduces per layer, log2(tp) hops each: continuous in tp and nothing on one device.
    hops = 2 * a.layers * jnp.log2(tp)
    collective = (
        s.collective_bytes / h.interconnect_bandwidth_bytes_per_second
        + hops * h.interconnect_latency_seconds
    )
    return StepBreakdown(
        linear=linear,
        attention=attention,
        head=head,
        overhead_seconds=overhead,
        collective_seconds=collective,
        seconds=linear.seconds + attention.seconds + head.seconds + overhead + collective,
    )


@float64
def step_seconds(
    architecture: Architecture,
    hardware: Hardware | StepTable,
    batch,
    new_tokens,
    context,
    tensor_parallel=1.0,
    ancestors=None,
    resident_bytes=0.0,
):
    """Seconds of a step over `batch` sequences x `new_tokens` tokens at `context` committed ones.

    `tensor_parallel` devices share the step; `ancestors` as in `step_operations`; `resident_bytes`
    of each device's share stay on chip and are not read: weights first, then KV. With a StepTable
    the measured surface answers: architecture, split, ancestors, residence are not used.
    Differentiable and vmappable in every number.
    """
    if isinstance(hardware, StepTable):
        return _interpolate(hardware, batch, new_tokens, context)
    step = (batch, new_tokens, context, tensor_parallel, ancestors, resident_bytes)
    return step_breakdown(architecture, hardware, *step).seconds


def _read(groups, resident_bytes):
    """The bytes of each group that are left to read when the first ones stay on chip."""
    left = []
    for bytes_ in groups:
        kept = jnp.minimum(bytes_, resident_bytes)
        left.append(bytes_ - kept)
        resident_bytes = resident_bytes - kept
    return left


# ---------------------------------------------------------------------------- step table


def _cell(grid, x):
    """Left node of the cell and the fraction within it: 0 below the grid, above 1 past its end."""
    if grid.shape[0] == 1:
        return 0, 0, jnp.zeros_like(x)
    left = jnp.clip(jnp.searchsorted(grid, x, side="right") - 1, 0, grid.shape[0] - 2)
    fraction = (x - grid[left]) / (grid[left + 1] - grid[left])
    return left, left + 1, jnp.maximum(fraction, 0.0)


def _blend(low, high, fraction):
    """Linear inside the cell; past its end the slope goes on unless it falls."""
    inside = jnp.minimum(fraction, 1.0)
    rise = jnp.maximum(high - low, 0.0)
    return low + inside * (high - low) + (fraction - inside) * rise


def _interpolate(table: StepTable, batch, new_tokens, context):
    batch, new_tokens, context = (jnp.asarray(x, jnp.float64) for x in (batch, new_tokens, context))
    grids = [jnp.asarray(g, jnp.float64) for g in (table.batches, table.new_tokens, table.contexts)]
    logs = jnp.log(jnp.asarray(table.seconds, jnp.float64))
    b0, b1, fb = _cell(jnp.log(grids[0]), jnp.log(batch))
    t0, t1, ft = _cell(jnp.log(grids[1]), jnp.log(new_tokens))
    c0, c1, fc = _cell(jnp.log1p(grids[2]), jnp.log1p(context))
    faces = [[_blend(logs[b, t, c0], logs[b, t, c1], fc) for t in (t0, t1)] for b in (b0, b1)]
    edges = [_blend(low, high, ft) for low, high in faces]
    return jnp.exp(_blend(edges[0], edges[1], fb))


def step_table(batches, new_tokens, contexts, seconds, model="", name="") -> StepTable:
    """A checked StepTable. Raises ValueError for grids that do not increase, a shape that does not
    match them, or seconds that are not positive and finite."""
    grids = dict(batches=batches, new_tokens=new_tokens, contexts=contexts)
    grids = {k: np.asarray(v, np.float64) for k, v in grids.items()}
    seconds = np.asarray(seconds, np.float64)
    for key, grid in grids.items():
        least = 0.0 if key == "contexts" else 1.0
        if grid.ndim != 1 or not grid.size or np.any(np.diff(grid) <= 0) or grid[0] < least:
            raise ValueError(
                f"step table: {key} = {grid.tolist()} must increase strictly from >= {least:g}"
            )
    shape = tuple(g.size for g in grids.values())
    if seconds.shape != shape:
        raise ValueError(f"step table: seconds have shape {seconds.shape}, the grids need {shape}")
    if not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise ValueError("step table: every entry of seconds must be positive and finite")
    return StepTable(**grids, seconds=seconds, model=model, name=name)


# ----------------------------------------------------------------------- capacity, energy


@float64
def memory_required_bytes(architecture: Architecture, batch, context, tensor_parallel=1.0):
    """Weights and KV cache on each of `tensor_parallel` devices. `context` is the longest one
    held (committed + new). KV heads are not split below one per device, latent KV not at all."""
    a = architecture
    split = 1.0 if a.attention == "latent" else jnp.minimum(tensor_parallel, a.kv_heads)
    return weight_bytes(a) / tensor_parallel + kv_cache_bytes(a, batch, context) / split


def require_fit(
    architectures: list[Architecture], hardware: Hardware, batch, context, tensor_parallel=1
) -> None:
    """Raises ValueError if weights and KV of all `architectures` exceed the device's memory."""
    needed = [
        float(memory_required_bytes(a, batch, context, tensor_parallel)) for a in architectures
    ]
    capacity = float(hardware.memory_capacity_bytes)
    if sum(needed) > capacity:
        parts = " + ".join(
            f"{a.name} {n / 1e9:.1f}" for a, n in zip(architectures, needed, strict=True)
        )
        raise ValueError(
            f"weights and KV at batch {batch:g}, context {context:g} need {sum(needed) / 1e9:.1f} "
            f"GB per device ({parts}) but {hardware.name} has {capacity / 1e9:.1f} GB; use more "
            "devices, a smaller batch or context, or narrower weights"
        )


def energy_joules(hardware: Hardware, seconds, tensor_parallel=1.0):
    """Energy of `seconds` on `tensor_parallel` devices at the board's power limit."""
    return hardware.watts * seconds * tensor_parallel


def price_dollars(hardware: Hardware, seconds, tensor_parallel=1.0):
    """Price of `seconds` on `tensor_parallel` devices."""
    return hardware.dollars_per_hour / 3600.0 * seconds * tensor_parallel


# --------------------------------------------------------------------------- TOML files

DEVICES = resources.files("hw_models")
# Record field -> key in the file, whose end is the unit.
KEYS = {
    "memory_bandwidth_bytes_per_second": "memory_bandwidth_bytes_per_second",
    "memory_capacity_bytes": "memory_capacity_bytes",
    "linear_compute_efficiency": "linear_compute_efficiency_fraction",
    "linear_memory_efficiency": "linear_memory_efficiency_fraction",
    "attention_compute_efficiency": "attention_compute_efficiency_fraction",
    "attention_memory_efficiency": "attention_memory_efficiency_fraction",
    "linear_roofline_exponent": "linear_roofline_exponent_dimensionless",
    "attention_roofline_exponent": "attention_roofline_exponent_dimensionless",
    "layer_overhead_seconds": "layer_overhead_seconds",
    "step_overhead_seconds": "step_overhead_seconds",
    "interconnect_bandwidth_bytes_per_second": "interconnect_bandwidth_bytes_per_second",
    "interconnect_latency_seconds": "interconnect_latency_seconds",
    "watts": "board_power_watts",
    "dollars_per_hour": "price_dollars_per_hour",
    "on_chip_memory_bytes": "on_chip_memory_bytes",
}
PEAK_SUFFIX = "_flops_per_second"


def device_names() -> list[str]:
    """Names that `load_hardware` knows without a path."""
    files = (p.name for p in DEVICES.iterdir())
    return sorted(n.removesuffix(".toml") for n in files if n.endswith(".toml"))


def load_hardware(name_or_path: str) -> Hardware:
    """The device of a known name ("h100-sxm", any case) or of a TOML file.

    Raises FileNotFoundError for an unknown name, ValueError for a file that cannot be read.
    """
    known, path = device_names(), Path(name_or_path).expanduser()
    if name_or_path.lower() in known:
        source = DEVICES / f"{name_or_path.lower()}.toml"
    elif path.is_file():
        source = path
    else:
        raise FileNotFoundError(
            f"unknown hardware {name_or_path!r}: neither a known device nor the path of a TOML; "
            + nearest(name_or_path, known)
        )
    try:
        data = tomllib.loads(source.read_text(encoding="utf-8"))
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise ValueError(f"{source} is not valid TOML: {error}; mend the file") from None
    return hardware_from_dict(data, source.name.removesuffix(".toml"))


def hardware_from_dict(data: dict, label: str) -> Hardware:
    """The Hardware of a parsed TOML; every key of KEYS and one `<dtype>_flops_per_second` is
    required. Raises ValueError for a missing, negative or non-numeric value."""
    numbers = data.get("device", {})
    if not isinstance(numbers, dict):
        raise ValueError(f"hardware {label!r}: 'device' must be a table of numbers")
    peaks = {
        k.removesuffix(PEAK_SUFFIX): _number(numbers, k, label)
        for k in numbers
        if k.endswith(PEAK_SUFFIX)
    }
    if not peaks:
        raise ValueError(f"hardware {label!r}: key 'bfloat16_flops_per_second' is missing; add it")
    numbers = {"on_chip_memory_bytes": 0.0} | numbers  # most devices have none to program
    fields = {field: _number(numbers, key, label) for field, key in KEYS.items()}
    return Hardware(name=label, peak_flops_per_second=peaks, **fields)


def _number(numbers: dict, key: str, label: str) -> float:
    if key not in numbers:
        raise ValueError(f"hardware {label!r}: key {key!r} is missing from [device]; add it")
    value = numbers[key]
    may_be_zero = key.endswith(
        ("overhead_seconds", "latency_seconds", "watts", "per_hour", "on_chip_memory_bytes")
    )
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise ValueError(f"hardware {label!r}: {key} = {value!r} is not a number")
    if value < 0 or (value == 0 and not may_be_zero):
        raise ValueError(f"hardware {label!r}: {key} = {value!r} must be positive")
    return float(value)


def hardware_to_toml(hardware: Hardware, sources: dict[str, str], title: str) -> str:
    """The text of a device file: every number with its source beside it. `sources` by file key;
    "" answers for keys that have none of their own."""
    values = {f"{k}{PEAK_SUFFIX}": v for k, v in hardware.peak_flops_per_second.items()}
    values |= {key: getattr(hardware, field) for field, key in KEYS.items()}
    lines = [f"# {title}", "", "[device]"]
    for key, value in values.items():
        source = sources.get(key, sources.get("", "source not stated"))
        lines.append(f"{key} = {float(value):.6g}  # {source}")
    return "\n".join(lines) + "\n"
