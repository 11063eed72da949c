"""The HTML page: its numbers are the JSON's, it asks nothing of the network, Chromium opens it."""

import html.parser
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import pytest

from sdx.cli import main
from sdx.records import Chain, Design, DrafterSpec, DynamicTree, StaticTree, Workload
from sdx.reporting import figures
from sdx.reporting.data import to_data
from sdx.reporting.page import render
from sdx.theory.acceptance import BetaMixture
from sdx.theory.hardware import load_hardware
from sdx.theory.throughput import predict
from sdx.theory.transformers import load_architecture, parameters

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
LAW = BetaMixture(a=4.0, b=1.5)
ENGINES = {
    "vllm": {"command": 'vllm serve T --speculative-config \'{"k": "<5>"}\'', "notes": ["a & b"]},
    "sglang": {"refused": "SGLang has no block verification"},
    "trtllm": {"command": "trtllm-serve T", "files": {"config.yaml": "a:\n  b: 1\n"}},
}


@pytest.fixture(scope="module")
def designed():
    """Predictions of one chain over batch x context, in the form of `sdx design --json`."""
    target, draft = load_architecture("llama-3.1-8b"), load_architecture("llama-3.2-1b")
    hardware = load_hardware("h100-sxm")
    design = Design(drafter=DrafterSpec(name="llama-3.2-1b"), policy=Chain(lookahead=4))
    cells = []
    for batch in (1, 64, 512):
        for context in (128, 512):
            work = Workload(batch=batch, context=context)
            found = predict(design, work, target, hardware, LAW, draft)
            cells.append(_cell(batch, context, design, found, parameters(draft)))
    data = {"target": "llama-3.1-8b", "hardware": "h100-sxm", "devices": 1, "cells": cells}
    return json.loads(json.dumps(to_data(data | {"refused": ["batch 4096 does not fit <here>"]})))


def _cell(batch, context, design, prediction, size):
    names = (
        "verdict", "speedup", "tokens_per_second", "autoregressive_tokens_per_second",
        "tokens_per_round",
    )  # fmt: skip
    return {name: getattr(prediction, name) for name in names} | {
        "batch": batch,
        "context": context,
        "lookahead": 4,
        "tensor_parallel": 1,
        "draft": {"name": "llama-3.2-1b", "layers": 16, "width": 2048, "parameters": size},
        "bounds": {"draft": "memory", "verify": "memory"},
        "elasticities": {
            "hardware.memory_bandwidth_bytes_per_second": 0.93,
            "workload.batch": -0.2,
        },
        "certificate_gap": 0.0,
        "design": design,
        "prediction": prediction,
    }


@pytest.fixture(scope="module")
def measured():
    hazard = [
        {"type": "Interval", "value": 0.7 + i / 20, "low": 0.6, "high": 0.9} for i in range(4)
    ]
    return {
        "law": to_data(LAW),
        "alpha": {"value": 0.751234, "low": 0.72, "high": 0.78},
        "hazards": hazard,
        "survival": hazard,
        "tokens_per_round": {"1": 1.7, "2": 2.3, "4": 3.1},
        "prompts": 20,
        "target_perplexity": {"value": 6.25, "low": 6.1, "high": 6.4},
        "draft_perplexity": {"value": 10.57, "low": 10.1, "high": 11.0},
        "rank_acceptance": hazard[:2],
        "confidence": {"error_before": 0.081, "error_after": 0.012},
    }


class Numbers(html.parser.HTMLParser):
    """Collects (path, exact value, shown text) of every <data>, and addresses in attributes."""

    def __init__(self, page):
        super().__init__()
        self.found, self.addresses, self._open = [], [], None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "data":
            self._open = attributes
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            if name in attributes:
                self.addresses.append(attributes[name])

    def handle_data(self, text):
        if self._open:
            self.found.append((self._open["data-path"], float(self._open["value"]), text))
            self._open = None


def at(data, path):
    for step in path.split("/"):
        data = data[int(step)] if isinstance(data, list) else data[step]
    return data


@pytest.mark.parametrize("kind", ["designed", "measured"])
def test_numbers_equal_the_json(kind, request):
    data = request.getfixturevalue(kind)
    page = render(data, ENGINES)
    found = Numbers(page).found
    assert len(found) > 15
    for path, value, text in found:
        assert value == at(data, path), path
        shown = float(re.sub(r"[×,%]", "", text))
        shown = shown / 100 if text.endswith("%") else shown
        assert shown == pytest.approx(value, rel=6e-3, abs=6e-4), path
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert json.loads(embedded[1]) == data


def test_every_cell_shows_its_speedup_and_verdict(designed):
    page = render(designed)
    paths = [p for p, _, _ in Numbers(page).found]
    for i, cell in enumerate(designed["cells"]):
        assert paths.count(f"cells/{i}/speedup") >= 2
        assert cell["verdict"] in page
    verdicts = {c["verdict"] for c in designed["cells"]}
    assert verdicts == {"speculate", "do not speculate"}  # the fixture has both
    wins = sum(c["verdict"] == "speculate" for c in designed["cells"])
    assert f"Speculate in {wins} of 6 cells." in page


@pytest.mark.parametrize("kind", ["designed", "measured"])
def test_no_address_leaves_the_page(kind, request):
    page = render(request.getfixturevalue(kind), ENGINES)
    assert all(a.startswith(("#", "data:")) for a in Numbers(page).addresses)
    assert not re.search(r"https?:|@import|url\((?!#)", page)


def test_text_is_escaped(designed):
    page = render(designed | {"target": "<img src=x>"}, ENGINES)
    assert "<img" not in page and "&lt;here&gt;" in page and "a &amp; b" in page
    assert "SGLang has no block verification" in page and "config.yaml" in page


def test_trees_are_drawn(designed):
    cell = designed["cells"][0]
    trees = {
        "token tree of 3": StaticTree(parents=(-1, -1, 0)),
        "depth 3, up to 4": DynamicTree(budget=9, depth=3, branching=4),
    }
    for caption, policy in trees.items():
        design = cell["design"] | {"policy": to_data(policy)}
        page = render(designed | {"cells": [cell | {"design": design}]})
        assert caption in page


def test_a_tree_drawing_has_its_nodes_and_edges():
    parents = (-1, -1, 0, 0, 2)
    drawing = figures.tree(parents, "t")
    root = ET.fromstring(drawing)
    texts = {e.text for e in root.iter("text")}
    assert {"1", "2", "3", "4", "5"} <= texts
    depth, rank = figures._positions(parents)
    assert (
        depth == [0, 1, 1, 2, 2, 3] and len({(d, r) for d, r in zip(depth, rank, strict=True)}) == 6
    )


def test_a_mean_without_positions_is_a_page_too(measured):
    page = render({"law": {"type": "Geometric", "alpha": 0.75}, "alpha": measured["alpha"]})
    paths = {p for p, _, _ in Numbers(page).found}
    assert paths == {"law/alpha", "alpha/value", "alpha/low", "alpha/high"}


def test_neither_design_nor_measurement():
    with pytest.raises(ValueError, match="neither a design"):
        render({"tokens": 1})


def test_report_and_export_commands(designed, tmp_path, capsys):
    """A cell that does not pay becomes lookahead 0 of the schedule, or ends it."""
    source = tmp_path / "design.json"
    source.write_text(json.dumps(designed))
    page = tmp_path / "page.html"
    assert main(["report", "--source", str(source), "--out", str(page), "--target", "org/T"]) == 0
    text = page.read_text()
    assert "vllm serve org/T" in text and "sglang.launch_server" in text and "trtllm-serve" in text
    arguments = ["--design", str(source), "--engine", "vllm", "--json", "-"]
    capsys.readouterr()
    assert main(["export", *arguments]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    ranges = options["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1 and ranges[-1][1] == 512
    by_batch = {b: k for low, high, k in ranges for b in range(low, high + 1)}
    for cell in designed["cells"][::2]:  # context 128
        assert by_batch[cell["batch"]] == (4 if cell["verdict"] == "speculate" else 0)
    assert main(["export", *arguments, "--context", "7"]) == 2
    assert "no cell of context 7; it has [128, 512]" in capsys.readouterr().err
    out = tmp_path / "out"
    assert main(["export", *arguments[:3], "trtllm", "--out", str(out)]) == 0
    assert (out / "config.yaml").read_text().startswith("speculative_config:")


# ---------------------------------------------------------------------------- in a browser

browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def open_in_chromium(path, folder):
    """(DOM after loading, console messages); the name resolver knows no host."""
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={folder}", "--enable-logging=stderr", "--dump-dom",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"file://{path}",
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@browser
@pytest.mark.parametrize("kind", ["designed", "measured"])
def test_chromium_opens_it_without_a_console_message(kind, request, tmp_path):
    data = request.getfixturevalue(kind)
    (tmp_path / "page.html").write_text(render(data, ENGINES))
    dom, console = open_in_chromium(tmp_path / "page.html", tmp_path / "profile")
    assert console == []
    found = Numbers(dom).found
    assert found and all(value == at(data, path) for path, value, _ in found)
    assert dom.count("<svg") == dom.count("</svg>") >= 2


@browser
def test_an_external_request_would_be_seen(designed, tmp_path):
    """The policy of the page turns any request into a console message, so none means none."""
    page = render(designed).replace("<main>", '<main><img src="https://example.invalid/x.png">')
    (tmp_path / "page.html").write_text(page)
    _, console = open_in_chromium(tmp_path / "page.html", tmp_path / "profile")
    assert any("Content Security Policy" in line for line in console)
