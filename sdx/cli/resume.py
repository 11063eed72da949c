"""Long measurements that can be taken up again: finished prompts are kept in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

CHUNK = 8  # prompts between two writes

Runs = dict[int, list[Any]]


def measured_in_chunks(
    path: str,
    identity: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    lookaheads: Sequence[int],
    measure: Callable[[Sequence[Sequence[int]]], Runs],
) -> Runs:
    """`measure` over chunks of prompts: lookahead -> one Measurement per prompt.

    path: JSON lines, the first saying what is measured, then one line per finished chunk; "" keeps
    nothing. identity: what must be equal to go on. Raises ValueError for the file of another
    measurement.
    """
    from sdx.reporting.data import from_data, to_data

    runs: Runs = {gamma: [] for gamma in lookaheads}
    file = Path(path) if path else None
    if file and file.is_file():
        for line in _lines(file, identity):
            for gamma in lookaheads:
                runs[gamma] += from_data(line[str(gamma)])
    elif file:
        file.write_text(json.dumps(identity) + "\n", encoding="utf-8")
    done = len(runs[lookaheads[0]])
    for start in range(done, len(prompts), CHUNK):
        found = measure(prompts[start : start + CHUNK])
        for gamma in lookaheads:
            runs[gamma] += found[gamma]
        if file:
            with open(file, "a", encoding="utf-8") as out:
                out.write(json.dumps(to_data({g: found[g] for g in lookaheads})) + "\n")
    return runs


def _lines(file: Path, identity: Mapping[str, Any]) -> list[Any]:
    """Finished chunks; a line that was cut off when the run ended is dropped from the file."""
    text = file.read_text(encoding="utf-8").splitlines()
    try:
        known = json.loads(text[0]) if text else None
    except ValueError:
        known = None
    if known != json.loads(json.dumps(identity)):
        raise ValueError(f"{file}: belongs to another measurement; name another file or remove it")
    chunks = []
    for line in text[1:]:
        try:
            chunks.append(json.loads(line))
        except ValueError:
            break
    file.write_text("\n".join([text[0], *map(json.dumps, chunks)]) + "\n", encoding="utf-8")
    return chunks
