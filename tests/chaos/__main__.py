"""``python -m tests.chaos``: rounds of faults against the real stack, and the planted faults it has to find."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.chaos.plan import ALL, FULL_DISK, SHORT
from tests.chaos.planted import PLANTED
from tests.chaos.report import Report
from tests.chaos.run import Plan, run
from tests.chaos.store import FullDisk, Store


def main() -> int:
    """Run what the command line asks for; returns 0 where nothing broke and each planted fault was found."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="a few rounds of the faults whose recovery is short")
    parser.add_argument("--planted", default="", help="a planted fault by name, or `all`, instead of the sound product")
    parser.add_argument(
        "--disk-only", action="store_true", help="only the rounds in which a local store's disk is full"
    )
    parser.add_argument("--without-planted", action="store_true", help="only the sound product")
    options = parser.parse_args()
    names = list(PLANTED) if options.planted == "all" else [name for name in [options.planted] if name]
    if options.planted and not set(names) <= set(PLANTED):
        parser.error(f"--planted is one of all, {', '.join(PLANTED)}")
    report = Report(options.seed)
    if options.disk_only:
        _full_disk(report, options.rounds, options.seed)
    elif not names:
        _sound(report, options.rounds, options.seed, short=options.short)
        names = [] if options.short or options.without_planted else list(PLANTED)
    for name in names:
        _planted(report, name, options.seed)
    print("\n".join(report.lines()))
    return 0 if report.ok else 1


def _sound(report: Report, rounds: int, seed: int, *, short: bool) -> None:
    faults = SHORT if short else ALL
    with tempfile.TemporaryDirectory(prefix="twodoor-chaos-") as home:
        asyncio.run(run(Plan(rounds, seed, faults), Path(home), Store(), report))
    if not short:
        _full_disk(report, max(1, rounds // 10), seed)


def _full_disk(report: Report, rounds: int, seed: int) -> None:
    """On a folder: a disk that is full is not something an S3-compatible server can be."""
    with tempfile.TemporaryDirectory(prefix="twodoor-chaos-") as home:
        if not FullDisk.is_possible(Path(home)):
            print("chaos: not run: a full disk (this user may not mount a file system of its own)")
            return
        plan = Plan(rounds, seed, FULL_DISK, per_round=1, calm=())
        asyncio.run(run(plan, Path(home), FullDisk(Path(home)), report))


def _planted(report: Report, name: str, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="twodoor-chaos-") as home:
        plan = Plan(10, seed, PLANTED[name].faults, per_round=1, calm=(), planted=name, end_s=45.0)
        asyncio.run(run(plan, Path(home), Store(), report))


if __name__ == "__main__":
    sys.exit(main())
