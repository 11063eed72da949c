"""Token trees: expected tokens, optimal trees, the soft tree, AAT laws (DESIGN 'Trees')."""

from sdx.theory.trees.aat import LogAAT, StretchedAAT, fit_aat, r_squared
from sdx.theory.trees.base import Tree, expected_tokens_of_tree, structure
from sdx.theory.trees.builders import (
    PriorScoreTree,
    depth_based_tree,
    maximal_tree,
    prior_score_tree,
    width_based_tree,
)
from sdx.theory.trees.exact import greedy_tree, is_monotone, optimal_tree, tree_profile
from sdx.theory.trees.soft import SoftTree, candidate_tree, soft_tree

__all__ = [
    "LogAAT",
    "PriorScoreTree",
    "SoftTree",
    "StretchedAAT",
    "Tree",
    "candidate_tree",
    "depth_based_tree",
    "expected_tokens_of_tree",
    "fit_aat",
    "greedy_tree",
    "is_monotone",
    "maximal_tree",
    "optimal_tree",
    "prior_score_tree",
    "r_squared",
    "soft_tree",
    "structure",
    "tree_profile",
    "width_based_tree",
]
