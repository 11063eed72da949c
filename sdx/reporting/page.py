"""One self-contained HTML page for a design or a measurement.

    the JSON of `sdx design` or `sdx measure`  --render-->  one file: text, tables, inline SVG

No script, no external request (a content security policy forbids both); reads on a phone, in dark
mode and on paper. Every number carries its exact value and its place in the JSON
(`<data value=... data-path=...>`), and the JSON itself is embedded.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from sdx.reporting import figures
from sdx.theory import acceptance

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
SPECULATE = "speculate"


def render(data: Mapping[str, Any], engines: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """The page. data: what `--json` of `sdx design` or `sdx measure` wrote. engines: per engine the
    exported configuration (`command`, `files`, `notes`), or {"refused": reason}.

    Raises ValueError for data that is neither.
    """
    if data.get("cells"):
        title = f"{data.get('target', 'target')} on {data.get('hardware', 'hardware')}"
        body = _design(data, engines or {})
    elif data.get("hazards") or data.get("alpha"):
        title = "Measured acceptance"
        body = _measurement(data)
    else:
        raise ValueError(
            "neither a design (cells) nor a measurement (hazards): write one with sdx design "
            "--json or sdx measure --json"
        )
    embedded = json.dumps(data).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        f'<link rel="icon" href="data:,">\n<title>sdx: {html.escape(title)}</title>\n'
        f"<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f'<script type="application/json" id="data">{embedded}</script>\n</body>\n</html>\n'
    )


# ---------------------------------------------------------------------------- pieces


def _number(data: Any, path: str, pattern: str = "{:.3g}") -> str:
    """A number of the JSON with its exact value and its path; a dash where it is absent."""
    value = data
    for step in path.split("/"):
        value = value[int(step)] if isinstance(value, list) else (value or {}).get(step)
    if value is None:
        return "–"
    return f'<data value="{value!r}" data-path="{html.escape(path)}">{pattern.format(value)}</data>'


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def _tokens(value: float) -> str:
    return "{:,.0f}" if value >= 100 else "{:.3g}"


# ---------------------------------------------------------------------------- design


def _design(data: Mapping[str, Any], engines: Mapping[str, Mapping[str, Any]]) -> str:
    cells = data["cells"]
    best = max(range(len(cells)), key=lambda i: cells[i]["speedup"])
    parts = [
        _headline(data, best),
        _table(data),
        '<div class="figures">',
        *_design_figures(data, best),
        "</div>",
        "<h2>Every cell</h2>",
        *(_cell(data, i) for i in range(len(cells))),
    ]
    if data.get("refused"):
        items = "".join(f"<li>{html.escape(line)}</li>" for line in data["refused"])
        parts.append(f"<h2>What does not fit</h2><ul>{items}</ul>")
    if engines:
        parts.append("<h2>Engine configuration</h2>")
        parts += [_engine(name, config) for name, config in engines.items()]
    return "\n".join(parts)


def _headline(data: Mapping[str, Any], best: int) -> str:
    cells = data["cells"]
    wins = sum(c["verdict"] == SPECULATE for c in cells)
    if wins == 0:
        verdict, kind = "Do not speculate.", "no"
    elif wins == len(cells):
        verdict, kind = "Speculate.", "yes"
    else:
        verdict, kind = f"Speculate in {wins} of {len(cells)} cells.", "partly"
    at = f"cells/{best}"
    where = f"batch {_number(data, at + '/batch', '{:g}')}, context " + _number(
        data, at + "/context", "{:g}"
    )
    gain = (
        f"At best {_number(data, at + '/speedup', '×{:.2f}')} over autoregression ({where}): "
        f"{_number(data, at + '/tokens_per_second', _tokens(cells[best]['tokens_per_second']))} "
        "tokens per second."
    )
    devices = f", up to {data['devices']} devices" if data.get("devices", 1) > 1 else ""
    return (
        f"<header><p>{html.escape(str(data.get('target', '')))} on "
        f"{html.escape(str(data.get('hardware', '')))}{devices}</p>"
        f'<h1 class="{kind}">{verdict}</h1><p>{gain}</p></header>'
    )


def _table(data: Mapping[str, Any]) -> str:
    """Speedup and lookahead over batch (rows) x context (columns)."""
    cells = data["cells"]
    index = {(c["batch"], c["context"]): i for i, c in enumerate(cells)}
    batches = sorted({b for b, _ in index})
    contexts = sorted({c for _, c in index})
    head = "".join(f'<th scope="col">{c:g}</th>' for c in contexts)
    rows = []
    for batch in batches:
        row = [f'<th scope="row">{batch:g}</th>']
        for context in contexts:
            i = index.get((batch, context))
            if i is None:
                row.append("<td>–</td>")
                continue
            yes = cells[i]["verdict"] == SPECULATE
            text = f"<b>{_number(data, f'cells/{i}/speedup', '×{:.2f}')}</b><br>" + (
                _policy_text(data, i) if yes else "do not"
            )
            row.append(f'<td class="{"yes" if yes else "no"}">{text}</td>')
        rows.append(f"<tr>{''.join(row)}</tr>")
    return (
        '<h2>Speedup over batch and context</h2><div class="scroll"><table class="grid">'
        f'<thead><tr><th scope="col">batch \\ context</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _policy(cell: Mapping[str, Any]) -> Mapping[str, Any]:
    return (cell.get("design") or {}).get("policy") or {"type": "Chain"}


def _policy_text(data: Mapping[str, Any], i: int) -> str:
    policy, at = _policy(data["cells"][i]), f"cells/{i}/design/policy"
    match policy["type"]:
        case "DynamicTree":
            return f"tree of {_number(data, at + '/budget', '{:g}')}"
        case "StaticTree":
            return f"tree of {len(policy['parents'])}"
        case "ThresholdChain":
            return f"threshold {_number(data, at + '/threshold')}"
        case _:
            return f"K = {_number(data, f'cells/{i}/lookahead', '{:g}')}"


def _design_figures(data: Mapping[str, Any], best: int) -> list[str]:
    cells = data["cells"]
    drawn = []
    batches, contexts = ({c[axis] for c in cells} for axis in ("batch", "context"))
    if len(batches) > 1 or len(contexts) > 1:
        x, other = ("batch", "context") if len(batches) > 1 else ("context", "batch")
        series: dict[str, list] = {}
        for cell in sorted(cells, key=lambda c: (c[other], c[x])):
            series.setdefault(f"{other} {cell[other]:g}", []).append((cell[x], cell["speedup"]))
        log = min(batches if x == "batch" else contexts) > 0
        svg = figures.lines(series, f"Speedup against {x}", x, "speedup", log, 1.0)
        drawn.append(_figure(svg, f"Speedup against {x}; under the dashed line speculation loses."))
    rows = {
        f"{c['batch']:g} × {c['context']:g}": {
            part: 1e3 * (c["prediction"][f"{part}_seconds"] or 0.0)
            for part in ("draft", "verify", "overhead")
        }
        for c in cells[:16]
        if c.get("prediction")
    }
    if rows:
        svg = figures.stacked_bars(rows, "Time of one round", "milliseconds per round")
        drawn.append(_figure(svg, "Where a round's time goes, per batch × context."))
    elasticities = dict(list(cells[best].get("elasticities", {}).items())[:8])
    if elasticities:
        svg = figures.signed_bars(elasticities, "Elasticities", "% of throughput per % more")
        drawn.append(_figure(svg, "What to improve next, in the best cell."))
    drawn.append(_drawing(cells[best]))
    return drawn


def _drawing(cell: Mapping[str, Any]) -> str:
    """The draft of one round: a chain, or a token tree."""
    policy = _policy(cell)
    if policy["type"] == "StaticTree":
        svg = figures.tree(policy["parents"], "Token tree")
        return _figure(
            svg,
            f"The token tree of {len(policy['parents'])} drafts; the unnumbered node is the root.",
        )
    if policy["type"] == "DynamicTree":
        depth, branching = int(policy["depth"]), int(policy["branching"])
        svg = figures.tree(_widest_tree(depth, branching, int(policy["budget"])), "Dynamic tree")
        return _figure(
            svg,
            f"A dynamic tree: depth {depth}, up to {branching} children per expanded node, "
            f"{policy['budget']:g} nodes kept. Its shape follows the confidences; this is one.",
        )
    if policy["type"] == "ThresholdChain":
        caption = f"Drafting stops under confidence {policy['threshold']:.3g}."
        length = int(policy["max_lookahead"])
    else:
        length, caption = int(cell["lookahead"]), "The draft of one round: a chain."
    svg = figures.tree(range(-1, length - 1), "Draft chain")
    return _figure(svg, f"{caption} The unnumbered node is the last accepted token.")


def _widest_tree(depth: int, branching: int, budget: int) -> list[int]:
    """A tree that the settings allow: each level expands its first node fully, as far as the budget
    goes, after every level has at least one node."""
    parents, first = [], -1
    spare = max(budget - depth, 0)
    for _ in range(depth):
        children = 1 + min(branching - 1, spare)
        spare -= children - 1
        parents += [first] * children
        first = len(parents) - children
    return parents[:budget]


def _cell(data: Mapping[str, Any], i: int) -> str:
    cell, at = data["cells"][i], f"cells/{i}"
    draft, bounds = cell.get("draft") or {}, cell.get("bounds") or {}
    rate = _tokens(cell["tokens_per_second"])
    rows = [
        ("Verdict", html.escape(cell["verdict"])),
        ("Speedup", _number(data, at + "/speedup", "×{:.3f}")),
        ("Tokens per second", _number(data, at + "/tokens_per_second", rate)),
        ("without speculation", _number(data, at + "/autoregressive_tokens_per_second", rate)),
        ("Tokens per round", _number(data, at + "/tokens_per_round", "{:.3f}")),
        ("Policy", _policy_text(data, i)),
        (
            "Draft",
            f"{html.escape(draft.get('name') or '')} {_number(data, at + '/draft/layers', '{:g}')} "
            f"layers × {_number(data, at + '/draft/width', '{:g}')}, "
            f"{_number(data, at + '/draft/parameters', '{:.3g}')} parameters",
        ),
        ("Tensor parallel", _number(data, at + "/tensor_parallel", "{:g}")),
        ("Bound by", html.escape(", ".join(f"{k}: {v}" for k, v in bounds.items()))),
        ("Joules per token", _number(data, at + "/prediction/joules_per_token")),
        ("$ per million tokens", _number(data, at + "/prediction/dollars_per_million_tokens")),
        ("Certificate", _certificate(data, i)),
    ]
    body = "".join(f'<tr><th scope="row">{k}</th><td>{v}</td></tr>' for k, v in rows)
    slopes = "".join(
        f"<tr><td>{html.escape(name)}</td><td>"
        f"{_number(data, f'{at}/elasticities/{name}', '{:+.3f}')}</td></tr>"
        for name in list(cell.get("elasticities", {}))[:10]
    )
    if slopes:
        slopes = (
            "<table><thead><tr><th>1 % more of</th><th>% throughput</th></tr></thead>"
            f"<tbody>{slopes}</tbody></table>"
        )
    return (
        f"<details><summary>Batch {cell['batch']:g}, context {cell['context']:g}: "
        f"×{cell['speedup']:.2f}, {html.escape(cell['verdict'])}</summary>"
        f'<div class="scroll"><table>{body}</table>{slopes}</div></details>'
    )


def _certificate(data: Mapping[str, Any], i: int) -> str:
    if data["cells"][i].get("certificate_gap") is None:
        return "not certified"
    gap = _number(data, f"cells/{i}/certificate_gap", "{:.2%}")
    return f"no design of the lattice is better by more than {gap}"


def _engine(name: str, config: Mapping[str, Any]) -> str:
    if "refused" in config:
        return f"<h3>{html.escape(name)}</h3><p>{html.escape(config['refused'])}</p>"
    parts = [f"<h3>{html.escape(name)}</h3>"]
    if config.get("command"):
        parts.append(f"<pre>{html.escape(config['command'])}</pre>")
    for file, text in (config.get("files") or {}).items():
        parts.append(f"<p>{html.escape(file)}:</p><pre>{html.escape(text)}</pre>")
    parts += [f'<p class="note">{html.escape(note)}</p>' for note in config.get("notes") or ()]
    return "\n".join(parts)


# ---------------------------------------------------------------------------- measurement


def _measurement(data: Mapping[str, Any]) -> str:
    hazards = data.get("hazards") or []  # SGLang tells one mean only
    alpha = ""
    if data.get("alpha"):
        alpha = (
            f"α = {_number(data, 'alpha/value', '{:.4f}')}, 95 % interval "
            f"{_number(data, 'alpha/low', '{:.4f}')} to {_number(data, 'alpha/high', '{:.4f}')}. "
        )
    prompts = f"{data['prompts']} prompts. " if data.get("prompts") else ""
    parts = [
        f"<header><p>Measured acceptance</p><h1>{_headline_tokens(data)}</h1>"
        f"<p>{_law_text(data)} {alpha}{prompts}</p></header>",
    ]
    if hazards:
        parts += _per_position(data, hazards)
    parts += _text_facts(data)
    parts += [f'<p class="note">{html.escape(note)}</p>' for note in data.get("notes") or ()]
    return "\n".join(parts)


def _text_facts(data: Mapping[str, Any]) -> list[str]:
    """Perplexities, the target's mass on the draft's ranks, calibration: where measured."""
    rows = [
        (f"{who.capitalize()} perplexity", f"{who}_perplexity")
        for who in ("target", "draft")
        if data.get(f"{who}_perplexity")
    ]
    rows += [
        (f"Mass on the draft's choice {rank + 1}", f"rank_acceptance/{rank}")
        for rank in range(len(data.get("rank_acceptance") or ()))
    ]
    if not rows:
        return []
    body = ""
    for name, at in rows:
        numbers = (_number(data, f"{at}/{key}", "{:.4g}") for key in ("value", "low", "high"))
        cells = "".join(f"<td>{n}</td>" for n in numbers)
        body += f'<tr><th scope="row">{name}</th>{cells}</tr>'
    facts = (
        '<h2>Over text</h2><div class="scroll"><table><thead><tr><th></th><th>value</th>'
        f"<th>from</th><th>to</th></tr></thead><tbody>{body}</tbody></table></div>"
    )
    if not data.get("confidence"):
        return [facts]
    errors = (_number(data, f"confidence/error_{when}") for when in ("before", "after"))
    before, after = errors
    return [facts, f"<p>Calibration error of the draft's confidence {before}, fitted {after}.</p>"]


def _per_position(data: Mapping[str, Any], hazards: Sequence[Mapping[str, float]]) -> list[str]:
    survival = "<th>all so far</th>" if data.get("survival") else ""
    parts = [
        '<div class="figures">',
        _figure(
            figures.intervals(hazards, "Acceptance per position", "position", "acceptance"),
            "Chance that a draft is accepted, given that all before it were; 95 % intervals.",
        ),
        *_round_figure(data),
        "</div>",
        '<h2>Per position</h2><div class="scroll"><table><thead><tr><th>position</th>'
        f"<th>acceptance</th><th>from</th><th>to</th>{survival}</tr></thead><tbody>",
    ]
    for i in range(len(hazards)):
        numbers = [
            _number(data, f"hazards/{i}/{key}", "{:.4f}") for key in ("value", "low", "high")
        ]
        if i < len(data.get("survival") or ()):
            numbers.append(_number(data, f"survival/{i}/value", "{:.4f}"))
        row = "".join(f"<td>{n}</td>" for n in numbers)
        parts.append(f'<tr><th scope="row">{i + 1}</th>{row}</tr>')
    return [*parts, "</tbody></table></div>"]


def _headline_tokens(data: Mapping[str, Any]) -> str:
    measured = data.get("tokens_per_round") or {}
    if not measured:
        return "Acceptance"
    longest = max(measured, key=int)
    tokens = _number(data, f"tokens_per_round/{longest}", "{:.2f}")
    return f"{tokens} tokens per round at lookahead {longest}"


def _law_text(data: Mapping[str, Any]) -> str:
    law = data.get("law") or {}
    match law.get("type"):
        case "Geometric":
            return f"Constant acceptance {_number(data, 'law/alpha', '{:.3f}')}."
        case "BetaMixture":
            a, b = (_number(data, f"law/{name}") for name in "ab")
            return f"Acceptance differs between contexts as Beta({a}, {b})."
        case _:
            return ""


def _round_figure(data: Mapping[str, Any]) -> list[str]:
    """Tokens per round against lookahead: measured, and by the law."""
    measured = sorted((int(k), v) for k, v in (data.get("tokens_per_round") or {}).items())
    law = dict(data.get("law") or {})
    cls = getattr(acceptance, law.pop("type", ""), None)
    if not measured or cls is None:
        return []
    if "rates" in law:
        law["rates"] = jnp.asarray(law["rates"])
    lookaheads = np.arange(1, max(k for k, _ in measured) + 1)
    expected = np.asarray(acceptance.expected_tokens(cls(**law), lookaheads.astype(float)))
    series = {
        "measured": measured,
        "by the law": list(zip(lookaheads.tolist(), expected.tolist(), strict=True)),
    }
    svg = figures.lines(series, "Tokens per round", "lookahead", "tokens per round")
    return [_figure(svg, "Tokens per round, the bonus token included.")]
