"""Runs in a browser: curves, time by phase, and trajectories with a colour for each token.

    python -m minirl.view runs/mine                     # live, also of a run that is not done
    python -m minirl.view runs/mine runs/other          # compares their curves
    python -m minirl.view runs/mine --export mine.html  # one file to keep or to send

Trajectories are there if the run has --rollout.dump. The page is served to this machine only; from
another one: ssh -L 8600:127.0.0.1:8600 HOST.
"""

import argparse
import sys
from pathlib import Path

from minirl.base.errors import BAD_INPUT, UserError, require
from minirl.view.server import MOST_GROUPS, Run, export, serve

PORT = 8600


def main(argv: list[str]) -> int:
    """Serve or export; return the exit code: 0: done; 2: a mistake."""
    flags = parser().parse_args(argv)
    try:
        require(
            flags.share is None or 0 < flags.share <= 1,
            f"--share {flags.share} must be above 0 and at most 1",
        )
        require(
            flags.export or flags.share is None,
            f"--share {flags.share} is of an export; name its file by --export",
        )
        require(
            not flags.export or Path(flags.export).resolve().parent.is_dir(),
            f"--export {flags.export}: there is no such folder",
        )
        require(
            not flags.export or not Path(flags.export).is_dir(),
            f"--export {flags.export} is a folder; name a file",
        )
        runs = [Run(Path(path)) for path in flags.runs]
        names = [run.name for run in runs]
        for run in runs:
            if names.count(run.name) > 1:  # They are told apart by their folders.
                run.name = str(run.path)
        if flags.export:
            num_exported, num_groups = export(runs, Path(flags.export), flags.share)
            print(
                f"wrote {flags.export} with {num_exported} of {num_groups} groups of trajectories, "
                "and with all metrics, answers and settings"
            )
            if num_exported < num_groups:
                print("--share 1 exports all groups")
        else:
            serve(runs, flags.port, lambda address: print(f"minirl: {address}", flush=True))
    except (UserError, OSError) as error:
        print(f"minirl: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:  # the usual end of a server
        pass
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    flags = argparse.ArgumentParser(
        prog="python -m minirl.view",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run (its --output)")
    flags.add_argument("--port", type=int, default=PORT, help="of the page; 0: a free one")
    flags.add_argument("--export", metavar="FILE", help="write one HTML file instead of serving")
    flags.add_argument(
        "--share",
        type=float,
        help="share of the groups of trajectories of a run to export, evenly over the steps "
        f"(default: all, or {MOST_GROUPS} if there are more)",
    )
    return flags


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
