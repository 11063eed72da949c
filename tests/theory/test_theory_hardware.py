"""Device files, the roofline's limits and gradients, step tables, capacity, error lines."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.theory.hardware import (
    attention_seconds,
    device_names,
    energy_joules,
    hardware_to_toml,
    linear_seconds,
    load_hardware,
    memory_required_bytes,
    peak_flops_per_second,
    price_dollars,
    require_fit,
    step_breakdown,
    step_seconds,
    step_table,
)
from sdx.theory.transformers import llama_like, load_architecture, step_bytes, step_flops

ROOT = Path(__file__).parents[2]
H100, LLAMA = load_hardware("h100-sxm"), load_architecture("llama-3.1-8b")
FITS = json.loads((ROOT / "experiments" / "results" / "fit_hardware.json").read_text())["fits"]


@pytest.mark.parametrize("name", device_names())
def test_every_number_has_a_unit_and_a_source(name):
    units = r"_(flops_per_second|bytes_per_second|bytes|fraction|dimensionless|seconds|watts"
    units += r"|dollars_per_hour)"
    lines = (ROOT / "hw_models" / f"{name}.toml").read_text().splitlines()
    numbers = [line for line in lines if "=" in line and not line.startswith("#")]
    assert len(numbers) >= 15
    for line in numbers:
        assert re.fullmatch(rf"\w+{units} = [\d.e+-]+  # \S.{{10,}}", line), line
    hardware = load_hardware(name)
    assert hardware.name == name
    assert 0 < hardware.linear_memory_efficiency <= 1 >= hardware.linear_compute_efficiency


def test_the_devices_asked_for_are_there():
    devices = "h100-sxm h200-sxm a100-80g-sxm l40s rtx-4090 b200 mi300x tpu-v5e tpu-v5p tpu-v6e"
    assert set((devices + " u280 vhk158 v80 u250").split()) == set(device_names())


@pytest.mark.parametrize("r", [r for r in FITS if r["dtype"] == "bfloat16"], ids=str)
def test_recorded_fits_hold_their_limits(r):
    limit = 0.12
    if r["kind"] == "attention":
        limit = 0.17 if (r["device"], r["framework"]) == ("h200-sxm", "vllm-0.14.0") else 0.16
    assert r["mean_absolute_error"] <= limit and r["below_datasheet_bound"] == 0


def test_device_files_carry_the_recorded_fit():
    for name in ("a100-80g-sxm", "h100-sxm", "h200-sxm"):
        hardware, mine = load_hardware(name), [r for r in FITS if r["device"] == name]
        gemm = [r["compute_efficiency"] for r in mine if r["kind"] == "gemm"]
        attention = [r["memory_efficiency"] for r in mine if r["kind"] == "attention"]
        assert hardware.linear_compute_efficiency in gemm
        assert hardware.attention_memory_efficiency in attention


@pytest.mark.parametrize("name", device_names())
def test_no_prediction_beats_the_datasheet(name):
    hardware = load_hardware(name)
    for batch, new, context in ((1, 1, 128), (1, 8, 4096), (64, 4, 1024), (512, 1, 32768)):
        flops, bytes_ = (float(f(LLAMA, batch, new, context)) for f in (step_flops, step_bytes))
        peak = max(hardware.peak_flops_per_second.values())
        bound = max(flops / peak, bytes_ / hardware.memory_bandwidth_bytes_per_second)
        assert float(step_seconds(LLAMA, hardware, batch, new, context)) >= bound


def test_board_autoregression_is_the_papers():
    """FPGA paper, Table IV, autoregressive column: tokens per second of Llama-3.1-8B."""
    printed = {
        "u280": (22.12, 20.02, 14.52, 6.92),
        "vhk158": (39.39, 35.66, 25.86, 12.32),
        "u250": (3.70, 3.35, 2.43, 1.16),
    }
    for name, rates in printed.items():
        for context, rate in zip((256, 1024, 4096, 16384), rates, strict=True):
            ours = 1 / float(step_seconds(LLAMA, load_hardware(name), 1, 1, context))
            assert abs(ours / rate - 1) < 3e-3, (name, context, ours)


def test_groups_add_up_by_hand():
    simple = dataclasses.replace(
        H100,
        peak_flops_per_second={"bfloat16": 1e12},
        memory_bandwidth_bytes_per_second=1e10,
        linear_compute_efficiency=0.5,
        linear_memory_efficiency=1.0,
        linear_roofline_exponent=2.0,
        layer_overhead_seconds=1e-3,
        step_overhead_seconds=1e-2,
        interconnect_bandwidth_bytes_per_second=1e9,
        interconnect_latency_seconds=1e-4,
    )
    group = linear_seconds(simple, 1.5e12, 4e10)
    assert (group.compute_seconds, group.memory_seconds) == (3.0, 4.0)
    assert math.isclose(group.seconds, 5.0, rel_tol=1e-6) and group.bound == "memory"
    b = step_breakdown(LLAMA, simple, 2, 3, 500, 4)
    assert math.isclose(b.overhead_seconds, 32e-3 + 1e-2)
    payload = 2 * 32 * 6 * 4096 * 2 * 2 * 3 / 4
    assert math.isclose(b.collective_seconds, payload / 1e9 + 64 * 2 * 1e-4)
    parts = b.linear.seconds + b.attention.seconds + b.head.seconds
    assert math.isclose(b.seconds, parts + b.overhead_seconds + b.collective_seconds)
    assert math.isclose(b.seconds, step_seconds(LLAMA, simple, 2, 3, 500, 4))


def test_limits_of_the_roofline():
    assert step_breakdown(LLAMA, H100, 1, 1, 1024).bound == "linear/memory"
    assert step_breakdown(LLAMA, H100, 64, 64, 64).bound == "linear/compute"
    assert step_breakdown(LLAMA, H100, 64, 1, 60000).bound == "attention/memory"
    assert step_breakdown(llama_like(12.0, 256.0, 1000.0), H100, 1, 1, 10).bound == "overhead"
    sharp = dataclasses.replace(H100, linear_roofline_exponent=1e4)
    group = linear_seconds(sharp, 1e12, 1e9)
    assert math.isclose(
        group.seconds, max(group.compute_seconds, group.memory_seconds), rel_tol=1e-3
    )
    nothing = attention_seconds(H100, 0.0, 0.0)
    assert nothing.seconds == 0


def test_dtype_widening():
    assert peak_flops_per_second(H100, "float8") == 1978.9e12
    assert peak_flops_per_second(H100, "int4") == 989.4e12
    assert peak_flops_per_second(load_hardware("v80"), "bfloat16") == pytest.approx(7.3728e12)
    with pytest.raises(ValueError, match="no peak rate for bfloat16"):
        peak_flops_per_second(
            dataclasses.replace(H100, peak_flops_per_second={"int8": 1.0}), "bfloat16"
        )


def test_gradients_match_central_differences():
    """d ln seconds / d everything: architecture, hardware, batch, new tokens, context, split."""
    with jax.enable_x64(True):
        leaves, tree = jax.tree.flatten((LLAMA, H100, 6.0, 5.0, 3000.0, 2.0))
        x0 = jnp.array(leaves)

        def log_seconds(relative):  # of relative changes: one step size suits all
            return jnp.log(step_seconds(*jax.tree.unflatten(tree, list(x0 * relative))))

        one, h = jnp.ones_like(x0), 1e-4
        exact = np.asarray(jax.grad(log_seconds)(one))
        values = jax.jit(jax.vmap(log_seconds))
        steps = h * jnp.eye(x0.size)
        numeric = np.asarray((values(one + steps) - values(one - steps)) / (2 * h))
        assert np.max(np.abs(exact - numeric) / np.maximum(np.abs(exact), 1e-2)) < 1e-6
        assert np.count_nonzero(exact) >= 20
        hardware = jax.grad(lambda h: step_seconds(LLAMA, h, 4.0, 4.0, 100.0))(H100)
        assert type(hardware) is type(H100)
        assert hardware.memory_bandwidth_bytes_per_second < 0 < hardware.layer_overhead_seconds


def test_vmap_equals_the_loop():
    with jax.enable_x64(True):
        batches = jnp.array([1.0, 3.0, 200.0])
        mapped = jax.vmap(lambda b: step_seconds(LLAMA, H100, b, 2.0, 700.0))(batches)
        each = [step_seconds(LLAMA, H100, b, 2.0, 700.0) for b in (1.0, 3.0, 200.0)]
        np.testing.assert_allclose(mapped, each, rtol=1e-13)


def test_float32_callers_get_float64():
    assert step_seconds(LLAMA, H100, np.float32(1), np.float32(2), 100).dtype == np.float64


# ---------------------------------------------------------------------------- step table


@pytest.fixture(scope="module")
def table():
    b, t, c = (np.array(x, float) for x in ([1, 4, 32], [1, 2, 4, 16], [0, 100, 4000]))
    seconds = 1e-3 * (1 + 0.3 * (t > 1) + 0.02 * b[:, None] * t)[..., None] * (1 + c / 3000)
    return step_table(b, t, c, seconds, model="llama-3.1-8b", name="bench")


def test_step_table_returns_its_nodes(table):
    for i, b in enumerate(table.batches):
        for j, t in enumerate(table.new_tokens):
            for k, c in enumerate(table.contexts):
                assert np.isclose(step_seconds(LLAMA, table, b, t, c), table.seconds[i, j, k])


def test_step_table_is_monotone_and_bounded(table):
    with jax.enable_x64(True):
        seconds = jax.jit(jax.vmap(lambda b, t, c: step_seconds(LLAMA, table, b, t, c)))
        line = jnp.geomspace(0.5, 60.0, 241)
        one = jnp.ones_like(line)
        for b, t, c in ((line, 3 * one, 50 * one), (5 * one, line, 50 * one)):
            assert np.all(np.diff(seconds(b, t, c)) >= -1e-18)
        assert np.all(np.diff(seconds(5 * one, 3 * one, 200 * line - 100)) >= -1e-18)
        inside = seconds(2 * one, jnp.linspace(2.0, 4.0, 241), 50 * one)
        assert np.all((inside >= table.seconds[0, 1, 0]) & (inside <= table.seconds[1, 2, 1]))


def test_step_table_gradients(table):
    with jax.enable_x64(True):

        def f(x):
            return jnp.log(step_seconds(LLAMA, table, x[0], x[1], x[2]))

        x0 = jnp.array([2.5, 3.1, 900.0])
        exact, h = jax.grad(f)(x0), 1e-5
        for i in range(3):
            step = jnp.zeros(3).at[i].set(h * x0[i])
            numeric = (f(x0 + step) - f(x0 - step)) / (2 * h * x0[i])
            assert abs(exact[i] / numeric - 1) < 1e-6 and exact[i] > 0
        by_entry = jax.grad(
            lambda s: step_seconds(LLAMA, dataclasses.replace(table, seconds=s), 2.5, 3.1, 900.0)
        )(jnp.asarray(table.seconds))
        assert np.count_nonzero(by_entry) == 8  # the corners of the cell


def test_step_table_outside_the_grid(table):
    with jax.enable_x64(True):
        below = step_seconds(LLAMA, table, 1.0, 0.5, 0.0)
        assert np.isclose(below, table.seconds[0, 0, 0])
        above = step_seconds(LLAMA, table, 1.0, 64.0, 0.0)
        slope = np.log(table.seconds[0, 3, 0] / table.seconds[0, 2, 0]) / np.log(4)
        assert np.isclose(above, table.seconds[0, 3, 0] * 4**slope)
    single = step_table([1], [1], [128], [[[0.25]]])
    assert float(step_seconds(LLAMA, single, 7, 3, 9)) == 0.25
    with pytest.raises(ValueError, match="no op groups"):
        step_breakdown(LLAMA, single, 1, 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(batches=[1, 1]), "increase strictly"),
        (dict(new_tokens=[0.5, 2]), "increase strictly from >= 1"),
        (dict(contexts=[-1, 2]), "increase strictly from >= 0"),
        (dict(seconds=[[1.0]]), "shape"),
        (dict(seconds=-np.ones((2, 2, 2))), "positive and finite"),
        (dict(seconds=np.full((2, 2, 2), np.nan)), "positive and finite"),
    ],
)
def test_a_bad_step_table_is_refused(change, message):
    good = dict(batches=[1, 2], new_tokens=[1, 2], contexts=[0, 9], seconds=np.ones((2, 2, 2)))
    step_table(**good)
    with pytest.raises(ValueError, match=message):
        step_table(**(good | change))


# ------------------------------------------------------------- capacity, energy, errors


def test_memory_energy_price():
    assert float(memory_required_bytes(LLAMA, 0, 0)) == 2 * 8_030_261_248
    per_token = 32 * 2 * 8 * 128 * 2
    two = float(memory_required_bytes(LLAMA, 3, 1000, 2))
    assert two == 8_030_261_248 + 3 * 1000 * per_token / 2
    assert energy_joules(H100, 2.0, 4) == 700 * 2 * 4
    assert price_dollars(H100, 3600.0, 8) == pytest.approx(8 * H100.dollars_per_hour)


def test_what_does_not_fit_is_said_in_one_line():
    target = load_architecture("llama-3.1-70b")
    require_fit([target, LLAMA], H100, 1, 1024, tensor_parallel=8)
    with pytest.raises(ValueError) as error:
        require_fit([target, LLAMA], H100, 1, 1024)
    text = str(error.value)
    assert "\n" not in text and "need 157" in text and "80.0 GB" in text and "devices" in text
    with pytest.raises(ValueError, match="batch 512, context 8192"):
        require_fit([LLAMA], H100, 512, 8192)


def test_an_unknown_device_names_the_nearest():
    with pytest.raises(FileNotFoundError, match="nearest names: .*h100-sxm") as error:
        load_hardware("h100")
    assert "\n" not in str(error.value)


def good_toml() -> str:
    return (ROOT / "hw_models" / "h100-sxm.toml").read_text()


@pytest.mark.parametrize(
    ("find", "replace", "message"),
    [
        (r"\[device\]", "[device", "not valid TOML"),
        (r"(?m)^memory_capacity_bytes.*$", "", "'memory_capacity_bytes' is missing"),
        (r"(?m)^\w+_flops_per_second = .*$", "", "'bfloat16_flops_per_second' is missing"),
        (r"memory_capacity_bytes = 80e9", "memory_capacity_bytes = -1.0", "must be positive"),
        (r"memory_capacity_bytes = 80e9", "memory_capacity_bytes = 'big'", "is not a number"),
        (r"memory_capacity_bytes = 80e9", "memory_capacity_bytes = inf", "is not a number"),
        (r"\[device\]", "device = 3", "must be a table"),
    ],
)
def test_a_bad_toml_gives_one_line(tmp_path, find, replace, message):
    path = tmp_path / "mine.toml"
    text = good_toml() if replace != "device = 3" else "[device]\n"
    path.write_text(re.sub(find, replace, text))
    with pytest.raises(ValueError, match=message) as error:
        load_hardware(str(path))
    assert "\n" not in str(error.value)


def test_toml_round_trip(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(hardware_to_toml(H100, {"": "copied for a test"}, "a copy"))
    again = load_hardware(str(path))
    assert again.name == "mine"
    for one, two in zip(jax.tree.leaves(H100), jax.tree.leaves(again), strict=True):
        assert math.isclose(one, two, rel_tol=1e-5)
