"""Records as plain data (for JSON) and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from sdx import records

KNOWN = {
    name: value
    for name, value in vars(records).items()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
}


def to_data(value: Any) -> Any:
    """Dicts, lists, numbers and strings; a record carries its class name under "type".

    NaN and infinities become None: JSON has neither.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__} | fields
    if isinstance(value, dict):
        return {str(key): to_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_data(item) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    array = np.asarray(value)
    if array.ndim:
        return [to_data(item) for item in array]
    number = array.item()
    if isinstance(number, float) and not math.isfinite(number):
        return None
    return int(number) if isinstance(number, float) and number.is_integer() else number


def from_data(data: Any) -> Any:
    """The record that `to_data` wrote (records of `sdx.records` only).

    Raises ValueError for an unknown type or a field that does not belong to it.
    """
    if isinstance(data, list):
        return tuple(from_data(item) for item in data)
    if not isinstance(data, dict):
        return data
    if "type" not in data:
        return {key: from_data(item) for key, item in data.items()}
    cls = KNOWN.get(data["type"])
    if cls is None:
        raise ValueError(f"record type {data['type']!r} is unknown: one of {', '.join(KNOWN)}")
    fields = {key: from_data(item) for key, item in data.items() if key != "type"}
    extra = fields.keys() - {f.name for f in dataclasses.fields(cls)}
    if extra:
        raise ValueError(f"{data['type']} has no field {sorted(extra)[0]!r}")
    return cls(**fields)
