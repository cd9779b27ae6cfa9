"""What code written for tf.train.Checkpoint and its manager calls."""

import os
from pathlib import Path

import numpy as np
import pytest
from all_ranks import on_root

import mpidist
from mpidist import CheckpointError


class Model:
    """An object with state, as programs have them: attributes."""

    def __init__(self, w):
        self.w = w
        self.name = "model"


# A root


def variable(strategy, value):
    with strategy.scope():
        return mpidist.Variable(np.full(2, value))


def saved_names(strategy, checkpoint, path):
    other = mpidist.Checkpoint(strategy=strategy)
    unused = other.restore(path, is_partial=True).unused
    return sorted(name.strip("'") for name in unused)


def roots(strategy):
    w = variable(strategy, 1.0)
    yield w, {"w": w}
    yield w, mpidist.Checkpoint(w=w)
    yield w, Model(w)


def test_a_root_is_saved_as_its_objects_are(strategy, comm, mpi_tmp_path):
    for i, (w, root) in enumerate(roots(strategy)):
        checkpoint = mpidist.Checkpoint(root, step=3, strategy=strategy)
        assert checkpoint.root is root
        path = checkpoint.save(mpi_tmp_path / f"{i}")
        found = saved_names(strategy, checkpoint, path)
        assert {"w", "step"} <= set(found)
        w.assign(np.zeros(2))
        checkpoint.restore(path).assert_consumed()
        np.testing.assert_array_equal(w, [1, 1])
        # By name, as without a root; and the other way round
        w.assign(np.zeros(2))
        plain = mpidist.Checkpoint(strategy=strategy, w=w, step=0)
        plain.restore(path, is_partial=True).assert_existing_objects_matched()
        np.testing.assert_array_equal(w, [1, 1])
        comm.Barrier()


def test_a_root_has_what_it_has_when_it_is_saved(strategy, mpi_tmp_path):
    model = Model(variable(strategy, 1.0))
    checkpoint = mpidist.Checkpoint(model, strategy=strategy)
    model.more = variable(strategy, 2.0)
    model._private = variable(strategy, 3.0)
    path = checkpoint.save(mpi_tmp_path / "x")
    assert set(saved_names(strategy, checkpoint, path)) == {"more", "w"}
    model.more.assign(np.zeros(2))
    model.name = "other"
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(model.more, [2, 2])
    assert model.name == "other"  # no state, as in TensorFlow


def test_layers_of_a_root_are_saved(strategy, mpi_tmp_path):
    model, head = Model(variable(strategy, 1.0)), Model(variable(strategy, 2.0))
    layers = [Model(variable(strategy, 3.0 + i)) for i in range(2)]
    model.head, model.layers, model.by_name = head, layers, {"b": head, "n": 3}
    model.readonly = np.full(3, 9.0)
    model.readonly.flags.writeable = False
    model.random = np.random.default_rng(1)
    model.strategy, model.function, model.kind = strategy, len, Model
    model.plain = [1, "x", None]
    head.parent = model  # a circle
    checkpoint = mpidist.Checkpoint(model)
    path = checkpoint.save(mpi_tmp_path / "x")
    found = set(saved_names(strategy, model, path))
    assert found == {"by_name", "head", "layers", "random", "readonly", "w"}
    number = model.random.random()
    model.readonly = np.zeros(3)
    model.readonly.flags.writeable = False
    for part in (model, head, *layers):
        part.w.assign(np.zeros(2))
    checkpoint.restore(path).assert_consumed()
    assert [float(part.w[0]) for part in (model, head, *layers)] == [1, 2, 3, 4]
    assert model.head is head
    assert model.layers is layers
    assert model.by_name == {"b": head, "n": 3}
    assert model.readonly.tolist() == [9, 9, 9]
    assert model.random.random() == number
    assert (model.plain, head.parent) == ([1, "x", None], model)


def test_a_root_of_mappings_is_updated(strategy, mpi_tmp_path):
    root = {"step": 3, "x": np.ones(2)}
    checkpoint = mpidist.Checkpoint(root, strategy=strategy)
    path = checkpoint.save(mpi_tmp_path / "x")
    root["step"], root["x"][...] = 4, 0
    checkpoint.restore(path).assert_consumed()
    assert root["step"] == 3
    assert root["x"].tolist() == [1, 1]


def test_what_cannot_be_a_root_is_refused(strategy):
    w = variable(strategy, 1.0)
    for root in (3, "text", [w], (w,), np.ones(2), w, Model, len):
        with pytest.raises((TypeError, ValueError), match="root"):
            mpidist.Checkpoint(root)
    with pytest.raises(ValueError, match=r"w.*root"):
        mpidist.Checkpoint({"w": w}, w=w)
    assert mpidist.Checkpoint(None).root is not None
    assert mpidist.Checkpoint({"w": w}).strategy is strategy
    assert mpidist.Checkpoint(Model(w)).strategy is strategy


# The status


def test_old_calls_of_the_status_do_nothing(strategy, mpi_tmp_path):
    checkpoint = mpidist.Checkpoint(strategy=strategy, x=np.ones(2))
    status = checkpoint.restore(checkpoint.save(mpi_tmp_path / "x"))
    assert status.run_restore_ops() is None
    assert status.run_restore_ops(session=None) is None
    assert status.initialize_or_restore() is None
    assert status.initialize_or_restore(None) is None
    nothing = checkpoint.restore(None)
    assert nothing.initialize_or_restore() is None
    with pytest.raises(CheckpointError, match="no checkpoint was given"):
        nothing.run_restore_ops()


# sync


@pytest.mark.parametrize("which", ["checkpoint", "manager"])
def test_sync_waits_for_the_background(strategy, comm, mpi_tmp_path, which):
    x = np.ones(100_000)
    checkpoint = mpidist.Checkpoint(strategy=strategy, x=x)
    manager = mpidist.CheckpointManager(checkpoint, mpi_tmp_path, 2, is_background=True)
    assert checkpoint.sync() is None
    assert manager.sync() is None
    path = manager.save()
    assert (manager if which == "manager" else checkpoint).sync() is None
    comm.Barrier()
    assert os.path.exists(path)
    manager.wait()
    assert manager.checkpoints == [path]


# The interval


def test_the_last_step_may_be_given(strategy, mpi_tmp_path):
    steps = [5]
    checkpoint = mpidist.Checkpoint(strategy=strategy, x=1)

    def make(last):
        return mpidist.CheckpointManager(
            checkpoint,
            mpi_tmp_path,
            2,
            step_counter=lambda: steps[0],
            checkpoint_interval=3,
            last_checkpoint_step=last,
        )

    manager = make(4)
    assert manager.save() is None
    steps[0] = 7
    assert manager.save() is not None
    assert make(None).save() is not None
    assert make(np.int64(5)).save() is None
    last = strategy.extended.replica_id == strategy.num_replicas_in_sync - 1
    with pytest.raises(TypeError, match="last_checkpoint_step"):
        make("x" if last else 4)


# The latest


def test_the_latest_is_found_whatever_its_prefix(strategy, comm, mpi_tmp_path):
    latest = mpidist.latest_checkpoint
    assert latest(mpi_tmp_path) is None
    a = mpidist.Checkpoint(strategy=strategy, x=1)
    b = mpidist.Checkpoint(strategy=strategy, x=1)
    paths = [
        a.save(mpi_tmp_path / "ckpt"),
        a.save(mpi_tmp_path / "ckpt"),
        b.save(mpi_tmp_path / "model-best"),
        a.save(mpi_tmp_path / "ckpt"),
    ]
    b.write(mpi_tmp_path / "final")  # as in TensorFlow: without a number, not counted
    start = 1_700_000_000
    comm.Barrier()
    for i, path in enumerate(paths):
        on_root(comm, os.utime, path, (start + i, start + i))
    for path in reversed(paths):
        assert latest(mpi_tmp_path) == path
        assert latest(str(mpi_tmp_path)) == path
        name = Path(path).stem.rpartition("-")[0]
        assert latest(mpi_tmp_path, checkpoint_name=name) == path
        on_root(comm, os.remove, path)
    assert latest(mpi_tmp_path) is None


def test_other_files_and_damage_do_not_hide_the_latest(strategy, comm, mpi_tmp_path):
    x = np.ones(100)
    checkpoint = mpidist.Checkpoint(strategy=strategy, shard_bytes=8, x=x)
    path = checkpoint.save(mpi_tmp_path / "run")
    comm.Barrier()
    if comm.rank == 0:
        (mpi_tmp_path / "data-7.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
        (mpi_tmp_path / "notes.txt").write_text("")
        (mpi_tmp_path / "folder.h5").mkdir()
        (mpi_tmp_path / "zzz-9.h5").write_bytes(Path(path).read_bytes()[:-9])
    comm.Barrier()
    with pytest.warns(RuntimeWarning, match="zzz-9") as caught:
        assert mpidist.latest_checkpoint(mpi_tmp_path) == path
    assert len(caught) == 1


def test_the_order_of_one_prefix_is_that_of_saving(strategy, comm, mpi_tmp_path):
    """Times of files say what is newer of two prefixes only."""
    checkpoint = mpidist.Checkpoint(strategy=strategy, x=1)
    paths = [checkpoint.save(mpi_tmp_path / "ckpt") for _ in range(3)]
    comm.Barrier()
    if comm.rank == 0:
        os.utime(paths[0])
        os.utime(paths[1], (1, 1))
        os.utime(paths[2], (2, 2))
    comm.Barrier()
    assert mpidist.latest_checkpoint(mpi_tmp_path) == paths[2]


def test_a_filename_of_tensorflows_record_is_of_no_use(tmp_path):
    with pytest.raises(ValueError, match="latest_filename"):
        mpidist.latest_checkpoint(tmp_path, "checkpoint")
    assert mpidist.latest_checkpoint(tmp_path, None) is None


def test_a_container_of_a_model_may_mix_arrays_and_numbers(strategy, mpi_tmp_path):
    model = Model(np.zeros(1))
    model.mixed = {"w": np.zeros(2), "steps": 3, "names": ["x", np.ones(1)]}
    checkpoint = mpidist.Checkpoint(model, strategy=strategy)
    path = checkpoint.save(mpi_tmp_path / "ckpt")
    model.mixed["steps"] = 4
    model.mixed["w"][:] = 1
    checkpoint.save(mpi_tmp_path / "ckpt")
    checkpoint.restore(path).assert_consumed()
    assert model.mixed["steps"] == 3
    assert model.mixed["w"].tolist() == [0, 0]
    model.mixed = {"steps": 3}
    with pytest.raises(mpidist.ArgumentTypeError, match="was saved before, but"):
        checkpoint.save(mpi_tmp_path / "ckpt")
