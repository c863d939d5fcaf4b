"""Calls that run concurrently share the threads of CPU operations."""

import threading
import time
from functools import partial

import pytest
import torch

from components.concurrency import concurrent_parts, run_concurrently


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    """Threads for CPU operations."""
    torch.set_num_threads(request.param)
    return request.param


def test_work_on_the_cpu_has_two_parts_where_there_are_threads_for_both_and_on_a_gpu_one(threads):
    assert concurrent_parts(torch.device("cpu")) == min(2, threads)
    assert concurrent_parts(torch.device("cuda:0")) == 1


def test_calls_have_an_even_share_of_the_threads_which_are_restored(threads):
    shares = run_concurrently([torch.get_num_threads] * 2)
    assert shares == [max(1, threads // 2)] * 2
    assert torch.get_num_threads() == threads
    assert run_concurrently([torch.get_num_threads] * 2) == shares


def test_calls_run_at_the_same_time_and_their_results_keep_their_order():
    meeting = threading.Barrier(3)
    calls = [lambda n=n: (meeting.wait(60), n)[1] for n in range(3)]
    assert run_concurrently(calls) == [0, 1, 2]


def test_only_so_many_calls_run_at_the_same_time(threads):
    running, most = 0, []
    lock, two = threading.Lock(), threading.Event()

    def call(n):
        nonlocal running
        with lock:
            running += 1
            most.append(running)
            if running == 2:
                two.set()
        two.wait(60)
        time.sleep(0.02)  # a third would come now
        with lock:
            running -= 1
        return n, torch.get_num_threads()

    results = run_concurrently([partial(call, n) for n in range(5)], at_once=2)
    assert results == [(n, max(1, threads // 2)) for n in range(5)]
    assert max(most) == 2


def test_a_single_call_runs_in_the_thread_of_the_caller():
    assert run_concurrently([threading.get_ident]) == [threading.get_ident()]
    assert run_concurrently([threading.get_ident] * 2, at_once=1) == [threading.get_ident()] * 2
    assert run_concurrently([]) == []


def test_an_error_is_raised_once_all_calls_have_ended(threads):
    ended = []

    def fail():
        raise RuntimeError("no memory is left")

    with pytest.raises(RuntimeError, match="no memory is left"):
        run_concurrently([fail, lambda: ended.append("second")])
    assert ended == ["second"]
    assert torch.get_num_threads() == threads
