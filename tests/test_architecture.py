"""Who may import whom (the table of docs/architecture.md), read from the syntax tree."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "sdx"
ALLOWED = {
    "records": {"records"},
    "theory": {"records", "theory"},
    "search": {"records", "theory", "search"},
    "kernels": {"kernels"},
    "models": {"kernels", "models"},
    "decoding": {"records", "models", "kernels", "decoding"},
    "training": {"models", "decoding", "training"},
    "calibration": {"records", "theory", "decoding", "models", "calibration"},
    "interop": {"records", "theory", "models", "interop"},
    "reporting": {"records", "theory", "models", "reporting"},
}
FREE = {"__init__", "__main__", "cli"}  # the door: may import anything, nobody imports it


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Names of the folders of sdx that a file imports, relative imports resolved."""
    package = ("sdx", *path.relative_to(ROOT).parent.parts)
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*prefix, node.module or "")).strip(".")
            found += [base] if base != "sdx" else [f"sdx.{a.name}" for a in node.names]
    return {name.split(".")[1] for name in found if name.startswith("sdx.")}


FILES = [p for p in sorted(ROOT.rglob("*.py")) if room(p) not in FREE]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_table(path):
    assert room(path) in ALLOWED, f"{room(path)} is not a room of the house"
    allowed = ALLOWED[room(path)]
    if path == ROOT / "theory" / "numerics.py":
        allowed = set()  # the floor everything in theory stands on
    extra = imported_rooms(path) - allowed
    assert not extra, f"{path.relative_to(ROOT)} imports sdx.{sorted(extra)}, allowed {allowed}"
