"""Figures of a report as inline SVG.

Drawn by matplotlib at the width of a phone's column; text, axes and frames take the page's own
colour (`currentColor`), so that one drawing serves light, dark and print. Lines differ by marker
and dash as well as by colour.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure

INK = "#010203"  # replaced by currentColor
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS, DASHES = ("o", "s", "^", "D", "v", "P"), ("-", "--", "-.", ":")
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def _svg(draw, label: str, height: float = 2.6, width: float = 4.2) -> str:
    """`draw(axes)` as an SVG element with a description for screen readers."""
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": label}):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # Namespaces are not fetched, but a page without any address is easier to trust.
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    label: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    level: float | None = None,
) -> str:
    """Named lines of (x, y); `level` is a horizontal line to compare with."""

    def draw(axes):
        styles = zip(itertools.cycle(PALETTE), itertools.cycle(MARKERS), itertools.cycle(DASHES))
        for (name, points), (colour, marker, dash) in zip(series.items(), styles, strict=False):
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=colour, marker=marker, linestyle=dash, label=name, markersize=4)
        ticks = sorted({x for points in series.values() for x, _ in points})
        if log_x:
            axes.set_xscale("log", base=2)
        if log_x or len(ticks) <= 10:
            axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
            axes.minorticks_off()
        if level is not None:
            axes.axhline(level, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.legend(frameon=False, fontsize=9)

    return _svg(draw, label)


def intervals(
    estimates: Sequence[Mapping[str, float]], label: str, x_label: str, y_label: str
) -> str:
    """Estimates with their intervals at positions 1, 2, ..."""

    def draw(axes):
        x = range(1, len(estimates) + 1)
        value = [e["value"] for e in estimates]
        below = [e["value"] - e["low"] for e in estimates]
        above = [e["high"] - e["value"] for e in estimates]
        axes.errorbar(x, value, (below, above), color=PALETTE[0], marker="o", capsize=3)
        axes.set(xlabel=x_label, ylabel=y_label, ylim=(0, 1.02), xticks=list(x))

    return _svg(draw, label)


def signed_bars(values: Mapping[str, float], label: str, x_label: str) -> str:
    """Horizontal bars around zero, in the order given, the first on top."""

    def draw(axes):
        names = list(values)[::-1]
        amounts = [values[n] for n in names]
        colours = [PALETTE[0] if a >= 0 else PALETTE[1] for a in amounts]
        axes.barh(range(len(names)), amounts, color=colours)
        axes.set_yticks(range(len(names)), [_short(n) for n in names])
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set(xlabel=x_label)

    return _svg(draw, label, height=0.55 + 0.27 * len(values))


def stacked_bars(rows: Mapping[str, Mapping[str, float]], label: str, x_label: str) -> str:
    """One horizontal bar per row, its parts one after the other."""

    def draw(axes):
        names = list(rows)[::-1]
        parts = [p for p in next(iter(rows.values())) if any(row[p] for row in rows.values())]
        left = [0.0] * len(names)
        hatches = ("", "///", "...")
        for part, colour, hatch in zip(parts, PALETTE, hatches, strict=False):
            amounts = [rows[n][part] for n in names]
            axes.barh(
                range(len(names)), amounts, left=left, color=colour, hatch=hatch, label=part,
                edgecolor="white", linewidth=0.4,
            )  # fmt: skip
            left = [a + b for a, b in zip(left, amounts, strict=True)]
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel=x_label)
        axes.figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)

    return _svg(draw, label, height=0.95 + 0.27 * len(rows))


def tree(parents: Sequence[int], label: str, notes: Sequence[str] = ()) -> str:
    """A token tree, the root (the last accepted token) on the left; `notes` under the nodes.

    parents[i] is node i's parent, -1 the root; nodes in topological order.
    """
    depth, rank = _positions(parents)

    def draw(axes):
        x, y = [0, *(d for d in depth[1:])], [-r for r in rank]
        for child, parent in enumerate(parents):
            ends = parent + 1, child + 1
            axes.plot([x[e] for e in ends], [y[e] for e in ends], color=INK, linewidth=0.8)
        size = 260 if len(parents) <= 24 else 60
        axes.scatter(x[:1], y[:1], s=size, color=INK, zorder=2)
        axes.scatter(x[1:], y[1:], s=size, color=PALETTE[0], zorder=2)
        if len(parents) <= 24:
            for i in range(len(parents)):
                axes.text(x[i + 1], y[i + 1], str(i + 1), ha="center", va="center", color="white",
                          fontsize=8, zorder=3)  # fmt: skip
            for i, note in enumerate(notes):
                axes.annotate(note, (x[i + 1], y[i + 1]), (0, -13), textcoords="offset points",
                              ha="center", va="top", fontsize=8)  # fmt: skip
        axes.margins(0.08, 0.25 if max(rank) else 2.0)
        axes.set_axis_off()

    return _svg(draw, label, height=1.0 + 0.24 * max(rank))


def _positions(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """Depth and vertical place of the root and of every node: leaves one below the other, a parent
    at the middle of its children."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    depth = [0]
    for node, parent in enumerate(parents):
        children[parent + 1].append(node + 1)
        depth.append(depth[parent + 1] + 1)
    rank, leaves = [0.0] * len(depth), 0
    for node in _postorder(children):
        if children[node]:
            rank[node] = (rank[children[node][0]] + rank[children[node][-1]]) / 2
        else:
            rank[node], leaves = float(leaves), leaves + 1
    return depth, rank


def _postorder(children: Sequence[Sequence[int]]) -> list[int]:
    stack, order = [0], []
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children[node]  # the last child comes first: reversed below
    return order[::-1]


def _short(name: str) -> str:
    """ "hardware.memory_bandwidth_bytes_per_second" -> "memory bandwidth"."""
    name = name.rpartition(".")[2]
    for unit in ("_bytes_per_second", "_flops_per_second", "_bytes", "_seconds"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")
