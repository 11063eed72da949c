"""SEARCH WING: maximises the objective of `theory`; knows no network."""

from sdx.search.design import DesignResult, design
from sdx.search.problems import Knobs

__all__ = ["DesignResult", "Knobs", "design"]
