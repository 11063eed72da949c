"""The 288 optimal draft sizes behind SDSL Tables 8, 9 and Figure 5, and the paper's regression."""

from __future__ import annotations

import itertools

import numpy as np

from paper_figs.comparison import as_numpy
from sdx.theory.scaling import DraftOptimum, optimal_draft_size

# Table 7 prints 1e13 as the upper end of D and D'; only 1e14 gives the coefficients of Tables 8
# and 9 (with 1e13 the margins of gamma are twice as wide).
M_GRID = np.geomspace(13e9, 110e9, 8)
D_GRID = np.geomspace(1e12, 1e14, 6)
NORMAL_95 = 1.959963984540054


def optima(draft_tokens=D_GRID) -> tuple[np.ndarray, DraftOptimum]:
    """[n, 3] rows of (M, D, D') and the optimum of each."""
    grid = np.array(list(itertools.product(M_GRID, draft_tokens, draft_tokens)))
    return grid, as_numpy(optimal_draft_size(*grid.T))


def hc3_regression(matrix, y) -> tuple[np.ndarray, np.ndarray, float]:
    """Ordinary least squares with HC3 errors: coefficients, 95 % margins (normal), R^2.

    HC3 covariance: (X'X)^-1 X' diag((e / (1 - h))^2) X (X'X)^-1, h the leverages.
    """
    scale = np.linalg.norm(matrix, axis=0)  # columns span 20 orders of magnitude
    x = matrix / scale
    bread = np.linalg.inv(x.T @ x)
    beta = bread @ x.T @ y
    residual = y - x @ beta
    leverage = np.einsum("ij,jk,ik->i", x, bread, x)
    meat = (x * (residual / (1 - leverage))[:, None] ** 2).T @ x
    margins = NORMAL_95 * np.sqrt(np.diag(bread @ meat @ bread))
    r_squared = 1 - residual @ residual / np.sum((y - y.mean()) ** 2)
    return beta / scale, margins / scale, float(r_squared)
