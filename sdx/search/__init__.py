"""SEARCH WING: maximises the objective of `theory`; knows no network."""

from sdx.search.design import DesignResult, design

__all__ = ["DesignResult", "design"]
