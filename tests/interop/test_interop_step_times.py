"""Step time sweeps from a CSV."""

import numpy as np
import pytest

from sdx.interop.step_times import read_step_times
from sdx.theory.hardware import load_hardware, step_seconds
from sdx.theory.transformers import load_architecture

SWEEP = """context, batch, tokens, seconds, note
128, 1, 1, 0.010, first
128, 1, 4, 0.020,
128, 8, 1, 0.015,
128, 8, 4, 0.030,
128, 1, 1, 0.012, again
128, 1, 1, 0.300, an outlier
"""


@pytest.fixture
def save(tmp_path):
    def write(text):
        (tmp_path / "sweep.csv").write_text(text)
        return tmp_path / "sweep.csv"

    return write


def test_medians_on_the_grid(save):
    table = read_step_times(save(SWEEP), model="m", name="here")
    assert table.batches.tolist() == [1, 8] and table.new_tokens.tolist() == [1, 4]
    assert np.allclose(table.seconds[:, :, 0], [[0.012, 0.020], [0.015, 0.030]])
    assert (table.model, table.name) == ("m", "here")


def test_a_sweep_of_a_roofline_predicts_its_steps(save):
    """Written out and read back, the table stands in for the hardware."""
    target, hardware = load_architecture("llama-3.2-1b"), load_hardware("h100-sxm")
    grid = [(b, t, c) for b in (1, 8) for t in (1, 4) for c in (128, 1024)]
    seconds = [float(step_seconds(target, hardware, *step)) for step in grid]
    lines = [f"{b},{t},{c},{s!r}" for (b, t, c), s in zip(grid, seconds, strict=True)]
    table = read_step_times(save("batch,tokens,context,seconds\n" + "\n".join(lines)))
    for step, expected in zip(grid, seconds, strict=True):
        assert float(step_seconds(target, table, *step)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch,tokens,seconds\n1,1,1\n", "no column 'context'"),
        ("", "no column 'batch'"),
        ("batch,tokens,context,seconds\n", "no measurements"),
        ("batch,tokens,context,seconds\n1,1,0,fast\n", "line 2: seconds is 'fast'"),
        ("batch,tokens,context,seconds\n1,1,0,-1\n", "seconds is '-1'"),
        ("batch,tokens,context,seconds\n0,1,0,1\n", "batch is '0'"),
        ("batch,tokens,context,seconds\n1,1,0,1\n2,2,0,1\n", "no measurement of batch 1, tokens 2"),
    ],
)
def test_bad_sweeps(save, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_step_times(save(text))
    assert "\n" not in str(caught.value)
