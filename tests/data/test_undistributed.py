"""Datasets that every rank of a job goes through: a warning, unless that is meant."""

import pytest

SCRIPT = """
import warnings
from mpi4py import MPI
import mpidist
from mpidist import AutoShardPolicy, Dataset, Options

warnings.simplefilter("always")
strategy = mpidist.MirroredStrategy()
rank, ranks = strategy.extended.replica_id, strategy.num_replicas_in_sync
rows = Dataset.range(8).shuffle().batch(2)
meant = rows.with_options(Options(AutoShardPolicy.OFF)).map(lambda x: x)

def generate():
    yield from rows

def make(context):
    assert len(list(rows)) == 4
    return rows.shard(context.num_input_pipelines, context.input_pipeline_id)

with warnings.catch_warnings(record=True) as caught:
    assert len(list(meant)) == 4
    assert len(list(rows.shard(2, rank % 2).map(lambda x: x))) == 2
    strategy.run(lambda: list(rows))
    list(strategy.experimental_distribute_dataset(rows.cache()))
    list(strategy.experimental_distribute_dataset(generate))
    list(strategy.experimental_distribute_dataset(lambda: rows))
    nested = Dataset.from_generator(lambda: rows).batch(3)
    list(strategy.experimental_distribute_dataset(nested))
    list(strategy.distribute_datasets_from_function(make))
    if rank == 0:
        list(rows)
    assert not caught, [str(w.message) for w in caught]

with warnings.catch_warnings(record=True) as caught:
    with strategy.scope():
        for epoch in range(2):
            for batch in rows:
                pass
            list(Dataset.from_generator(generate))
    found = [str(w.message) for w in caught]
    assert [w.filename for w in caught] == [__file__] * len(caught), caught[0].filename
for line in MPI.COMM_WORLD.gather(f"rank {rank}: {len(found)} {found}") or ():
    print(line)
"""


LOOP = """for batch in rows:
                pass"""
REDUCE = "rows.reduce(0, lambda state, batch: state)"


@pytest.mark.parametrize(
    "use", [LOOP, pytest.param(REDUCE, id="reduce", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_one_rank_warns_once(mpirun, tmp_path, ranks, use):
    path = tmp_path / "script.py"
    assert LOOP in SCRIPT
    path.write_text(SCRIPT.replace(LOOP, use))
    result = mpirun(ranks, str(path))
    lines = sorted(line for line in result.stdout.splitlines() if "rank " in line)
    if ranks == 1:
        assert lines == ["rank 0: 0 []"]
        return
    assert (lines[0], lines[2]) == ("rank 0: 0 []", "rank 2: 0 []")
    for words in ["rank 1: 1 ", "the 3 ranks", "AutoShardPolicy.OFF"]:
        assert words in lines[1]
    assert "strategy.experimental_distribute_dataset(dataset)" in lines[1]
