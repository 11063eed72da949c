"""The one fitted model behind the FPGA tables and figures, read from experiments/results."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from experiments.fpga_fit import LENGTHS, RESULT
from sdx.theory.trees import LogAAT
from sdx.theory.verification import TwoLineRoofline, effective_performance

BOARDS = {
    "U280": (64 * 48, 460e9),
    "VHK158": (128 * 64, 819e9),
    "V80": (128 * 128, 819e9),
    "U250": (128 * 128, 77e9),
}


@dataclass(frozen=True)
class Model:
    """AAT law and roofline of LongSpec on Llama-3.1-8B, fitted by experiments/fpga_fit.py."""

    law: LogAAT
    roofline: TwoLineRoofline
    held_out: dict

    def seconds(self, board: str, context, length) -> np.ndarray:
        """Seconds of a round: verification of `length` tokens and drafting them."""
        elements, bandwidth = BOARDS[board]
        verify = self.roofline.verify_seconds(length, context, elements, bandwidth)
        return np.asarray(verify) + np.asarray(
            self.roofline.draft_seconds(length, context, bandwidth)
        )

    def speed(self, board: str, context, length, law: LogAAT | None = None) -> np.ndarray:
        """Tokens per second at verification length(s) `length`, root included."""
        length = np.asarray(length, float)
        seconds = self.seconds(board, float(context), length)
        return np.asarray(effective_performance(law or self.law, length, seconds, 0.0))

    def autoregressive(self, board: str, context) -> float:
        return 1 / float(self.roofline.memory_seconds(float(context), BOARDS[board][1]))

    def best_length(self, board: str, context, law: LogAAT | None = None) -> int:
        return int(LENGTHS[self.speed(board, context, LENGTHS, law).argmax()])


def fitted() -> Model:
    log = json.loads(RESULT.read_text(encoding="utf-8"))["log"]
    numbers = log["parameters"]
    return Model(
        law=LogAAT(**{k: numbers[k] for k in ("A", "B", "C")}),
        roofline=TwoLineRoofline(**{k: v for k, v in numbers.items() if k not in "ABC"}),
        held_out=log["leave_one_board_out"],
    )
