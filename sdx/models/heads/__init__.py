"""Draft heads: small networks that draft from the target's features (contracts in base.py)."""

from sdx.models.heads.base import Head, HeadConfig, HeadOutput, features_of
from sdx.models.heads.storage import create_head, is_head, load_head, save_head
from sdx.models.heads.unroll import Step, unroll

__all__ = [
    "Head",
    "HeadConfig",
    "HeadOutput",
    "Step",
    "create_head",
    "features_of",
    "is_head",
    "load_head",
    "save_head",
    "unroll",
]
