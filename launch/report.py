"""Turns a folder of runs into one static page that opens offline: `make report`, or

    python launch/report.py --runs=runs

Sweeps, runs, benches and compilations below it become tables, plots and configs in `RUNS/report.html`, a single run in
a file beside its folder, which is left alone. What failed or is half-written appears as such.
"""

import pathlib

from absl import flags as absl_flags

from launch import flags
from research.runs import files

_RUNS = absl_flags.DEFINE_string("runs", "runs", "the folder of runs, or that of a sweep or a run")


def main() -> int:
    """Writes the page, and returns the exit code."""
    from analysis import collect, report

    root = pathlib.Path(_RUNS.value).expanduser()
    # A run's folder is its owner's alone.
    path = root.with_name(f"{root.name}.html") if collect.is_run(root) else root / "report.html"
    files.write_text(path, report.page(root))
    print(path)
    return 0


if __name__ == "__main__":
    flags.run(main, config_required=False)
