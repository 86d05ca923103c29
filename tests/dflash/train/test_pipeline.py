"""Ordered queues, the round gate and the stop rules, on plain threads."""

import random
import threading
import time

import pytest

from dflash.train.pipeline import Hub, OrderedQueue, RoundGate, Stalled, Stopped, WorkerThread, join_all


def start(hub, *bodies):
    threads = [WorkerThread(hub, f"worker {i}", body) for i, body in enumerate(bodies)]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (2, 3), (5, 3)])
def test_every_consumer_gets_its_items_in_order_within_the_depth(producers, consumers, depth):
    """Item m comes from producer m mod N and goes to consumer m mod M, at random speeds, and nobody hangs."""
    hub, items = Hub(30), 600
    queues = [OrderedQueue(hub, depth) for _ in range(consumers)]
    received = [[] for _ in range(consumers)]

    def produce(index):
        for item in range(index, items, producers):
            if random.random() < 0.02:
                time.sleep(0.001)
            queue = queues[item % consumers]
            queue.admit(item // consumers)
            queue.put(item // consumers, item)
            assert len(queue._slots) <= depth

    def consume(index):
        for _ in range(index, items, consumers):
            received[index].append(queues[index].get()[0])

    threads = start(
        hub,
        *(lambda i=i: produce(i) for i in range(producers)),
        *(lambda i=i: consume(i) for i in range(consumers)),
    )
    assert join_all(threads, 30) == []
    assert hub.failure is None
    assert received == [list(range(index, items, consumers)) for index in range(consumers)]


def test_a_value_may_be_put_only_where_it_was_admitted():
    queue = OrderedQueue(Hub(5), 2)
    queue.put(1, "second")
    with pytest.raises(AssertionError, match="position 2 was not admitted"):
        queue.put(2, "third")


def test_the_gate_holds_every_worker_until_the_round_is_open_and_returns_results_in_worker_order():
    hub = Hub(30)
    gate, log = RoundGate(hub, 3), []

    def work(index):
        for number in range(20):
            gate.enter(number)
            time.sleep(random.random() / 2000)
            log.append(number)
            gate.arrive(index, (index, number))

    threads = start(hub, *(lambda i=i: work(i) for i in range(3)))
    for number in range(20):
        assert len(log) == 3 * number
        gate.open(number)
        assert gate.collect() == [(index, number) for index in range(3)]
    assert join_all(threads, 5) == []


def test_one_failure_ends_every_wait_at_once_and_keeps_its_name_and_activity():
    hub = Hub(60)
    queue, gate, entered = OrderedQueue(hub, 1), RoundGate(hub, 1), threading.Barrier(4)
    ended = []

    def wait_for(call):
        entered.wait()
        try:
            call()
        except Stopped:
            ended.append(time.monotonic())
            raise

    def fail():
        hub.does("worker 3", "item 7")
        entered.wait()
        time.sleep(0.1)
        failed.append(time.monotonic())
        raise ValueError("boom")

    failed = []
    threads = start(
        hub,
        lambda: wait_for(queue.get),
        lambda: wait_for(lambda: queue.admit(5)),
        lambda: wait_for(lambda: gate.enter(0)),
        fail,
    )
    assert join_all(threads, 5) == []
    assert max(ended) - failed[0] < 0.3
    assert (hub.failure.worker, hub.failure.activity, str(hub.failure.error)) == (
        "worker 3",
        "item 7",
        "boom",
    )
    with pytest.raises(Stopped):
        gate.collect()


def test_the_first_failure_is_the_one_that_is_reported():
    hub = Hub(5)
    hub.fail("a", ValueError("first"))
    hub.fail("b", ValueError("second"))
    assert hub.failure.worker == "a"


def test_a_stop_that_was_asked_for_is_no_failure():
    hub = Hub(5)
    threads = start(hub, OrderedQueue(hub, 1).get)
    hub.stop()
    assert join_all(threads, 5) == []
    assert hub.failure is None


def test_a_stall_names_what_every_worker_is_doing():
    hub = Hub(0.2)
    hub.does("drafter worker 1", "train_step of step 3")
    with pytest.raises(Stalled, match=r"0\.2 s \(drafter worker 1: train_step of step 3\)"):
        RoundGate(hub, 1).collect()


def test_progress_elsewhere_is_no_stall():
    hub = Hub(0.6)
    queue, gate = OrderedQueue(hub, 1), RoundGate(hub, 1)

    def slow_but_steady():
        for position in range(6):
            time.sleep(0.25)
            queue.admit(position)
            queue.put(position, position)
        gate.arrive(0, "done")

    threads = start(hub, slow_but_steady, lambda: [queue.get() for _ in range(6)])
    assert gate.collect() == ["done"]
    assert join_all(threads, 5) == []


def test_an_interrupted_collect_returns_nothing():
    hub = Hub(30)
    assert RoundGate(hub, 1).collect(interrupted=lambda: True) is None


def test_threads_that_do_not_end_in_time_are_named():
    hub, hold = Hub(5), threading.Event()
    threads = start(hub, hold.wait)
    assert join_all(threads, 0.1) == ["worker 0"]
    hold.set()
    assert join_all(threads, 5) == []
