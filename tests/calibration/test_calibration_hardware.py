"""The roofline fitted to a table of a known roofline, and to one with a step in it."""

import numpy as np
import pytest

from sdx.calibration.hardware import fit_hardware
from sdx.theory.hardware import Hardware, load_hardware, step_seconds, step_table
from sdx.theory.transformers import llama_like

TRUTH = Hardware(
    name="truth",
    peak_flops_per_second={"float32": 8e10},
    memory_bandwidth_bytes_per_second=1.5e10,
    memory_capacity_bytes=16e9,
    linear_compute_efficiency=1.0,
    linear_memory_efficiency=1.0,
    attention_compute_efficiency=0.4,
    attention_memory_efficiency=0.6,
    linear_roofline_exponent=3.0,
    attention_roofline_exponent=3.0,
    layer_overhead_seconds=5e-5,
    step_overhead_seconds=2e-4,
)
TOKENS, CONTEXTS = [1.0, 2, 4, 8, 16, 32], [64.0, 256, 1024]


def table_of(architecture, factor=1.0):
    seconds = [
        [[float(step_seconds(architecture, TRUTH, 1.0, t, c)) for c in CONTEXTS] for t in TOKENS]
    ]
    return step_table([1], TOKENS, CONTEXTS, np.asarray(seconds) * factor, architecture.name)


@pytest.fixture(scope="module")
def models():
    kind = dict(weight_dtype="float32", kv_dtype="float32", head_dim=32.0)
    return [
        llama_like(4.0, 320.0, 2048.0, name="target", **kind),
        llama_like(1.0, 128.0, 2048.0, name="draft", **kind),
    ]


@pytest.fixture(scope="module")
def tables(models):
    return [table_of(a) for a in models]


def test_recovers_a_known_roofline(models, tables, tmp_path):
    fit = fit_hardware(models, tables)
    assert fit.mean_absolute_error < 0.01 and len(fit.labels) == 36
    peak = fit.hardware.peak_flops_per_second["float32"]
    assert peak == pytest.approx(8e10, rel=0.1)
    # A model that was not measured, at a token count between the measured ones.
    other = llama_like(2.0, 192.0, 2048.0, weight_dtype="float32", kv_dtype="float32")
    for tokens in (1.0, 6.0, 24.0):
        predicted, truth = (
            float(step_seconds(other, h, 1.0, tokens, 500.0)) for h in (fit.hardware, TRUTH)
        )
        assert predicted == pytest.approx(truth, rel=0.05)
    path = tmp_path / "here.toml"
    path.write_text(fit.to_toml("a machine"))
    again = load_hardware(str(path))
    for field in ("memory_bandwidth_bytes_per_second", "step_overhead_seconds"):
        assert getattr(again, field) == pytest.approx(getattr(fit.hardware, field), rel=1e-5)


def test_reports_the_distance_to_a_table_with_a_step(models, tables):
    slow_above_one = np.where(np.asarray(TOKENS) > 1, 1.8, 1.0)[None, :, None]
    stepped = [table_of(a, slow_above_one) for a in models]
    fit = fit_hardware(models, stepped)
    assert 0.02 < fit.mean_absolute_error < 0.4
    first = fit.labels.index("target batch 1 tokens 1 context 64")
    assert fit.relative_errors[first] > 0  # the roofline smooths the cheap one-token step away
    assert fit.largest_error >= abs(fit.relative_errors[first])


def test_bad_tables_are_named(models, tables):
    with pytest.raises(ValueError, match="2 architectures but 1 step tables"):
        fit_hardware(models, tables[:1])
    small = step_table([1], [1, 2], [64], [[[1e-3], [2e-3]]])
    with pytest.raises(ValueError, match="2 measured steps cannot fit"):
        fit_hardware(models[:1], [small])
    mixed = [models[0], llama_like(1.0, 128.0, 2048.0)]
    with pytest.raises(ValueError, match="mix weight dtypes"):
        fit_hardware(mixed, tables)
