"""Chains of several lookaheads over several prompts -> everything known of a pair's acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sdx.calibration import fit
from sdx.calibration.measure import pooled
from sdx.records import Interval, Measurement, Number, record
from sdx.theory.acceptance import BetaMixture, PerPosition


@record
class ChainFit:
    """What the chains of one pair say.

    alpha: from TAR(gamma); None with a single lookahead. hazards, mixture: from the counts of all
    lookaheads together. tokens_per_round[gamma] (bonus included), seconds_per_round[gamma] (the
    median prompt's). design_effect: by how much prompts differ more than chance; the intervals of
    the hazards count that many rounds as one.
    """

    alpha: fit.AlphaFit | None
    hazards: fit.HazardFit
    mixture: fit.BetaMixtureFit | None
    tokens_per_round: dict[int, Number]
    seconds_per_round: dict[int, Number]
    design_effect: Number

    @property
    def law(self) -> BetaMixture | PerPosition:
        """The beta mixture, or the hazards themselves where there is one position only."""
        return self.hazards.law if self.mixture is None else self.mixture.law

    def lines(self) -> list[str]:
        """For a person."""
        lines = []
        if self.alpha is not None:
            a = self.alpha.alpha
            misfit = np.abs(self.alpha.residuals).max()
            lines.append(
                f"alpha {a.value:.4f} [{a.low:.4f}, {a.high:.4f}] from TAR at lookaheads "
                f"{', '.join(f'{g:g}' for g in self.alpha.lookaheads)}; largest misfit "
                f"{misfit:.3f} tokens per round"
            )
        lines += hazard_lines(self.hazards)
        if self.mixture is not None:
            m, c = self.mixture.mean, self.mixture.concentration
            law = self.mixture.law
            lines.append(
                f"beta mixture a = {float(law.a):.3f}, b = {float(law.b):.3f}: mean {m.value:.4f} "
                f"[{m.low:.4f}, {m.high:.4f}], a + b {c.value:.2f} [{c.low:.2f}, {c.high:.2f}]"
                + (" (no spread between contexts seen)" if self.mixture.geometric_limit else "")
            )
        for gamma, tokens in self.tokens_per_round.items():
            seconds = self.seconds_per_round[gamma]
            lines.append(
                f"lookahead {gamma}: {tokens:.3f} tokens, {1e3 * seconds:.3f} ms per round"
            )
        lines.append(f"design effect of prompts {self.design_effect:.2f}")
        return lines


def hazard_lines(hazards: fit.HazardFit) -> list[str]:
    """One line per position."""

    def text(i: Interval) -> str:
        return f"{i.value:.3f} [{i.low:.3f}, {i.high:.3f}]"

    pairs = zip(hazards.hazards, hazards.survival, strict=True)
    return [
        f"position {k + 1}: accepted after its predecessors {text(h)}, survival {text(s)}"
        for k, (h, s) in enumerate(pairs)
    ]


def design_effect(runs: Sequence[Measurement]) -> float:
    """Variance of the first draft's acceptance between prompts over that of independent rounds,
    at least 1: rounds of one prompt are alike."""
    n = np.asarray([m.drafted_per_position[0] for m in runs], float)
    k = np.asarray([m.accepted_per_position[0] for m in runs], float)
    count, share = n.size, k.sum() / n.sum()
    if count < 2 or not 0 < share < 1:
        return 1.0
    between = np.sum((k - share * n) ** 2) * count / (count - 1)
    return float(max(1.0, between / (n.sum() * share * (1 - share))))


def fit_chains(measured: Mapping[int, Sequence[Measurement]]) -> ChainFit:
    """measured[gamma]: one Measurement per prompt of a chain of gamma drafts.

    Raises ValueError where nothing was drafted or a measurement is not of a chain.
    """
    if not measured or min(measured) < 1:
        raise ValueError("acceptance needs chains of lookahead >= 1: nothing was drafted")
    chains = {int(gamma): pooled(runs) for gamma, runs in sorted(measured.items())}
    tokens = {gamma: float(m.tokens) / float(m.rounds) for gamma, m in chains.items()}
    positions = max(chains)
    reached, accepted = np.zeros(positions), np.zeros(positions)
    for gamma, chain in chains.items():
        n, k = fit.reached_and_accepted(chain)
        reached[:gamma] += n
        accepted[:gamma] += k
    deepest = measured[max(measured)]
    effect = design_effect(deepest)
    # The same prompts were decoded at every lookahead: their rounds are not new evidence either.
    effect *= len(chains)
    return ChainFit(
        alpha=fit.fit_alpha(list(tokens), list(tokens.values())) if len(tokens) > 1 else None,
        hazards=fit.fit_hazards(reached / effect, accepted / effect),
        mixture=fit.fit_beta_mixture(reached / effect, accepted / effect)
        if positions > 1
        else None,
        tokens_per_round=tokens,
        seconds_per_round={
            int(gamma): float(np.median([m.seconds / m.rounds for m in runs]))
            for gamma, runs in sorted(measured.items())
        },
        design_effect=effect / len(chains),
    )
