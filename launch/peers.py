"""Our attention layer beside Hugging Face's eager one: `make peers`, or `python launch/peers.py --lengths=1024,4096`.

Needs requirements-parity.txt. Forward and backward of the whole layer (projections, compressor, indexer, attention),
batch 1, 8 heads of 64, float32, two threads. A JSON row a side, kept in `RUNS/peers/results.jsonl` and not measured
again by the same versions unless `--fresh`; then a table.
"""

from absl import flags as absl_flags

from launch import flags, measuring
from research.attention.visibility import KINDS
from research.errors import ConfigError
from research.settings.config import Settings

measuring.define_fresh()
measuring.define_root()
measuring.define_lengths("1024", "4096", "8192")
_KINDS = absl_flags.DEFINE_list("kinds", list(KINDS), f"kinds of attention, among {', '.join(KINDS)}")


def main() -> int:
    """Measures every kind at every length, and returns the exit code."""
    from research.measure import peers
    from research.measure.pipeline import Planned

    peers.check()
    planned = []
    for kind in _KINDS.value:
        for seq_len in measuring.lengths():
            settings = Settings().replace(model={"layers": (kind,)}, data={"seq_len": seq_len})
            planned += [Planned(program, {}, peers.timeout(settings)) for program in peers.programs(settings, "")]
    folder, console = measuring.folder(measuring.root(), "peers", ""), measuring.console()
    measured = measuring.measure(planned, folder / measuring.RESULTS, {}, console, measuring.print_row)
    table = measuring.table("kind", numbers=("tokens", "ours s", "peer s", "ratio", "ours peak MiB", "peer peak MiB"))
    table.add_column("status")
    for ours, peer in zip(measured.rows[::2], measured.rows[1::2], strict=False):
        seconds, sizes, ratio = [], [], ""
        for side in (ours, peer):
            seconds.append(f"{side['seconds']:.4f}" if "seconds" in side else "")
            sizes.append(f"{side['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in side else "")
        if all(seconds):
            ratio = f"{peer['seconds'] / ours['seconds']:.1f}"
        status = "ok" if all(seconds) else f"{ours['status']}, {peer['status']}"
        table.add_row(ours["visibility"], f"{ours['seq_len']:,}", *seconds, ratio, *sizes, status)
    console.print(table)
    return measuring.end(measured, folder, console)


def _check_flags() -> None:
    """Raises ConfigError where a flag's value is not allowed."""
    measuring.lengths()
    if not _KINDS.value or not set(_KINDS.value) <= set(KINDS):
        raise ConfigError(f"--kinds={','.join(_KINDS.value)}: must be among {', '.join(KINDS)}")


if __name__ == "__main__":
    flags.run(main, check=_check_flags)
