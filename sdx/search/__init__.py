"""SEARCH WING: maximises the objective of `theory`; knows no network."""

from sdx.search.cascades import optimal_lengths, optimal_thresholds
from sdx.search.describe import DesignResult
from sdx.search.design import design
from sdx.search.members import Members
from sdx.search.problems import Knobs
from sdx.search.schedule import BreakEven, Schedule, break_even, pareto, schedule
from sdx.search.sensitivity import DesignIntervals, intervals, tree_elasticities

__all__ = [
    "BreakEven",
    "DesignIntervals",
    "DesignResult",
    "Knobs",
    "Members",
    "Schedule",
    "break_even",
    "design",
    "intervals",
    "optimal_lengths",
    "optimal_thresholds",
    "pareto",
    "schedule",
    "tree_elasticities",
]
