"""The executor's threads under a seeded schedule: every work ends once, and nothing of it runs or holds memory afterwards.

A bug that is planted in each of them is found."""

import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from thread_schedule import first_failure

from mooncake_zmq.core.actor import OpenSequence
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import (
    BlocksPulled,
    ChunkComputed,
    ComputeChunk,
    CopyBlocks,
    DiskBlock,
    DiskWritten,
    ForkSequence,
    PullBlocks,
    SlotGrant,
    WorkFailed,
    WriteToDisk,
)
from mooncake_zmq.pool.ssd.disk_directory import DiskFault
from mooncake_zmq.runtime.executor import disk_threads, jobs, worker, works
from mooncake_zmq.runtime.executor.jobs import Subtasks

HERE = sys.modules[__name__]
SEEDS = range(100)
SOON_S = 10.0
"""Virtual: a thread that waits for so long was not woken."""


def crash(error):
    raise error


# --- works of several subtasks, on several threads


class Memory:
    """KV of a sequence, closed once and used by no subtask after that."""

    def __init__(self, made):
        self.closed = 0
        made.append(self)

    def expect(self, tokens):
        pass

    def close(self):
        self.closed += 1

    def use(self):
        assert not self.closed, "a subtask used memory that was freed"


class Reader:
    """Ends each batch of reads on a thread of its own, at once where it is cancelled."""

    def __init__(self, schedule):
        self._schedule = schedule

    def submit(self, reads, until, finished):
        batch = SimpleNamespace(cancelled=False)

        def run():
            self._schedule.wait_until(lambda: batch.cancelled, self._schedule.random.random())
            finished()

        self._schedule.spawn(run, "reads")
        return batch

    def cancel(self, batch):
        batch.cancelled = True


WORKS = {
    1: (PullBlocks(1, ()), 1, True),
    2: (ForkSequence(1, (2,), 0), 1, False),
    3: (ComputeChunk(2, 0, b"", (), (), None), 3, True),
    4: (PullBlocks(2, ()), 2, False),
}
"""Each work with the number of its turns, and whether it reads from other hosts."""


def works_of_an_executor(schedule):
    """Works begin, and are cancelled, while their sequences close: each ends once, and its memory is freed after its end."""

    def body():
        ended, made = {}, []

        def emit(done):
            assert done.work_id not in ended, "a work ended twice"
            ended[done.work_id] = done.result

        started = works.Works(Reader(schedule), None, emit)
        threads = [worker.Worker("one", crash), worker.Worker("two", crash, 2)]
        engine = SimpleNamespace(new_sequence=lambda tokens: Memory(made))

        def turn_of(job, number):
            def turn():
                for _ in range(3):
                    assert job.work_id not in ended, "a subtask ran after its work's end"
                    for opened in job.sequences.values():
                        opened.kv.use()
                return ChunkComputed((), None, 0.0) if isinstance(job.work, ComputeChunk) and number == 0 else None

            return turn

        for sequence in (1, 2):
            started.open_sequence(OpenSequence(sequence, 8), engine, None)
        for work_id, (work, turns, reads) in WORKS.items():
            job = started.add(work_id, work, schedule.now + SOON_S)
            job.conclude = lambda: BlocksPulled((), ())
            chosen = [(schedule.random.choice(threads), turn_of(job, number)) for number in range(turns)]
            started.begin(job, Subtasks(chosen, [object()] if reads else []))
        for step in schedule.random.sample([lambda: started.cancel(1), lambda: started.cancel(3), schedule.switch], 3):
            step()
        for sequence in (1, 2):
            started.close_sequence(sequence)
        started.close()
        for each in threads:
            each.close()
        schedule.wait_until(lambda: len(ended) == len(WORKS), SOON_S)
        assert started.are_ended, f"works without an end: {sorted(set(WORKS) - set(ended))}"
        assert [memory.closed for memory in made] == [1, 1]

    return body


def works_without_a_guard(self, reader, sampler, emit):
    """Planted: two threads count the same work's subtasks at once."""
    WORKS_INIT(self, reader, sampler, emit)
    self._lock = nullcontext()


WORKS_INIT = works.Works.__init__


def begin_before_all_are_counted(self, job, subtasks):
    """Planted: a subtask may end before the next one is counted."""
    if subtasks.reads:
        job.subtasks += 1
        job.batch = self._reader.submit(subtasks.reads, job.deadline, lambda: self._end(job, None))
    for thread, turn in subtasks.turns:
        job.subtasks += 1
        thread.put(partial(self._take_turn, job, turn))


# --- the workers' queue


def workers_that_close(schedule):
    """Each task runs once, whichever thread takes it, and `close` returns after the last."""

    def body():
        ran, threads = Counter(), worker.Worker("pool", crash, 2)

        def task(number):
            schedule.switch()
            ran[number] += 1

        for number in range(5):
            threads.put(partial(task, number))
        threads.close()
        assert ran == dict.fromkeys(range(5), 1)

    return body


def close_after_one(self):
    """Planted: the threads of one queue are stopped by one mark."""
    self._queue.put(None)
    self._threads[0].join()


# --- the threads of a disk


class SharedDisk:
    """A disk of which every block has a share of its own."""

    threads = 2

    def __init__(self, schedule):
        self._fails = schedule.random.random() < 0.2
        self._switch = schedule.switch
        self.written, self.durable = set(), []

    def share_out(self, blocks):
        return [[place] for place in range(len(blocks))]

    def write(self, segment, disk, blocks):
        self._switch()
        if self._fails and len(self.written) == 2:
            raise DiskFault("full")
        self.written.update(block.slot for _, block in blocks)
        return [block.slot for _, block in blocks]

    def read(self, disk, copies):
        self._switch()
        return [block.checksum for block, _, _ in copies]

    def commit(self, whole, proves):
        assert not self.durable, "a work is made durable once"
        self.durable = [block.slot for block, _ in whole]
        assert self.written == set(self.durable), "blocks were made durable while others were being written"


def blocks_of_a_disk(schedule):
    """A work's blocks are shared out to two threads: all that was written becomes durable at once, all that is read arrives."""

    def body():
        disk, ended = SharedDisk(schedule), {}
        directory = SimpleNamespace(own=object(), segment=lambda life, writable: object())
        started = works.Works(None, None, lambda done: ended.update({done.work_id: done.result}))
        blocks = [DiskBlock(slot, bytes(16), slot) for slot in range(4)]
        writes = WriteToDisk(tuple((SlotRef("n", 1, block.slot, 2, block.checksum), block) for block in blocks))
        reads = CopyBlocks(tuple((block, SlotGrant("n", 1, block.slot, 1)) for block in blocks))
        with patch.multiple(disk_threads, write_blocks=disk.write, read_blocks=disk.read):
            threads = disk_threads.DiskThreads(disk, directory, crash)
            job = started.add(1, writes, SOON_S)
            started.begin(job, threads.write(job, writes))
            job, copied = started.add(2, reads, SOON_S), disk_threads.Copied(len(blocks))
            job.conclude = copied.result
            started.begin(job, Subtasks(threads.read(job, reads, list(range(len(blocks))), copied)))
            threads.close()
        written = ended[1]
        assert isinstance(written, DiskWritten), written
        assert written.written == tuple(block.slot in disk.durable for block in blocks)
        assert bool(written.fault) == (len(disk.durable) < len(blocks))
        assert not isinstance(ended[2], WorkFailed)
        assert ended[2].checksums == (0, 1, 2, 3)

    return body


def last_without_the_lock(self):
    """Planted: both threads, or neither, may be the last."""
    left = self._threads - 1
    for _ in range(5):  # so that there are steps at which the other thread may come between
        self._threads = left
    return self._threads == 0


# --- all of them

CASES = {
    "works": (works_of_an_executor, (works, worker, jobs), works.Works, "__init__", works_without_a_guard),
    "works' count": (works_of_an_executor, (works, worker, jobs), works.Works, "begin", begin_before_all_are_counted),
    "workers": (workers_that_close, (worker,), worker.Worker, "close", close_after_one),
    "a disk": (blocks_of_a_disk, (works, worker, jobs, disk_threads), disk_threads._Written, "is_last", last_without_the_lock),
}


@pytest.mark.parametrize("name", [name for name in CASES if name != "works' count"])
def test_the_executors_threads_hold_what_is_promised_however_they_are_interleaved(name):
    case, watched, *_ = CASES[name]
    assert first_failure(case, SEEDS, *watched, HERE) == ""


@pytest.mark.parametrize("name", CASES)
def test_a_bug_planted_in_the_executors_threads_is_found(name, monkeypatch):
    case, watched, owner, attribute, planted = CASES[name]
    monkeypatch.setattr(owner, attribute, planted)
    assert first_failure(case, range(400), *watched, HERE) != ""
