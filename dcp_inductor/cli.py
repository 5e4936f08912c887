"""The command line: ``python -m dcp_inductor doctor | bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dcp_inductor import config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["bench"]:  # has options of its own
        if problems := config.environment_problems():
            print("\n".join(problems.values()), file=sys.stderr)
            return 2
        from dcp_inductor import bench

        return bench.main(arguments[1:])

    parser = argparse.ArgumentParser(
        prog="python -m dcp_inductor",
        description="Tools around the torch.compile backend 'dcp_inductor'.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="show what this machine and installation can do; 1 if broken"
    )
    commands.add_parser("bench", help="time the direct ops against the collectives")
    parser.parse_args(arguments)

    from dcp_inductor import doctor

    found = doctor.facts()
    print(doctor.report(found))
    return int(any(fact.remedy for fact in found))
