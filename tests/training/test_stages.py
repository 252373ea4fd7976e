"""How CSA is trained: which loss reaches which parameters, and how one stage follows another."""

import functools
import shutil

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.spec import Spec
from research.errors import ConfigError, DamagedError
from research.model import language_model
from research.runs import checkpoints, files
from research.runs.folder import SUMMARY, read_rows, read_starts
from research.settings.config import read
from research.training import optimizer
from research.training import step as step_lib
from tests import tiny
from tests.oracles import assert_close
from tests.training.test_run import folder_of, train

SEQ_LEN = 64
MEASURED = ("kl", "recall", "coverage", "entropy", "useful")
# Stage and weight, and which groups they train.
ALL = ("sparse", 3.0)
STAGES = {
    ("dense", 1.0): {"model"},
    ("warmup", 0.5): {"indexer"},
    ALL: {"model", "indexer"},
    ("sparse", 0.0): {"model"},
}


def make(stage="sparse", weight=1.0, **overrides):
    config = tiny.get_config()
    config.model.layers = ("csa",)
    config.model.repeats = 2
    config.attention.update(csa_stage=stage, indexer_loss_weight=weight, top_k=3, window=8)
    config.attention.update(index_heads=2, index_head_width=8)
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in overrides.items()})
    return config


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    segments = np.array([[0] * 28 + [1] * 30 + [-1] * 6, [0] * 64])
    positions = np.broadcast_to(np.arange(SEQ_LEN), segments.shape)
    texts = rng.integers(0, 256, (2, *segments.shape))
    arrays = {"inputs": texts[0], "targets": texts[1], "positions": positions, "segments": segments}
    return {name: array.astype(np.int32) for name, array in arrays.items()}


@functools.cache
def initial_state():
    """Random parameters, and moments as if trained before."""
    config = make()
    state = step_lib.init(Spec.make(read(config)), optimizer.build(Spec.make(read(config))), 0)
    rng = np.random.default_rng(0)

    def moment(leaf):
        return jnp.asarray(rng.random(leaf.shape), leaf.dtype) if leaf.ndim else leaf + 7

    params = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * 0.3, leaf.dtype), state.params)
    return step_lib.State(params, jax.tree.map(moment, state.opt_state))


@functools.cache
def updated(stage, weight):
    config = make(stage, weight)
    spec = Spec.make(read(config))
    update = step_lib.make_update(spec, language_model.build(spec), optimizer.build(spec))
    return jax.jit(update)(initial_state(), batch())


@functools.cache
def gradients(of):
    """By all parameters, of the language model's loss or of the indexers' mean one."""
    model = language_model.build(Spec.make(read(make())))

    def loss(params):
        return step_lib.losses(model, params, batch())["loss" if of == "model" else "indexer_kl"].mean()

    return jax.jit(jax.grad(loss))(initial_state().params)


def groups(params):
    return [(optimizer.group(module, name), f"{module}/{name}", leaf) for module, name, leaf in params_of(params)]


params_of = hk.data_structures.traverse


@pytest.mark.slow
@pytest.mark.parametrize("of", ["model", "indexer"])
def test_each_loss_reaches_its_own_parameters_alone(of):
    for group, name, gradient in groups(gradients(of)):
        assert gradient.any() == (group == of), name


@pytest.mark.parametrize(
    ("stage", "weight"), [ALL, *(pytest.param(*one, marks=pytest.mark.slow) for one in STAGES if one != ALL)]
)
def test_a_stage_changes_what_it_trains_and_nothing_else(stage, weight):
    """Weight decay included: every parameter is large enough to shrink visibly."""
    before, (after, _) = initial_state(), updated(stage, weight)
    for (group, name, old), (_, _, new) in zip(groups(before.params), groups(after.params), strict=True):
        assert (old != new).any() == (group in STAGES[stage, weight]), name
    for group, state in after.opt_state.inner_states.items():
        pairs = zip(jax.tree.leaves(before.opt_state.inner_states[group]), jax.tree.leaves(state), strict=True)
        same = [np.array_equal(old, new) for old, new in pairs]
        assert same
        assert not any(same) if group in STAGES[stage, weight] else all(same), group


@pytest.mark.slow
def test_trees_do_not_depend_on_stage_or_weight():
    structures = {jax.tree.structure(updated(*key)[0]) for key in STAGES}
    assert structures == {jax.tree.structure(initial_state())}
    of = [jax.tree.structure(gradients(of)) for of in ("model", "indexer")]
    assert of == [jax.tree.structure(initial_state().params)] * 2


def test_the_indexers_leave_the_model_alone():
    """Whatever their loss weighs: not even the clipping of a common norm joins them."""
    with_loss, without = (dict(updated("sparse", weight)[0].params) for weight in (ALL[1], 0.0))
    for (group, name, left), (_, _, right) in zip(groups(with_loss), groups(without), strict=True):
        if group == "model":
            assert_close(left, right, 1e-6)
        else:
            assert (left != right).any(), name


def test_the_metrics_say_what_was_trained():
    assert {key for key in STAGES if "indexer_kl" in updated(*key)[1]} == {("warmup", 0.5), ALL}
    squares = {of: sum(float(jnp.square(leaf).sum()) for _, _, leaf in groups(gradients(of))) for of in STAGES[ALL]}
    np.testing.assert_allclose(updated("sparse", 0.0)[1]["grad_norm"], squares["model"] ** 0.5, rtol=1e-4)
    squares["indexer"] *= ALL[1] ** 2
    np.testing.assert_allclose(updated(*ALL)[1]["grad_norm"], sum(squares.values()) ** 0.5, rtol=1e-4)


def losses(measure=False, **config):
    spec = Spec.make(read(make(**config)))
    model = language_model.build(spec, measure)
    return jax.jit(functools.partial(step_lib.losses, model))(initial_state().params, batch())


def test_dense_stages_attend_to_all_entries():
    everything = losses(weight=0.0, attention__top_k=16)["loss"].mean()
    dense, warmup, sparse = (updated(*key)[1]["loss"] for key in (("dense", 1.0), ("warmup", 0.5), ALL))
    np.testing.assert_allclose([dense, warmup], everything, rtol=1e-6)
    assert abs(sparse - everything) > 1e-4


def test_measuring_changes_nothing_else():
    measured = losses(True, stage="warmup")
    metrics = updated("warmup", 0.5)[1]
    assert measured.keys() == {"loss", *(f"indexer_{name}" for name in MEASURED)}
    assert measured["indexer_kl"].count == 2 * measured["loss"].count  # two CSA layers
    for name in ("loss", "indexer_kl"):
        np.testing.assert_allclose(measured[name].mean(), metrics[name], rtol=1e-6)
    means = {name: float(measured[f"indexer_{name}"].mean()) for name in MEASURED}
    assert all(0 < means[name] < 1 for name in ("recall", "coverage", "useful"))


def test_a_restarted_schedule_keeps_the_moments():
    before = initial_state().opt_state
    after = optimizer.restarted(before)
    changed = [
        jax.tree_util.keystr(path)
        for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
        if not np.array_equal(old, new)
    ]
    assert changed == [f".inner_states['{group}'].inner_state[1][2].count" for group in ("indexer", "model")]
    assert optax_counts(after) == [7, 0, 7, 0]


def optax_counts(state):
    """Of the indexers, then of the rest: updates seen, and how far the learning rate's schedule is."""
    return [leaf.item() for leaf in jax.tree.leaves(state) if leaf.ndim == 0]


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """The three stages, one started from the other."""
    root, configs, before = tmp_path_factory.mktemp("runs"), {}, ""
    for stage in ("dense", "warmup", "sparse"):
        config = make(stage, train__steps=4, train__eval_every=2, train__start_from=before)
        config.run.root, config.run.id = str(root), stage
        before = stage if stage == "dense" else str(root / stage)  # by id or by path
        train(config)
        configs[stage] = config
    return configs


def final_state(config):
    like = step_lib.init(Spec.make(read(config)), optimizer.build(Spec.make(read(config))), config.seed)
    there = folder_of(config) / checkpoints.FOLDER
    return checkpoints.read(there, checkpoints.steps(there)[0], like).state


@pytest.mark.slow
def test_a_stage_starts_where_another_ended(chain):
    dense, warmup, sparse = (final_state(config) for config in chain.values())
    for (group, name, old), (_, _, new) in zip(groups(dense.params), groups(warmup.params), strict=True):
        assert np.array_equal(old, new) == (group == "model"), name
    assert optax_counts(dense.opt_state) == [0, 0, 4, 4]
    assert optax_counts(warmup.opt_state) == [4, 4, 4, 0]
    assert optax_counts(sparse.opt_state) == [8, 4, 8, 4]


@pytest.mark.slow
def test_what_a_stage_began_with_is_recorded_and_left_as_it_is(chain):
    dense = folder_of(chain["dense"])
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in dense.rglob("*")}
    half_written = dense / "checkpoints" / "9.orbax-checkpoint-tmp"  # of another process that is at work there
    half_written.mkdir()
    config = make("warmup", train__steps=2, optimizer__warmup_steps=1, train__start_from="dense@4")
    config.run.root, config.run.id = chain["dense"].run.root, "from_step"
    train(config)
    (start,) = read_starts(folder_of(config))
    digest = checkpoints.read(dense / "checkpoints", 4, step_lib.init(*_like(config))).digest
    assert start["started_from"] == {"run": str(dense), "step": 4, "digest": digest}
    assert files.read_json(folder_of(config) / SUMMARY)["started_from"] == start["started_from"]
    assert half_written.is_dir()
    half_written.rmdir()
    now = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in dense.rglob("*")}
    del before[dense / "checkpoints"], now[dense / "checkpoints"]  # the folder in which this test wrote
    assert now == before


def _like(config):
    return Spec.make(read(config)), optimizer.build(Spec.make(read(config))), config.seed


@pytest.mark.slow
@pytest.mark.parametrize("status", ["interrupted", "nan loss", ""])
def test_a_run_that_did_not_end_well_is_not_started_from(chain, tmp_path, status):
    shutil.copytree(folder_of(chain["dense"]), tmp_path / "other")
    if status:
        files.write_json(tmp_path / "other" / SUMMARY, {"status": status})
    else:
        (tmp_path / "other" / SUMMARY).unlink()
    config = make("warmup", train__start_from="other")
    config.run.root, config.run.id = str(tmp_path), "next"
    told = rf"^config\.train\.start_from='other': .*other is {status or 'unfinished, or no run'}; must be"
    with pytest.raises(ConfigError, match=told):
        train(config)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_started_from_and_stays_where_it_is(chain, tmp_path):
    shutil.copytree(folder_of(chain["dense"]), tmp_path / "other")
    (tmp_path / "other" / "checkpoints" / "4" / "state" / "manifest.ocdbt").unlink()
    config = make("warmup", train__start_from="other")
    config.run.root, config.run.id = str(tmp_path), "next"
    with pytest.raises(DamagedError, match=r"start_from='other': its checkpoint 4 is damaged \(state/manifest"):
        train(config)
    assert [path.name for path in (tmp_path / "other" / "checkpoints").iterdir()] == ["4"]


def test_rows_tell_the_stages_apart(chain):
    rows = {stage: read_rows(folder_of(config)) for stage, config in chain.items()}
    assert [row["step"] for row in rows["sparse"]] == [1, 2, 3, 4]
    assert rows["warmup"][-1]["val_loss"] == rows["dense"][-1]["val_loss"]  # nothing that tells has changed
    for stage, recorded in rows.items():
        assert all(("indexer_kl" in row) == (stage != "dense") for row in recorded)
        measured = [{name for name in row if name.startswith("val_indexer_")} for row in recorded]
        everything = {f"val_indexer_{name}" for name in MEASURED}
        assert measured == [set(), everything, set(), everything]
        summary = files.read_json(folder_of(chain[stage]) / SUMMARY)
        assert summary["val_indexer_recall"] == recorded[-1]["val_indexer_recall"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train__start_from": "nowhere"},
            r"start_from='nowhere': .*nowhere is unfinished, or no run; must be a",
        ),
        (
            {"train__start_from": "dense@3"},
            r"start_from='dense@3': .*dense has no checkpoint 3; must be ID@STEP, a",
        ),
        ({"model__hidden": 16}, r"start_from='dense': checkpoint 4 does not fit the model \(.*embed"),
    ],
    ids=str,
)
def test_nothing_fit_to_start_from(chain, changes, message):
    config = make("warmup", **{"train__start_from": "dense"} | changes)
    config.run.root, config.run.id = chain["dense"].run.root, "misfit" + "-".join(map(str, changes.values()))
    with pytest.raises(ConfigError, match=rf"^config\.train\.{message}[^\n]*$"):
        train(config)
