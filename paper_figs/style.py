"""One look for every figure: legible in greyscale, at column width, its paper and number above.

Series differ in lightness, marker and dash, never in hue alone. The paper's numbers are open (white
markers, white bars), ours are filled or lines. `save` writes PNG, PDF and the drawn points.
"""

from __future__ import annotations

import csv
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)
import numpy as np  # noqa: E402
from matplotlib.container import BarContainer, ErrorbarContainer  # noqa: E402

OUT = Path(__file__).parent.parent / "out" / "paper_figs"
# Dark to light in print as on screen (relative luminance 0.01, 0.09, 0.19, 0.33, 0.48).
COLOURS = ("#111111", "#1f4e9c", "#b5452c", "#2a9d8f", "#e0a030")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
PAPER = dict(color="#111111", marker="o", mfc="white", linestyle="none", label="paper")
PAPER_BAR = dict(color="white", edgecolor="#111111")
OURS_BAR = dict(color="#5b7db5", edgecolor="#111111")
PAPERS = {
    "sdsl": "SDSL",
    "multilevel": "Multi-level",
    "fpga": "FPGA",
    "koala": "KOALA",
    "poss": "PosS",
}
WIDTH, HEIGHT = 6.4, 4.0  # inches

plt.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.titlesize": 9,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.linewidth": 1.5,
        "lines.markersize": 5,
        "savefig.dpi": 160,
        "pdf.fonttype": 42,
    }
)


def series(i: int, line: bool = True, marker: bool = True) -> dict:
    """Keywords of the i-th series."""
    return dict(
        color=COLOURS[i % len(COLOURS)],
        linestyle=DASHES[i % len(DASHES)] if line else "none",
        marker=MARKERS[i % len(MARKERS)] if marker else "",
    )


def shades(n: int, name: str = "viridis") -> list:
    """n colours of an ordered quantity, dark to light; the lightest still shows on white."""
    return [plt.get_cmap(name)(0.85 * i / max(n - 1, 1)) for i in range(n)]


def panels(rows: int = 1, columns: int = 1, width: float = WIDTH, height: float = HEIGHT, **kwargs):
    """Figure and axes."""
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **kwargs)


def pairs_of_bars(axis, names, printed, ours) -> None:
    """Bars of the paper beside ours, one pair a name."""
    places = np.arange(len(names))
    axis.bar(places - 0.2, printed, 0.38, **PAPER_BAR, label="paper")
    axis.bar(places + 0.2, ours, 0.38, **OURS_BAR, label="ours")
    axis.set_xticks(places, names)


def pairs_of_intervals(axes, cells) -> None:
    """Coefficients of a regression with their 95 % intervals, the paper's beside ours, one panel
    each. `cells`: a Comparison's; those with an `estimate` and a `moe95` are drawn."""
    found = {(c.row, c.quantity): c for c in cells}
    names = [c.row for c in cells if c.quantity == "estimate" and (c.row, "moe95") in found]
    for axis, name in zip(axes, names, strict=True):
        centre, half = found[name, "estimate"], found[name, "moe95"]
        ours = dict(color=COLOURS[1], marker="s", linestyle="none", label="ours")
        axis.errorbar([0], centre.paper, half.paper, capsize=4, **PAPER)
        axis.errorbar([1], centre.ours, half.ours, capsize=4, **ours)
        axis.set(title=_SYMBOLS.get(name, name), xlim=(-0.7, 1.7))
        axis.set_xticks([0, 1], ["paper", "ours"])
        axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)


_SYMBOLS = {
    "mu": r"$\mu$",
    "M0": "$M_0$",
    "gamma_D": r"$\gamma$",
    "gamma_Dprime": r"$\gamma$'",
}


def heading(name: str) -> str:
    """Of a script's name: "koala_small_scale" -> "KOALA small scale"."""
    paper, _, rest = name.partition("_")
    return f"{PAPERS.get(paper, paper)} {rest.replace('_', ' ')}"


def drawn_points(figure):
    """(panel, series, x, y) of every line and bar."""
    for panel, axis in enumerate(figure.axes, 1):
        if axis.name == "3d":
            continue
        with_errors = [c for c in axis.containers if isinstance(c, ErrorbarContainer)]
        names = {c[0]: c.get_label() for c in with_errors}
        for line in axis.get_lines():
            x, y = (np.asarray(values, float) for values in line.get_data())
            name = names.get(line, line.get_label())
            yield from ((panel, name, *point) for point in zip(x, y, strict=True))
        for bars in axis.containers:
            if isinstance(bars, BarContainer):
                middles = ((b.get_x() + b.get_width() / 2, b.get_height()) for b in bars)
                yield from ((panel, bars.get_label(), *point) for point in middles)


def save(figure, name: str, title: str = "") -> Path:
    """Writes out/paper_figs/`name`.png, .pdf and .points.csv under a title that names the paper and
    its figure or table; closes the figure."""
    OUT.mkdir(parents=True, exist_ok=True)
    lines = textwrap.fill(title or heading(name), int(13 * figure.get_figwidth()))
    figure.suptitle(lines, fontsize=10, fontweight="bold")
    with open(OUT / f"{name}.points.csv", "w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(("panel", "series", "x", "y"))
        for panel, label, x, y in drawn_points(figure):
            writer.writerow((panel, label, f"{x:.6g}", f"{y:.6g}"))
    for suffix in ("png", "pdf"):
        # No creation date: the same numbers give the same file.
        metadata = {"CreationDate": None} if suffix == "pdf" else {"Software": None}
        figure.savefig(OUT / f"{name}.{suffix}", metadata=metadata)
    plt.close(figure)
    return OUT / f"{name}.png"
