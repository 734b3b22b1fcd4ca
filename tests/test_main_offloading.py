"""Offloaded weights: the same logits bit for bit, whatever is slow, ends early or is asked in between."""

import copy
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from inference_utils import weight_bytes
from main_kvcache import generate, generate_kvcache
from main_offloading import (
    LoadedBlocks,
    StreamCopier,
    StreamedBlocks,
    ThreadCopier,
    flatten,
    in_file,
    in_host_memory,
    offload,
)

both_forms = pytest.mark.parametrize("form", [LoadedBlocks, StreamedBlocks])


def rows_of(model):
    return in_host_memory(model.blocks, pinned=False)


def offloaded(form=StreamedBlocks, n_layers=5, model_class=GPTlite_KVCache, **copier):
    """(resident model, the same with its blocks offloaded)"""
    resident, model = (tiny_model(model_class, n_layers=n_layers) for _ in range(2))
    if copier:
        return resident, offload(model, rows_of(model), lambda *args: form(*args, **copier))
    return resident, offload(model, rows_of(model), form)


# ---- Where the weights lie ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_hold_the_weights_of_all_blocks(dtype):
    blocks = tiny_model(GPTlite, n_layers=3, dtype=dtype).blocks
    with tempfile.TemporaryFile() as file:
        mapped = in_file(blocks, file)
        file.seek(0)
        written = torch.frombuffer(bytearray(file.read()), dtype=dtype)
    assert torch.equal(written, mapped.flatten())  # the file may be closed, the mapping holds it
    for rows in (mapped, rows_of(SimpleNamespace(blocks=blocks))):
        assert rows.dtype == dtype and torch.equal(rows, torch.stack([flatten(block) for block in blocks]))
        rows[1].zero_()  # a place of their own
        assert all(p.any() for p in blocks[1].parameters())


def test_pinned_memory_is_asked_for_unless_it_is_not_wanted(monkeypatch):
    asked, empty, blocks = [], torch.empty, tiny_model(GPTlite).blocks

    def spy(*shape, dtype, pin_memory):
        asked.append(pin_memory)
        return empty(*shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", spy)
    in_host_memory(blocks)
    in_host_memory(blocks, pinned=False)
    assert asked == [True, False]


# ---- Equal to resident weights ----


@both_forms
@pytest.mark.parametrize("n_layers", [1, 2, 3, 5, 6])
def test_bit_for_bit(form, n_layers):
    """Over several passes: behind the last block comes the first, in whichever buffer it is."""
    resident, model = offloaded(form, n_layers)
    for seed in range(4):
        tokens = random_tokens(2, 1 + 5 * seed, seed)
        logits, cache = model(tokens)
        expected, expected_cache = resident(tokens)
        assert torch.equal(logits, expected)
        for pair, expected_pair in zip(cache, expected_cache, strict=True):
            assert torch.equal(torch.stack(pair), torch.stack(expected_pair))


@both_forms
def test_from_a_file_and_without_a_cache(form):
    resident, model = (tiny_model(GPTlite, n_layers=3) for _ in range(2))
    with tempfile.TemporaryFile() as file:
        offload(model, in_file(model.blocks, file), form)
    prompt = random_tokens(3, 5)
    assert torch.equal(generate(model, prompt, 8, 16), generate(resident, prompt, 8, 16))


@both_forms
def test_generation_with_batches_in_between(form):
    resident, model = offloaded(form)
    for B, T, n in ((1, 3, 5), (4, 7, 9), (2, 16, 1), (1, 1, 20)):
        prompt = random_tokens(B, T, seed=B)
        assert torch.equal(generate_kvcache(model, prompt, n, 16), generate_kvcache(resident, prompt, n, 16))


# ---- No buffer is written while its block computes, and none is read before its copy has ended ----


class Recorder:
    """A copier and a clock: notes when each buffer is written and when its block computes.

    Args: slow_copy, slow_compute: seconds that each takes.
    """

    def __init__(self, slow_copy=0.0, slow_compute=0.0):
        self.copier, self.slow_copy, self.slow_compute = ThreadCopier(), slow_copy, slow_compute
        self.lock, self.reading, self.writing = threading.Lock(), set(), set()
        self.n_copies, self.faults, self.overlaps = 0, [], 0

    def start(self, buffer, row):
        def write():
            with self.lock:
                self.writing.add(buffer.data_ptr())
                self.faults += [f"written while it computes: {self.reading}"] * (
                    buffer.data_ptr() in self.reading
                )
                self.overlaps += len(self.reading)
            buffer.fill_(float("nan"))  # half copied
            time.sleep(self.slow_copy)
            buffer.copy_(row)
            self.n_copies += 1
            with self.lock:
                self.writing.discard(buffer.data_ptr())

        return self.copier.thread.submit(write)

    def wait(self, copy):
        copy.result()

    def watch(self, blocks):
        for block, buffer in zip(blocks.slots, blocks.memory, strict=True):
            block.register_forward_pre_hook(lambda *_, buffer=buffer: self.begin(buffer.data_ptr()))
            block.register_forward_hook(lambda *_, buffer=buffer: self.end(buffer.data_ptr()))

    def begin(self, address):
        with self.lock:
            self.faults += ["read while it is written"] * (address in self.writing)
            self.reading.add(address)
            self.overlaps += len(self.writing)
        time.sleep(self.slow_compute)

    def end(self, address):
        with self.lock:
            self.faults += ["written while it computed"] * (address in self.writing)
            self.reading.discard(address)


@pytest.mark.parametrize("n_layers", [4, 5])
@pytest.mark.parametrize("slow", [{}, {"slow_copy": 0.01}, {"slow_compute": 0.01}])
def test_whatever_is_slow(slow, n_layers):
    recorder = Recorder(**slow)
    resident, model = offloaded(n_layers=n_layers, copier=recorder)
    recorder.watch(model.blocks)
    for step in range(3):
        tokens = random_tokens(2, 3 + step, step)
        assert torch.equal(model(tokens)[0], resident(tokens)[0])
    recorder.copier.thread.shutdown()
    assert recorder.faults == []
    assert recorder.n_copies == 3 * n_layers + 1  # each block once a pass, and the first of the next pass
    if slow:
        assert recorder.overlaps > n_layers  # copies do run beside computing


def test_copying_without_waiting_would_be_seen():
    """The stand-in finds what it is there for."""

    class Hasty(Recorder):
        def wait(self, copy):
            pass

    recorder = Hasty(slow_copy=0.005)
    resident, model = offloaded(copier=recorder)
    recorder.watch(model.blocks)
    tokens = random_tokens(1, 3)
    assert not torch.equal(model(tokens)[0], resident(tokens)[0]) and recorder.faults
    recorder.copier.thread.shutdown()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=6), st.integers(1, 6))
def test_a_pass_may_end_anywhere(stops, n_layers):
    """By an exception in a block, or by a caller that asks for no more blocks; the next pass is whole."""
    resident, model = offloaded(n_layers=n_layers)

    for stop, B in stops:
        if stop < n_layers:
            seen = iter(model.blocks)
            for _ in range(stop):
                next(seen)
            del seen

        def fail(*_, stop=stop, calls=[]):  # noqa: B006 (one list a hook)
            calls.append(1)
            if len(calls) > stop:
                raise RuntimeError("a block failed")

        hooks = [block.register_forward_pre_hook(fail) for block in model.blocks.slots]
        if stop < n_layers:
            with pytest.raises(RuntimeError, match="a block failed"):
                model(random_tokens(B, 3))
        for hook in hooks:
            hook.remove()
        tokens = random_tokens(B, 4, seed=stop)
        assert torch.equal(model(tokens)[0], resident(tokens)[0])


@pytest.mark.parametrize("where", ["start", "wait"])
def test_a_copy_may_fail(where):
    class Failing(ThreadCopier):
        left = 7  # calls until the failure

        def fail(self):
            self.left -= 1
            if self.left == 0:
                raise OSError("the disk is gone")

        def start(self, buffer, row):
            if where == "start":
                self.fail()

            def write():
                buffer.fill_(float("nan"))
                if where == "wait":
                    self.fail()
                buffer.copy_(row)

            return self.thread.submit(write)

    resident, model = offloaded(copier=Failing())
    tokens = random_tokens(2, 5)
    expected = resident(tokens)[0]
    assert torch.equal(model(tokens)[0], expected)
    with pytest.raises(OSError, match="the disk is gone"):
        for _ in range(2):
            model(tokens)
    for _ in range(3):
        assert torch.equal(model(tokens)[0], expected)


# ---- CUDA's streams, played on the CPU in any order that their waits allow ----


class FakeStream:
    """A queue of work: each item runs when those before it and what it waits for have run."""

    def __init__(self, device=None):
        self.queue, self.n_done = [], 0

    def put(self, action, after=None):
        self.queue.append((action, after))

    def wait_stream(self, other):
        self.put(None, (other, len(other.queue)))

    def wait_event(self, event):
        self.put(None, event)

    def record_event(self):
        return self, len(self.queue)

    def ready(self):
        if self.n_done == len(self.queue):
            return False
        after = self.queue[self.n_done][1]
        return after is None or after[0].n_done >= after[1]

    def run_one(self):
        action = self.queue[self.n_done][0]
        self.n_done += 1
        if action:
            action()


class FakeBuffer(torch.Tensor):
    """A tensor whose copies are put on the stream that is current."""

    def copy_(self, row, non_blocking=False):
        assert non_blocking
        FakeBuffer.current.put(lambda: torch.Tensor.copy_(self.as_subclass(torch.Tensor), row))
        return self


def play(monkeypatch, copier_class, choices, n_layers, n_passes):
    """What each computed block read, with the work of both streams run in the order of the choices."""
    compute = FakeStream()
    FakeBuffer.current = compute

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            FakeBuffer.current = self.stream

        def __exit__(self, *_):
            FakeBuffer.current = compute

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeBuffer.current)
    blocks = tiny_model(GPTlite, n_layers=n_layers).blocks
    copier = copier_class(None)
    streamed = StreamedBlocks(blocks, in_host_memory(blocks, pinned=False), copier)
    streamed.memory = [buffer.as_subclass(FakeBuffer) for buffer in streamed.memory]
    read = []
    for _ in range(n_passes):
        for block in streamed:
            compute.put(lambda block=block: read.append(flatten(block)))  # a kernel that reads the weights
    streams, choices = [compute, copier.stream], iter(choices)
    while any(s.n_done < len(s.queue) for s in streams):
        able = [s for s in streams if s.ready()]
        assert able, "the streams wait for each other"
        able[next(choices, 0) % len(able)].run_one()
    return read, [flatten(block) for block in blocks] * n_passes


def right(read, expected):
    return all(torch.equal(a, b) for a, b in zip(read, expected, strict=True))


@pytest.mark.parametrize("n_layers", [2, 5])
def test_streams_in_any_order(monkeypatch, n_layers):
    orders = [[0] * 999, [1] * 999]  # computing first, copying first
    orders += [
        torch.randint(2, (999,), generator=torch.Generator().manual_seed(s)).tolist() for s in range(8)
    ]
    for order in orders:
        assert right(*play(monkeypatch, StreamCopier, order, n_layers, n_passes=3))


@pytest.mark.parametrize("missing", ["free buffer", "ended copy"])
def test_a_missing_wait_would_be_seen(monkeypatch, missing):
    class Careless(StreamCopier):
        def start(self, buffer, row):
            if missing == "free buffer":
                self.stream.wait_stream = lambda other: None
            return super().start(buffer, row)

        def wait(self, copy):
            if missing != "ended copy":
                super().wait(copy)

    results = [play(monkeypatch, Careless, [order] * 999, 5, 2) for order in (0, 1)]
    assert not all(right(*result) for result in results)


# ---- Memory, ties, bad arguments ----


@both_forms
@pytest.mark.parametrize("n_layers", [3, 6])
def test_the_device_holds_one_or_two_blocks(form, n_layers):
    resident, model = offloaded(form, n_layers)
    block = flatten(resident.blocks[0]).nbytes
    assert weight_bytes(resident) - weight_bytes(model) == (n_layers - form.n_buffers) * block


def test_a_tied_head_stays_tied():
    resident, model = (tiny_model(GPTlite, n_layers=3) for _ in range(2))
    for one in (resident, model):
        one.fc_out.weight = one.token_embedding.weight
    untied = weight_bytes(tiny_model(GPTlite, n_layers=3))
    assert weight_bytes(resident) == untied - resident.fc_out.weight.nbytes
    offload(model, rows_of(model))
    block = flatten(resident.blocks[0]).nbytes
    assert weight_bytes(resident) - weight_bytes(model) == block
    for one in (resident, model):
        with torch.no_grad():
            one.token_embedding.weight[3] += 1.0
    tokens = random_tokens(2, 9)
    assert torch.equal(model(tokens), resident(tokens))


def test_weights_that_blocks_share_are_refused():
    model = tiny_model(GPTlite, n_layers=3)
    model.blocks[2].ffwd.net[0].weight = model.blocks[0].ffwd.net[0].weight
    with pytest.raises(ValueError, match="blocks.0 and blocks.2 share a weight"):
        offload(model, rows_of(model))
    model = tiny_model(GPTlite, n_layers=3)
    model.blocks[1].ln1.weight = model.ln.weight
    with pytest.raises(ValueError, match="share a weight"):
        offload(model, rows_of(model))


def test_rows_of_another_model_are_refused():
    model, deeper = tiny_model(GPTlite, n_layers=3), tiny_model(GPTlite, n_layers=4)
    wider = tiny_model(GPTlite, n_layers=3, d_model=64, n_heads=4)
    for other in (deeper, wider):
        with pytest.raises(ValueError, match="for 3 blocks of"):
            offload(model, rows_of(other))


def test_an_offloaded_model_is_not_moved():
    """Its weights would part from the buffers that the copies go to, and keep their last values."""
    _, model = offloaded()
    for move in (lambda: model.to(torch.float32), lambda: model.half(), lambda: model.to("meta")):
        with pytest.raises(ValueError, match="before its blocks are offloaded"):
            move()


def test_the_rows_are_left_as_they_are():
    resident, model = offloaded()
    before = copy.deepcopy(model.blocks.rows)
    model(random_tokens(2, 5))
    assert torch.equal(model.blocks.rows, before)
    assert not any(p.requires_grad for p in model.blocks.parameters())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_of_a_gpu(monkeypatch):
    resident, model = (tiny_model(GPTlite_KVCache, n_layers=5, dtype=torch.float32).cuda() for _ in range(2))
    offload(model, in_host_memory(model.blocks))
    copier = model.blocks.copier
    real = copier.start

    def slow(buffer, row):
        with torch.cuda.stream(copier.stream):
            torch.cuda._sleep(1_000_000)
        return real(buffer, row)

    tokens = random_tokens(2, 7).cuda()
    for start in (real, slow):
        monkeypatch.setattr(copier, "start", start)
        for _ in range(20):
            assert torch.equal(model(tokens)[0], resident(tokens)[0])


# ---- The script ----


def test_the_script(distilled_checkpoint):
    run = run_script("main_offloading.py", "--quick", "--json", "-", checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr
    report = run.json
    assert report["checks"] and all(report["checks"].values())
    resident, one, two = report["rows"]
    assert [resident["method"], one["method"], two["method"]] == ["resident", "one buffer", "two buffers"]
    assert one["weight_mb"] < two["weight_mb"] < resident["weight_mb"]
    assert one["peak_memory_mb"] < two["peak_memory_mb"] < resident["peak_memory_mb"]
    assert resident["valid_loss"] == one["valid_loss"] == two["valid_loss"]
    assert [line["tokens"] for line in report["sweeps"]["One step: time (ms)"]] == [1, 4, 16]
