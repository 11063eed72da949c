"""`sdx export` and `sdx report`: a design carried out of sdx."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from sdx.cli.base import Command, Outcome, read_json

ENGINES = ("vllm", "sglang", "trtllm")


def engine_config(data: Any, source: str, engine: str, target: str, draft: str, context=None):
    """The `EngineConfig` of a design's JSON.

    The cells of one context (None: the first cell's) become the batch -> lookahead schedule; where
    only one batch was designed, its cell alone. Raises ValueError where there is no design, or with
    the engine's reason.
    """
    from sdx.interop.engines import export, ranges_from_batches
    from sdx.records import Autoregressive
    from sdx.reporting.data import from_data

    cells = data.get("cells") if isinstance(data, dict) else None
    if not cells:
        raise ValueError(f"{source}: no designs in it; write it with sdx design --json")
    context = cells[0]["context"] if context is None else context
    known = sorted({cell["context"] for cell in cells})
    cells = [cell for cell in cells if cell["context"] == context]
    if not cells:
        raise ValueError(f"{source}: no cell of context {context:g}; it has {known}")
    chosen = max(cells, key=lambda cell: cell["speedup"])
    design = from_data(chosen["design"])
    wins = {int(c["batch"]): c["verdict"] == "speculate" for c in cells}
    if not any(wins.values()):
        design = dataclasses.replace(design, policy=Autoregressive())
    chains = all(c["design"]["policy"]["type"] == "Chain" for c in cells)
    schedule = ()
    if len(cells) > 1 and chains and any(wins.values()):
        best = {int(c["batch"]): wins[int(c["batch"])] * int(c["lookahead"]) for c in cells}
        ranges = ranges_from_batches(best)
        schedule = ranges if len(ranges) > 1 else ()  # one lookahead needs no schedule
    return export(design, engine, target=target, draft=draft, schedule=schedule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(Command):
    """A design of `sdx design --json FILE` as the configuration of a serving engine."""

    design: str
    """JSON file of `sdx design`."""
    engine: Literal["vllm", "sglang", "trtllm"]
    target: str = "TARGET_MODEL"
    """Folder or hub id that the engine serves."""
    draft: str = "DRAFT_MODEL"
    context: float | None = None
    """Which context's cells become the batch -> lookahead schedule; none: the first."""
    out: str = "."
    """Folder for the files that the command refers to."""

    def run(self) -> Outcome:
        data = read_json(self.design)
        config = engine_config(
            data, self.design, self.engine, self.target, self.draft, self.context
        )
        folder = Path(self.out)
        if config.files:
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in config.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        written = [f"written: {folder / name}" for name in config.files]
        return config.to_json(), [
            line for line in (config.command, *config.notes, *written) if line
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Command):
    """One self-contained HTML page of a design or a measurement."""

    source: str
    """JSON file of `sdx design`, `sdx measure` or `sdx calibrate --metrics`."""
    out: str = "report.html"
    target: str = "TARGET_MODEL"
    """Folder or hub id for the engine configurations of a design."""
    draft: str = "DRAFT_MODEL"
    context: float | None = None
    """Which context's cells become the batch -> lookahead schedule; none: the first."""

    def run(self) -> Outcome:
        from sdx.reporting.page import render

        data = read_json(self.source)
        if not isinstance(data, dict):
            raise ValueError(f"{self.source}: no design or measurement in it")
        engines: dict[str, Any] = {}
        for engine in ENGINES if data.get("cells") else ():
            try:
                config = engine_config(
                    data, self.source, engine, self.target, self.draft, self.context
                )
                engines[engine] = config.to_json()
            except ValueError as error:
                engines[engine] = {"refused": str(error)}
        Path(self.out).write_text(render(data, engines), encoding="utf-8")
        return {"page": self.out, "engines": engines}, [f"written: {self.out}"]
