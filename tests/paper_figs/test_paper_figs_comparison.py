"""How a cell is judged, and that the generated page agrees with what the scripts return."""

import re
from pathlib import Path

import pytest

from paper_figs import __main__ as page
from paper_figs.comparison import Comparison, Repeat, half_unit, read, tokens

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("printed", "half"),
    [("0.0120", 5e-5), ("8.947e-11", 5e-15), ("13", 0.5), ("-0.0067", 5e-5), ("1.4e6", 5e4)],
)
def test_half_a_unit_of_the_last_printed_digit(printed, half):
    assert half_unit(printed) == pytest.approx(half)


def test_tokens_as_printed():
    assert (tokens("2.4T"), tokens("180B"), tokens("7M")) == (2.4e12, 180e9, 7e6)


@pytest.mark.parametrize(
    ("ours", "keywords", "status"),
    [
        (2.474, {}, "reproduced"),
        (2.476, {}, "neither"),
        (2.476, {"cause": "a misprint"}, "explained"),
        (2.474, {"kind": "predicted"}, "predicted"),
        (2.40, {"relative": 0.03}, "reproduced"),
        (2.40, {"relative": 0.02}, "neither"),
        (2.40, {"absolute": 0.1, "kind": "explained"}, "explained"),
        (float("nan"), {"relative": 10.0}, "neither"),
    ],
)
def test_judgement(ours, keywords, status):
    table = Comparison("t", "T", "half a unit")
    table.add("row", "speedup", "2.47", ours, **keywords)
    assert table.cells[0].status == status
    assert sum(table.counts().values()) == 1


def test_the_page_counts_what_it_is_given():
    table = Comparison("sdsl_x", "SDSL Table X: y", "1 %", "inputs", ["A remark."])
    table.add("a", "q", "1.0", 1.0)
    table.add("b", "q", "1.0", 2.0)
    text = page.fidelity([table, Comparison("sdsl_f", "SDSL Figure Y: z", "drawn")])
    assert (
        "**2 cells: 1 reproduced, 0 predicted, 0 explained, 1 neither; 1 figures drawn.**" in text
    )
    assert "| SDSL Table X | b, q | 1 | 2 |" in text and "A remark." in text


def test_what_our_own_models_showed_is_counted_nowhere():
    table = Comparison("sdsl_x", "SDSL Table X: y", "1 %")
    table.add("a", "q", "1.0", 1.0)
    repeat = Repeat("sdsl_small_scale", "SDSL, section 4", "Two small models.")
    for holds in (True, False, None):
        repeat.add("alpha falls", "-0.0067", "-0.01", holds)
    text = page.fidelity([table, repeat])
    assert "**1 cells: 1 reproduced" in text and "0 figures drawn" in text
    own = text[text.index("### Repeated at small scale") :]
    assert "Two small models." in own and own.count("| alpha falls | -0.0067 | -0.01 |") == 3
    for verdict in ("| holds |", "| does not hold |", "| open |"):
        assert verdict in own


def test_every_script_of_a_paper_is_on_the_committed_page():
    text = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    for title in page.PAPERS.values():
        assert f"## {title}" in text
    total, *parts = map(
        int, re.findall(r"(\d+) (?:cells|reproduced|predicted|explained|neither)", text)
    )
    assert total == sum(parts[:4]) > 1000


def test_an_unknown_script_is_refused(capsys):
    assert page.main(["sdsl_table_99"]) == 2
    assert "unknown script 'sdsl_table_99'" in capsys.readouterr().err


def test_sdsl_table_5_by_its_own_script(tmp_path, monkeypatch):
    """The acceptance of the table: 39 N* within 5e-4, every throughput to the printed digit."""
    from paper_figs import comparison, sdsl_table_5, style

    monkeypatch.setattr(style, "OUT", tmp_path)
    monkeypatch.setattr(comparison, "OUT", tmp_path)
    (table,) = sdsl_table_5.run()
    assert len(table.cells) == 2 * len(read("sdsl_table_5_optimal_draft.csv")) == 78
    assert table.counts() == {"reproduced": 73, "predicted": 0, "explained": 5, "neither": 0}
    assert (tmp_path / "sdsl_table_5.csv").is_file() and (tmp_path / "sdsl_table_5.pdf").is_file()
    points = (tmp_path / "sdsl_table_5.points.csv").read_text().splitlines()
    assert points[0] == "panel,series,x,y" and len(points) == 1 + 4 * 39
