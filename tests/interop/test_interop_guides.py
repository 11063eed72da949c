"""README and guides: commands are understood, quick ones print what is printed, Python runs."""

import re
import shlex
from pathlib import Path

import pytest

from sdx.cli import main, parse

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
GUIDES = {
    "README": ROOT / "README.md",
    **{
        name: DOCS / f"{name}.md"
        for name in (
            "should-i-speculate",
            "calibrate-from-vllm",
            "plan-a-draft",
            "hardware-model",
            "draft-heads",
        )  # fmt: skip
    },
}


def blocks(language):
    for guide, path in GUIDES.items():
        text = path.read_text(encoding="utf-8")
        for block in re.findall(rf"```{language}\n(.*?)```", text, re.S):
            yield guide, block


COMMANDS = [
    (guide, line.removeprefix("$ "))
    for language in ("console", "sh")
    for guide, block in blocks(language)
    for line in block.splitlines()
    if line.startswith(("$ sdx ", "sdx "))
]


@pytest.mark.parametrize(("guide", "line"), COMMANDS)
def test_every_command_is_understood(guide, line):
    parse(shlex.split(line)[1:])


def test_no_guide_is_without_commands():
    assert {guide for guide, _ in COMMANDS} == set(GUIDES)


QUICK = [block for _, block in blocks("console") if "--metrics" in block or "--requests" in block]


@pytest.mark.parametrize("block", QUICK, ids=lambda b: b.split()[3])
def test_printed_output_is_the_commands(block, tmp_path, monkeypatch, capsys):
    command, *printed = block.strip().splitlines()
    (tmp_path / "docs").symlink_to(DOCS)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[2:]) == 0
    assert capsys.readouterr().out.strip().splitlines() == printed


@pytest.mark.parametrize(("guide", "code"), blocks("python"), ids=lambda x: x.split()[0])
def test_python_of_the_guides_runs(guide, code, capsys):
    exec(compile(code, guide, "exec"), {})
    assert capsys.readouterr().out.strip()
