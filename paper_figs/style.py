"""One look for every figure: legible in greyscale, at column width, without a title inside.

Series differ in lightness, marker and dash, never in hue alone. `save` writes PNG and PDF.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)

OUT = Path(__file__).parent.parent / "out" / "paper_figs"
# Dark to light in print as on screen (relative luminance 0.01, 0.09, 0.19, 0.33, 0.48).
COLOURS = ("#111111", "#1f4e9c", "#b5452c", "#2a9d8f", "#e0a030")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
PAPER = dict(color="#111111", marker="o", mfc="white", linestyle="none", label="paper")
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


def save(figure, name: str) -> Path:
    """Writes out/paper_figs/`name`.png and .pdf; closes the figure."""
    OUT.mkdir(parents=True, exist_ok=True)
    for suffix in ("png", "pdf"):
        # No creation date: the same numbers give the same file.
        metadata = {"CreationDate": None} if suffix == "pdf" else {"Software": None}
        figure.savefig(OUT / f"{name}.{suffix}", metadata=metadata)
    plt.close(figure)
    return OUT / f"{name}.png"
