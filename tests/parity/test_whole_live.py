"""The whole model against transformers itself, there and back: `make parity` (requirements-parity.txt)."""

import numpy as np
import pytest
import rich.console

from research.importing import weights
from research.runs import source as sources
from research.training import run
from tests import oracles
from tests.parity import whole

pytestmark = pytest.mark.parity
QUIET = rich.console.Console(quiet=True)
SIZES = [
    {},
    {"num_hidden_layers": 3, "compress_ratios": [128, 4, 4], "num_hash_layers": 3, "hc_mult": 2, "rope_scaling": None},
    {"num_hidden_layers": 4, "compress_ratios": [0, 0, 0, 0], "num_hash_layers": 0, "n_routed_experts": 9},
    {"num_hidden_layers": 6, "compress_ratios": [128, 128, 4, 128, 4, 128], "num_hash_layers": 3, "hidden_size": 24},
    {"num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "hc_sinkhorn_iters": 3, "tie_word_embeddings": True},
]


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("transformers", reason="needs requirements-parity.txt")
    from tests.parity import whole_reference

    return whole_reference


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_logits_and_gradients_of_other_sizes(reference, tmp_path, number):
    model = reference.Whole(100 + number, **SIZES[number])
    model.save(tmp_path / "saved")
    rng = np.random.RandomState(number)
    tokens = rng.randint(0, reference.SIZES["vocab_size"], (2, 201)).astype(np.int32)
    cotangent = rng.standard_normal((*tokens.shape, reference.SIZES["vocab_size"])).astype(np.float32)
    expected = model.run(tokens, cotangent)
    model.save_gradients(tmp_path / "gradients")
    settings = whole.settings(tmp_path / "saved")
    params = whole.from_folder(tmp_path / "saved", settings)
    oracles.assert_close(whole.logits(settings, params, tokens), expected, 1e-5)
    theirs = whole.from_folder(tmp_path / "gradients", settings, untrained=False)
    whole.assert_gradients_close(whole.gradients(settings, params, tokens, cotangent), theirs)


def test_what_was_trained_here_goes_back(reference, tmp_path):
    """Saved there, imported, trained for an update, exported, loaded there: the logits are those here."""
    model = reference.Whole(7, vocab_size=257)
    model.save(tmp_path / "saved")
    settings = whole.settings(tmp_path / "saved").replace(
        data={"seq_len": 128, "batch_size": 1},
        train={"steps": 1, "eval_batches": 1},
        optimizer={"warmup_steps": 0},
        wandb={"mode": "disabled"},
    )
    named = [settings.replace(run={"root": str(tmp_path), "id": name}) for name in ("imported", "trained")]
    weights.load(tmp_path / "saved", named[0], QUIET)
    run.run(named[1].replace(train={"start_from": "imported"}), {}, QUIET)
    weights.save(sources.find("ID", str(tmp_path), "trained"), tmp_path / "out", "float32", QUIET)

    tokens = np.random.RandomState(0).randint(0, 257, (1, 200)).astype(np.int32)
    back = reference.loaded(tmp_path / "out")
    ours = whole.logits(settings, whole.from_folder(tmp_path / "out", whole.settings(tmp_path / "out")), tokens)
    oracles.assert_close(ours, reference.logits(back, tokens), 1e-5)
    assert np.abs(ours - reference.logits(model.model, tokens)).max() > 1e-3  # it was trained
