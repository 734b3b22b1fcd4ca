"""Ranks for tests: threads of this process, and processes that start fast.

    run_threads(3, function, *args)    # function(team, *args) on each of 3 ranks: what each returns

Any number, without a start, for tests of what they compute. They exchange tensors through memory in place of
torch.distributed; counting is the Team's own. Sums are added in the order of the ranks, which is not gloo's:
equal to rounding only.

    with ForkedRanks(2) as team: ...                # Ranks, and gloo between them
"""

import queue
import threading
from collections import defaultdict
from types import SimpleNamespace

import torch
from helpers import start_server

from inference_distributed import Ranks, Team

WAIT_S = 20  # a rank that does not come is a fault


class Exchange:
    """What all the threads share."""

    def __init__(self, world_size):
        self.barrier, self.parts = threading.Barrier(world_size), [None] * world_size
        self.queues, self.lock = defaultdict(queue.Queue), threading.Lock()

    def swap(self, rank, x):
        """What every rank brings, by rank."""
        self.parts[rank] = x
        self.barrier.wait(WAIT_S)
        parts = list(self.parts)
        self.barrier.wait(WAIT_S)
        return parts

    def queue(self, source, to, tag):
        with self.lock:
            return self.queues[source, to, tag]


class Arriving:
    """A tensor that is being received."""

    def __init__(self, x, queue):
        self.x, self.queue, self.here = x, queue, False

    def is_completed(self):
        if not self.here and not self.queue.empty():
            self.wait()
        return self.here

    def wait(self):
        if not self.here:
            arrived = self.queue.get(timeout=WAIT_S)
            assert arrived.shape == self.x.shape and arrived.dtype == self.x.dtype, "another tensor was sent"
            self.x.copy_(arrived)
            self.here = True


class Dist:
    """The part of torch.distributed that a Team uses, for one rank."""

    def __init__(self, rank, exchange):
        self.rank, self.exchange = rank, exchange

    def barrier(self, _group=None):
        self.exchange.barrier.wait(WAIT_S)

    def all_reduce(self, x):
        assert x.is_contiguous()
        parts = self.exchange.swap(self.rank, x.clone())
        assert len({(part.shape, part.dtype) for part in parts}) == 1, "ranks reduce different tensors"
        x.copy_(sum(parts[1:], start=parts[0]))

    def broadcast(self, x, source):
        x.copy_(self.exchange.swap(self.rank, x.clone())[source])

    def all_gather(self, parts, x):
        for part, other in zip(parts, self.exchange.swap(self.rank, x.clone()), strict=True):
            part.copy_(other)

    def all_to_all_single(self, out, x, received_sizes, sizes):
        parts = self.exchange.swap(self.rank, x.clone().split(sizes))
        parts = [part[self.rank] for part in parts]
        assert [len(part) for part in parts] == list(received_sizes), "other rows come than were announced"
        out.copy_(torch.cat(parts))

    def isend(self, x, to, tag=0):
        self.exchange.queue(self.rank, to, tag).put(x.clone())
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def irecv(self, x, source, tag=0):
        return Arriving(x, self.exchange.queue(source, self.rank, tag))

    def send(self, x, to):
        self.isend(x, to)

    def recv(self, x, source):
        self.irecv(x, source).wait()

    def P2POp(self, operation, x, peer):
        return operation, x, peer

    def batch_isend_irecv(self, operations):
        return [operation(x, peer) for operation, x, peer in operations]


class ThreadedTeam(Team):
    def __init__(self, rank, world_size, exchange):
        super().__init__(rank, world_size, torch.device("cpu"), None, torch.get_num_threads())
        self.dist = Dist(rank, exchange)


def run_threads(world_size, function, *args):
    """function(team, *args) on every rank at once: what each returns, by rank. The first error is raised."""
    exchange = Exchange(world_size)
    results, errors = [None] * world_size, []

    def rank_of(rank):
        try:
            results[rank] = function(ThreadedTeam(rank, world_size, exchange), *args)
        except BaseException as error:
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results


class ForkedRanks(Ranks):
    """Ranks whose processes are forks of one that has imported PyTorch, which takes seconds each time."""

    @property
    def context(self):
        return start_server()
