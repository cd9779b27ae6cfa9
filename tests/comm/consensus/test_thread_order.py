"""Collectives from several threads of each rank."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mpidist


def run_all(jobs):
    """Run functions in threads of the given names; return results or errors by name."""
    results = {}

    def work(name, job):
        try:
            results[name] = job()
        except Exception as error:
            results[name] = error

    threads = [
        threading.Thread(target=work, args=item, name=item[0]) for item in jobs.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_in_any_order_get_their_own_results(strategy):
    rank, n = strategy.extended.replica_id, strategy.num_replicas_in_sync

    def job(factor):
        def step():
            context = mpidist.get_replica_context()
            return context.all_reduce("SUM", np.full(3, float(factor)))

        return lambda: [
            strategy.experimental_local_results(strategy.run(step))[0].tolist()
            for _ in range(20)
        ]

    names = ["one", "two", "three"]
    # Each rank starts them in an order of its own
    order = names[rank % 3 :] + names[: rank % 3]
    results = run_all({name: job(names.index(name) + 1) for name in order})
    for i, name in enumerate(names):
        assert results[name] == [[n * (i + 1.0)] * 3] * 20


def test_a_thread_and_the_main_thread(strategy):
    n = strategy.num_replicas_in_sync
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(strategy.reduce("SUM", 2) for _ in range(50)),
        name="other",
    )
    thread.start()
    main = [strategy.reduce("SUM", 1.0) for _ in range(50)]
    thread.join()
    assert main == [n] * 50
    assert results == [2 * n] * 50


def run_in_pool(jobs):
    """Like `run_all`, in threads of a pool, with names of its own."""
    results = {}
    with ThreadPoolExecutor(1, "pool") as pool:
        for name, job in jobs.items():
            try:
                results[name] = pool.submit(job).result()
            except Exception as error:
                results[name] = error
    return results


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("run", [run_all, run_in_pool])
@pytest.mark.parametrize("others", ["the main thread", "another thread"])
def test_a_thread_that_other_ranks_do_not_have_is_an_error_on_all(
    strategy, run, others
):
    """At once: the main thread of each rank waits for the thread that calls."""
    n = strategy.num_replicas_in_sync

    def reduce():
        return strategy.reduce("SUM", 1)

    if strategy.extended.replica_id == 0:
        error = run({"lonely": reduce})["lonely"]
    elif others == "the main thread":
        with pytest.raises(mpidist.DivergenceError) as caught:
            reduce()
        error = caught.value
    else:
        error = run_all({"other": reduce})["other"]
    assert isinstance(error, mpidist.DivergenceError)
    name = "pool_0" if run is run_in_pool else "lonely"
    assert f"thread '{name}' did not arrive on rank" in str(error)
    assert reduce() == n


def test_the_thread_that_all_ranks_have_goes_first(strategy):
    """Rank 0 reduces in its main thread before the others' main threads can."""
    n = strategy.num_replicas_in_sync
    job = {"shared": lambda: strategy.reduce("SUM", 2)}
    if strategy.extended.replica_id == 0:
        thread = threading.Thread(target=job["shared"], name="shared")
        thread.start()
        assert strategy.reduce("SUM", 1) == n
        thread.join()
    else:
        assert run_all(job) == {"shared": 2 * n}
        assert strategy.reduce("SUM", 1) == n


@pytest.mark.mpi(min_size=2)
def test_threads_of_the_same_name_are_an_error_on_all(comm, strategy):
    """Also on ranks that have one of them, and when the other has ended."""
    n = strategy.num_replicas_in_sync
    count = 2 if strategy.extended.replica_id == 0 else 1
    results = []
    are_there = threading.Barrier(count)

    def work():
        are_there.wait()
        try:
            results.append(strategy.reduce("SUM", 1.0))
        except mpidist.ContextError as error:
            results.append(error)

    def start(count):
        threads = [threading.Thread(target=work, name="same") for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads

    threads = start(count)
    if count == 1:  # it makes as many calls
        for thread in threads:
            thread.join()
        threads = start(1)
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for error in results:
        assert isinstance(error, mpidist.ContextError), error
        assert "named 'same', but another thread" in str(error)
    assert run_all({"other": lambda: strategy.reduce("SUM", 1)}) == {"other": n}
    assert strategy.reduce("SUM", 1) == n
    comm.Barrier()


def test_a_thread_without_a_name_is_not_the_main_one(strategy):
    n = strategy.num_replicas_in_sync
    results = []

    def work():
        results.extend(strategy.reduce("SUM", np.full(3, 2.0)) for _ in range(20))

    thread = threading.Thread(target=work)
    thread.name = ""
    thread.start()
    main = [strategy.reduce("SUM", np.ones(3)) for _ in range(20)]
    thread.join()
    assert [a.tolist() for a in main] == [[n] * 3] * 20
    assert [a.tolist() for a in results] == [[2 * n] * 3] * 20
