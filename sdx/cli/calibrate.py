"""`sdx calibrate`: this machine, or a serving engine's own numbers, as a model of the hardware."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sdx.cli.base import Command, Outcome, numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate(Command):
    """This machine's roofline, or acceptance and step times from a serving engine's files."""

    hardware: str = "here"
    """"here" times forward passes on this machine."""
    models: str = ""
    """Checkpoint folders to time, comma-separated; none: two decoders with random weights."""
    tokens: str = "1,2,4,8,16"
    """New tokens per step."""
    contexts: str = "64,256"
    repeats: int = 7
    memory_bytes: float = 16e9
    """Capacity written into the TOML."""
    out: str = "hardware.toml"
    """Where the hardware TOML goes."""
    metrics: str = ""
    """A saved metrics page of vLLM or SGLang: acceptance instead of hardware."""
    before: str = ""
    """An earlier page; the difference counts."""
    requests: str = ""
    """vLLM's per-request metrics instead of a page."""
    steps: str = ""
    """A CSV of measured steps (batch,tokens,context,seconds) of --model instead of timing here."""
    model: str = ""
    """Preset or config.json that the CSV was measured with."""

    def run(self) -> Outcome:
        from sdx.calibration import machine

        if self.metrics or self.requests:
            return self._engine()
        if self.steps:
            found = self._table(machine)
        elif self.hardware == "here":
            from sdx.reporting.progress import Reporter

            folders = [name for name in self.models.split(",") if name]
            grid = [
                [int(x) for x in numbers(text, name)]
                for text, name in ((self.tokens, "tokens"), (self.contexts, "contexts"))
            ]
            with Reporter().stage("timing forward passes") as report:
                found = machine.time_here(
                    folders, *grid, self.repeats, self.memory_bytes, report=report
                )
        else:
            raise ValueError(
                f"hardware {self.hardware!r}: only 'here' can be timed; give --steps, --metrics or "
                "--requests for measurements made elsewhere"
            )
        Path(self.out).write_text(found.fit.to_toml(found.title), encoding="utf-8")
        return found.data() | {"toml": self.out}, [*found.lines(), f"written: {self.out}"]

    def _table(self, machine):
        from sdx.interop.step_times import read_step_times
        from sdx.theory.transformers import load_architecture

        if not self.model:
            raise ValueError("--steps needs --model: the architecture that was timed")
        architecture = load_architecture(self.model)
        table = read_step_times(self.steps, architecture.name, Path(self.steps).stem)
        title = f"steps of {Path(self.steps).name}, {self.model}"
        return machine.fit_table(architecture, table, self.memory_bytes, title)

    def _engine(self) -> Outcome:
        """Acceptance from an engine's own counters."""
        from sdx.calibration import fit
        from sdx.calibration.chains import hazard_lines
        from sdx.interop.metrics import EngineCounts, read_prometheus, read_requests
        from sdx.reporting.data import to_data

        if self.requests:
            counts = read_requests(self.requests)
        else:
            counts = read_prometheus(self.metrics, self.before or None)
        if not isinstance(counts, EngineCounts):
            law, alpha = counts.geometric()
            line = f"alpha {alpha.value:.4f} [{alpha.low:.4f}, {alpha.high:.4f}] (constant)"
            return to_data({"law": law, "alpha": alpha, "engine": counts.engine}), [line]
        reached, accepted = counts.trials()
        hazards = fit.fit_hazards(reached, accepted)
        law = hazards.law if len(reached) < 2 else fit.fit_beta_mixture(reached, accepted).law
        data = {
            "law": law,
            "hazards": hazards.hazards,
            "survival": hazards.survival,
            "tokens_per_round": {counts.lookahead: counts.tokens_per_round},
            "engine": counts.engine,
            "notes": counts.notes,
        }
        lines = hazard_lines(hazards)
        return to_data(data), [*lines, f"{counts.tokens_per_round:.3f} tokens per round"]
