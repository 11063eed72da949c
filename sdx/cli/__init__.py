"""The door: one subcommand, one function call.

Every command returns plain data and the lines that a person reads; `--json FILE|-` writes the
data. Bad input is a ValueError or an OSError with one clear line, printed here and nowhere else;
the exit code is then 2. JAX is imported by the commands, so that `sdx --help` is quick.
"""

from __future__ import annotations

import contextlib
import io
import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import tyro

from sdx.cli.base import Command, Outcome
from sdx.cli.calibrate import Calibrate
from sdx.cli.design import Design
from sdx.cli.pair import Generate, Measure
from sdx.cli.report import Export, Report
from sdx.cli.train import Train

DESCRIPTION = "Design speculative decoding by gradient, run it, measure it."

Commands = (
    Annotated[Design, tyro.conf.subcommand("design")]
    | Annotated[Measure, tyro.conf.subcommand("measure")]
    | Annotated[Calibrate, tyro.conf.subcommand("calibrate")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Report, tyro.conf.subcommand("report")]
)


def parse(argv: list[str] | None) -> Command:
    """The command, or ValueError with the parser's complaint in one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(Commands, args=argv, prog="sdx", description=DESCRIPTION)
    except SystemExit as exit:
        if not exit.code:
            raise  # --help
        # A frame of box characters, or of ASCII where the stream cannot show them, below a title.
        lines = [line.strip(" │╭╮╰╯|") for line in complaint.getvalue().strip().splitlines()]
        said = [line for line in lines[1:] if line.strip("─-+")] or ["cannot read the arguments"]
        first = " ".join(said[:2]) if said[0].endswith(":") else said[0]
        raise ValueError(f"{first} (sdx --help lists the options)") from None


def write(outcome: Outcome, destination: str) -> None:
    """The lines for a person, unless JSON goes to the same place."""
    data, lines = outcome
    text = json_module.dumps(data, indent=1)
    if destination == "-":
        print(text)
        return
    if destination:
        Path(destination).write_text(text + "\n", encoding="utf-8")
    print("\n".join(lines))


def main(argv: list[str] | None = None) -> int:
    """Runs one command. 0: done; 2: bad input, said in one line on standard error."""
    try:
        command = parse(argv)
        write(command.run(), command.json)
        return 0
    except SystemExit as exit:
        return int(exit.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except (ValueError, OSError) as error:
        print("sdx: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
