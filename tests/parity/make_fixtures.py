"""Writes tests/parity/fixtures from the reference: `python -m tests.parity.make_fixtures` (requirements-parity.txt).

`inputs.npz` holds x and the cotangent, one row of the longest case; a case of length S takes their first S tokens.
`<kind>.npz` holds the weights (`weight:<parameter>`) and for each S the output, its gradient by x, and the gradient
by each parameter (`<S>:output`, `<S>:x`, `<S>:<parameter>`). Of the longest case it holds only the last
`cases.KEPT_ROWS` rows of output and gradient by x, which keeps all of it below 3 MB. `whole/` is described in `whole`.
"""

import numpy as np

from research.attention.visibility import KINDS
from tests.parity import cases, reference, whole, whole_reference


def main() -> None:
    """Writes every file anew, and prints its size."""
    cases.FIXTURES.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    x, cotangent = rng.standard_normal((2, 1, cases.LONG, cases.HIDDEN), dtype=np.float32)
    files = {"inputs": {"x": x, "cotangent": cotangent}}
    for seed, kind in enumerate(KINDS):
        arrays = {}
        for _, seq_len, rope in (case for case in cases.CASES if case[0] == kind):
            layer = reference.Reference(kind, rope, seed)
            results = cases.kept(layer.run(x[:, :seq_len], cotangent[:, :seq_len]))
            arrays |= {f"weight:{name}": array for name, array in layer.parameters().items()}
            arrays |= {f"{seq_len}:{name}": array for name, array in results.items()}
        files[kind] = arrays
    for name, arrays in files.items():
        path = cases.FIXTURES / f"{name}.npz"
        np.savez_compressed(path, **arrays)
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    _write_whole()


def _write_whole(seed: int = 3) -> None:
    """The whole model; prints the share of gates beyond their limit."""
    model = whole_reference.Whole(seed)
    rng = np.random.RandomState(1)
    tokens = rng.randint(0, whole_reference.SIZES["vocab_size"], (1, whole.SEQ_LEN)).astype(np.int32)
    cotangent = rng.standard_normal((*tokens.shape, whole_reference.SIZES["vocab_size"])).astype(np.float32)
    logits = model.run(tokens, cotangent)
    model.save(whole.FOLDER / "weights")
    (whole.FOLDER / "weights" / "generation_config.json").unlink()
    model.save_gradients(whole.FOLDER / "gradients")
    np.savez_compressed(whole.FOLDER / "answers.npz", tokens=tokens, logits=logits, cotangent=cotangent)
    print(f"whole: {model.share_beyond(tokens):.1%} of the gates beyond their limit")


if __name__ == "__main__":
    main()
