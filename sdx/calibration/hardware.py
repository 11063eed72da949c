"""Measured step times -> the roofline of the machine they were measured on.

A StepTable answers for one model; the fitted `Hardware` answers for models that do not exist yet.
How far the two are apart is part of the result: real devices have steps that no roofline has.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optimistix

from sdx.records import Number, record, static
from sdx.theory.hardware import Hardware, StepTable, hardware_to_toml, step_seconds
from sdx.theory.numerics import float64
from sdx.theory.transformers import Architecture, step_operations

# Standard deviations that one e-fold of a parameter away from its start costs, in units of the
# residuals: far weaker than any measured time, strong enough to hold what the table does not show
# (a machine that is never bandwidth-bound says nothing of its bandwidth).
PRIOR_WEIGHT = 0.01


@record
class HardwareFit:
    """The fitted roofline and its error.

    relative_errors[i]: fitted / measured - 1 of the i-th measured step, in the order `labels`;
    `mean_absolute_error` and `largest_error` of these.
    """

    hardware: Hardware
    relative_errors: Number
    mean_absolute_error: Number
    largest_error: Number
    labels: tuple[str, ...] = static(default=())
    converged: bool = static(default=True)

    def to_toml(self, title: str) -> str:
        """A device file for `load_hardware`; every number is named as fitted or as stated."""
        percent = f"{100 * float(self.mean_absolute_error):.1f} %"
        fitted = f"fitted on {len(self.labels)} measured steps, mean error {percent}"
        stated = "not fitted: stated by the caller"
        keys = (
            "memory_capacity_bytes",
            "interconnect_bandwidth_bytes_per_second",
            "interconnect_latency_seconds",
            "board_power_watts",
            "price_dollars_per_hour",
        )
        text = hardware_to_toml(self.hardware, {"": fitted} | dict.fromkeys(keys, stated), title)
        lines = ["", "# Residuals: fitted / measured - 1", "[residuals]"]
        lines += [
            f'"{label}" = {float(error):+.4f}'
            for label, error in zip(self.labels, np.asarray(self.relative_errors), strict=True)
        ]
        return text + "\n".join(lines) + "\n"


def _points(table: StepTable):
    """Every node of a table: [n, 3] of (batch, new_tokens, context) and its seconds [n]."""
    axes = [np.asarray(a, float) for a in (table.batches, table.new_tokens, table.contexts)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    return grid, np.asarray(table.seconds, float).reshape(-1)


def _hardware(log_parameters, dtype: str, capacity_bytes, name: str) -> Hardware:
    """Efficiencies of the linear layers are 1: their reachable rates *are* the peak rates here."""
    rate, bandwidth, attention_rate, attention_bandwidth, bend, layer, step = log_parameters
    p = 1.0 + jnp.exp(bend)
    return Hardware(
        name=name,
        peak_flops_per_second={dtype: jnp.exp(rate)},
        memory_bandwidth_bytes_per_second=jnp.exp(bandwidth),
        memory_capacity_bytes=capacity_bytes,
        linear_compute_efficiency=1.0,
        linear_memory_efficiency=1.0,
        attention_compute_efficiency=jnp.exp(attention_rate),
        attention_memory_efficiency=jnp.exp(attention_bandwidth),
        linear_roofline_exponent=p,
        attention_roofline_exponent=p,
        layer_overhead_seconds=jnp.exp(layer),
        step_overhead_seconds=jnp.exp(step),
    )


def _predicted(log_parameters, architectures, grids, dtype):
    hardware = _hardware(log_parameters, dtype, 1.0, "")
    return jnp.concatenate(
        [
            jax.vmap(lambda x, a=a: step_seconds(a, hardware, x[0], x[1], x[2]))(grid)
            for a, grid in zip(architectures, grids, strict=True)
        ]
    )


def _residuals(log_parameters, data):
    architectures, grids, log_seconds, start, dtype = data
    error = jnp.log(_predicted(log_parameters, architectures, grids, dtype)) - log_seconds
    return error, PRIOR_WEIGHT * (log_parameters - start)


@float64
def _fit(architectures, grids, log_seconds, start, dtype):
    @jax.jit
    def solve(start, grids, log_seconds):
        data = (architectures, grids, log_seconds, start)
        solution = optimistix.least_squares(
            lambda theta, args: _residuals(theta, (*args, dtype)),
            optimistix.LevenbergMarquardt(rtol=1e-9, atol=1e-9),
            start,
            args=data,
            max_steps=500,
            throw=False,
        )
        error = jnp.exp(_residuals(solution.value, (*data, dtype))[0]) - 1.0
        return solution.value, error, solution.result == optimistix.RESULTS.successful

    return solve(start, grids, log_seconds)


def _start(architectures, grids, seconds) -> np.ndarray:
    """Rates at which the fastest steps were seen to run, small overheads, a round corner."""
    flops, moved, layers = [], [], []
    for architecture, grid in zip(architectures, grids, strict=True):
        for x in grid:
            s = step_operations(architecture, *x)
            flops.append(float(s.linear_flops + s.attention_flops + s.head_flops))
            moved.append(float(s.linear_bytes + s.attention_bytes + s.head_bytes))
            layers.append(float(architecture.layers))
    seconds = np.concatenate(seconds)
    fastest = seconds.min()
    return np.log(
        [
            np.max(np.array(flops) / seconds),
            np.max(np.array(moved) / seconds),
            0.5,
            0.5,
            1.0,
            0.05 * fastest / max(layers),
            0.05 * fastest,
        ]
    )


def fit_hardware(
    architectures: Sequence[Architecture],
    tables: Sequence[StepTable],
    *,
    name: str = "here",
    memory_capacity_bytes: float = 16e9,
) -> HardwareFit:
    """One roofline for all the models' tables, by least squares on ln seconds.

    architectures, tables: one table per architecture, on one device (no tensor parallelism), all
    of one weight dtype. Fitted: compute rate and bandwidth of linear layers and of attention, the
    exponent p (shared), overhead per layer and per step. Needs >= 7 measured steps in all.
    """
    if len(architectures) != len(tables) or not tables:
        raise ValueError(f"{len(architectures)} architectures but {len(tables)} step tables")
    dtypes = {a.weight_dtype for a in architectures}
    if len(dtypes) > 1:
        raise ValueError(f"step tables mix weight dtypes {sorted(dtypes)}: fit each on its own")
    points = [_points(table) for table in tables]
    grids, seconds = [p[0] for p in points], [p[1] for p in points]
    count = sum(s.size for s in seconds)
    if count < 7:
        raise ValueError(
            f"{count} measured steps cannot fit 7 roofline parameters: measure more tokens per "
            "step, contexts or models"
        )
    dtype = dtypes.pop()
    start = _start(architectures, grids, seconds)
    log_seconds = np.log(np.concatenate(seconds))
    theta, error, converged = _fit(list(architectures), grids, log_seconds, start, dtype)
    hardware = _hardware(np.asarray(theta), dtype, memory_capacity_bytes, name)
    labels = tuple(
        f"{a.name} batch {b:g} tokens {t:g} context {c:g}"
        for a, grid in zip(architectures, grids, strict=True)
        for b, t, c in grid
    )
    error = np.asarray(error)
    return HardwareFit(
        hardware=jax.tree.map(float, hardware),
        relative_errors=error,
        mean_absolute_error=float(np.abs(error).mean()),
        largest_error=float(np.abs(error).max()),
        labels=labels,
        converged=bool(converged),
    )
