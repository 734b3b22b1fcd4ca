"""Prefill and decode in two processes: the same tokens as alone, whatever is held, lost, late or full."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, random_tokens, run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gptlite_paged import alone, assert_clean
from threaded_ranks import run_threads

from gptlite_paged import BlockPool, GPTlite_Paged, Sequence
from inference_replicas import serve_merged
from inference_transfer import BEGIN, END, LAYER, TOKEN, Message, Receiver, Sender
from main_disaggregation import (
    DecodeWorker,
    PrefillWorker,
    after_each_layer,
    missing_positions,
    serve_disaggregated,
)


class Threads:
    """A team whose ranks are threads, each with a model of its own: for what rank 0 asks of all."""

    def __init__(self, world_size):
        self.world_size, self.kept = world_size, SimpleNamespace(model=tiny_model(GPTlite_Paged))
        self.sent_bytes = None

    def gather(self, function, *args):
        def on_rank(team):
            team.kept.model = tiny_model(GPTlite_Paged)  # hooks of one rank must not run on another
            found = function(team, *args)
            return found, team.sent_bytes["send"]

        results = run_threads(self.world_size, on_rank)
        self.sent_bytes = [n_bytes for _, n_bytes in results]
        return [found for found, _ in results]


def draw_requests(seed, n_requests):
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for i in range(n_requests):
        T = int(torch.randint(1, 15, (), generator=generator))
        n_tokens = int(torch.randint(0, 17 - T + 1, (), generator=generator))
        requests.append((random_tokens(1, T, seed=seed + i)[0], n_tokens))
    return requests


def expected(requests, temperature=0.0):
    return [alone(prompt.tolist(), n, i, temperature) for i, (prompt, n) in enumerate(requests)]


@settings(max_examples=15)
@given(
    st.integers(0, 10**6),
    st.integers(0, 5),
    st.integers(1, 3),
    st.integers(2, 4),
    st.sampled_from([0.0, 1.0]),
    st.sets(st.integers(0, 4)),
)
def test_every_request_gets_what_it_gets_alone(seed, n_requests, n_slots, world_size, temperature, lost):
    requests = draw_requests(seed, n_requests)
    outputs, times = (
        serve_merged(
            Threads(world_size),
            serve_disaggregated,
            requests,
            [0.0] * n_requests,
            n_slots,
            temperature=temperature,
            lost=lost,
        )
        if n_requests
        else ([], [])
    )
    assert outputs == expected(requests, temperature)
    assert [len(t) for t in times] == [n for _, n in requests]  # the first token is there once
    assert all(t == sorted(t) and (not t or t[0] > 0) for t in times)


def test_equal_prompts_have_noise_of_their_own():
    prompt = random_tokens(1, 6)[0]
    requests = [(prompt, 8)] * 4
    outputs, _ = serve_merged(
        Threads(2), serve_disaggregated, requests, [0.0] * 4, 2, temperature=1.0, lost=(1,)
    )
    assert outputs == expected(requests, 1.0) and len({str(ids) for ids in outputs}) > 1


def test_requests_that_do_not_fit_are_refused():
    for prompt, n in (
        (random_tokens(1, 12)[0], 6),
        (random_tokens(1, 0)[0], 3),
        (random_tokens(1, 3)[0], -1),
    ):
        with pytest.raises(ValueError):
            serve_merged(Threads(2), serve_disaggregated, [(prompt, n)], [0.0], 2)


def test_bytes_are_counted():
    requests = [(random_tokens(1, T)[0], n) for T, n in ((5, 4), (9, 3), (7, 1), (4, 0))]
    team = Threads(2)
    serve_merged(team, serve_disaggregated, requests, [0.0] * 4, 2)
    L, H, D = 2, 2, 16
    keys_and_values = (5 + 9) * 2 * L * H * D * 8  # texts that end with their first token are not sent
    messages = 40 * (2 * (L + 2) + 1) + 8 * 2 * (5 + 9)  # headers; ids and positions
    assert team.sent_bytes == [keys_and_values + messages, 2 * 8]  # a credit for each text


# ---- The workers, without a transport between them ----


class Wire:
    """Both ends at once: messages in a list."""

    def __init__(self):
        self.messages, self.n_credits_back = [], 0

    def send(self, kind, *numbers, data=None):
        self.messages.append(Message(kind, *numbers, data=data))

    def get(self, timeout=0.0):
        if not self.messages and timeout:
            time.sleep(timeout)
        return self.messages.pop(0) if self.messages else None

    def give_credit(self):
        self.n_credits_back += 1

    def wait(self):
        pass

    take_credit = close = wait


def workers(n_texts=3, block_size=4, **options):
    """(prefill worker, decode worker) over one wire; all of their memory is NaN."""
    wire, models = Wire(), [tiny_model(GPTlite_Paged) for _ in range(2)]
    prefiller = PrefillWorker(models[0], [wire])
    pool = BlockPool(models[1], n_texts * 16 // block_size, block_size)
    for one in (prefiller.pool, pool):
        one.kv.fill_(float("nan"))
    return prefiller, DecodeWorker(models[1], pool, wire, **options), wire


def take_all(decoder, wire, now=0.0):
    while wire.messages:
        decoder.take(wire.get(), now)


def finish(decoder, wire):
    wire.send(END)
    return decoder.serve(partial(time.monotonic))


def test_missing_positions():
    assert missing_positions(12, [*range(6), 8, 9]) == [6, 7, 10, 11]
    assert missing_positions(3, []) == [0, 1, 2] and missing_positions(3, range(9)) == []


def test_only_what_is_missing_is_moved_and_to_its_place():
    """The decode worker holds tokens 0 to 5, 8 and 9 of 12, in blocks of four."""
    prefiller, decoder, wire = workers()
    prompt, held = random_tokens(1, 12)[0].tolist(), [*range(6), 8, 9]
    other, _, _ = workers()
    sequence = Sequence(0, prompt, 16)
    other.pool.start(sequence, [], 12)
    other.model.step(other.pool, [(sequence, 12)])  # what the decode worker holds, computed elsewhere
    source = torch.tensor(other.pool.slots(sequence.table, 0, 12))

    mine = Sequence(0, list(prompt), 16)
    decoder.pool.allocate(2)  # so that the blocks lie elsewhere
    decoder.pool.start(mine, [], 12)
    place = torch.tensor(decoder.pool.slots(mine.table, 0, 12))
    for layer in range(2):
        rows = decoder.pool.kv[layer].flatten(0, 1)
        rows[place[held]] = other.pool.kv[layer].flatten(0, 1)[source[held]]
    decoder.held[0] = mine
    before = decoder.pool.kv.clone()
    prefiller.prefill(Sequence(0, list(prompt), 16), held)
    sent = [message.data.shape for message in wire.messages if message.kind == LAYER]
    assert sent == [(4, 2, 2, 16)] * 2
    take_all(decoder, wire)
    changed = (decoder.pool.kv.flatten(1, 2) != before.flatten(1, 2)).flatten(2).any(dim=2)  # [L, slots]
    written = before.flatten(1, 2)[:, place].isnan().flatten(2).any(dim=2)  # [L, 12]
    assert written.nonzero()[:, 1].tolist() == [6, 7, 10, 11] * 2
    assert not changed[:, place[held]].any()
    assert not decoder.pool.kv.flatten(1, 2)[:, place].isnan().any()
    assert finish(decoder, wire)[0][0] == alone(prompt, 4)


def test_only_the_text_that_got_lost_is_computed_again():
    prefiller, decoder, wire = workers()
    prefiller.lost = {1}
    prompts = [random_tokens(1, 5, seed)[0].tolist() for seed in range(3)]
    steps, real = [], decoder.scheduler.model.step

    def step(pool, work):
        steps.append([(sequence.request, n) for sequence, n in work])
        return real(pool, work)

    decoder.scheduler.model.step = step
    for i, prompt in enumerate(prompts):
        prefiller.prefill(Sequence(i, list(prompt), 11))
    answers = finish(decoder, wire)
    assert {i: ids for i, (ids, _) in answers.items()} == {i: alone(p, 6) for i, p in enumerate(prompts)}
    assert decoder.computed_again == [1] and wire.n_credits_back == 3
    assert [(r, n) for work in steps for r, n in work if n > 1] == [(1, 5)]
    assert_clean(decoder.pool)


def test_steps_hold_no_prompts_and_the_first_token_is_not_chosen_twice():
    prefiller, decoder, wire = workers()
    chosen = []
    for i in range(3):
        chosen.append(prefiller.prefill(Sequence(i, random_tokens(1, 6, i)[0].tolist(), 11)))
    assert_clean(prefiller.pool)
    prefiller.pool.kv.fill_(float("nan"))  # what was sent is a copy
    sizes = []
    decoder.scheduler.model.register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    answers = finish(decoder, wire)
    assert sum(sizes) == 3 * 4 and max(sizes) <= 3  # five tokens of each, of which the first was there
    assert [answers[i][0][6] for i in range(3)] == chosen
    assert [len(times) for _, times in answers.values()] == [5] * 3


@pytest.mark.parametrize("n_messages", [1, 2, 3])
def test_a_text_that_stops_coming_is_computed_and_what_comes_late_is_ignored(n_messages):
    """After its first message, a layer, all layers."""
    prefiller, decoder, wire = workers(patience=0.05)
    prompt = random_tokens(1, 7)[0].tolist()
    prefiller.prefill(Sequence(0, list(prompt), 12))
    late, wire.messages = wire.messages[n_messages:], wire.messages[:n_messages]
    assert [message.kind for message in late][-1] == TOKEN
    answers = finish(decoder, wire)
    assert answers[0][0] == alone(prompt, 5) and decoder.computed_again == [0]
    wire.messages = late
    take_all(decoder, wire)
    assert not decoder.arriving and not decoder.scheduler.running
    assert_clean(decoder.pool)


def test_layers_leave_before_the_next_is_computed():
    prefiller, _, wire = workers()
    events, send = [], wire.send
    wire.send = lambda kind, *numbers, data=None: (
        events.append((kind, numbers[1])),
        send(kind, *numbers, data=data),
    )
    for layer, block in enumerate(prefiller.model.blocks):
        block.register_forward_pre_hook(lambda *_, layer=layer: events.append(("computing", layer)))
    token = prefiller.prefill(Sequence(0, [1, 2, 3], 9))
    order = [(BEGIN, 3), ("computing", 0), (LAYER, 0), ("computing", 1), (LAYER, 1), (TOKEN, token)]
    assert events == order
    assert all(not block._forward_hooks for block in prefiller.model.blocks)


def test_hooks_go_after_an_error_too():
    model = tiny_model(GPTlite_Paged)
    with pytest.raises(RuntimeError, match="broken"), after_each_layer(model, None):
        raise RuntimeError("broken")
    assert all(not block._forward_hooks for block in model.blocks)


# ---- Credits and errors ----


def test_no_more_texts_than_there_is_room_for():
    """Prompts are computed faster than answers; the decode worker never has more than its slots."""
    requests, most = [(random_tokens(1, 3, i)[0], 9) for i in range(7)], []

    def on_rank(team):
        model, clock = tiny_model(GPTlite_Paged), time.monotonic
        if team.rank == 0:
            return PrefillWorker(model, [Sender(team, 1, 2)]).serve(requests, [0.0] * 7, clock)
        pool = BlockPool(model, 2)  # room for two texts, no more
        worker = DecodeWorker(model, pool, Receiver(team, 0, pool.kv.shape[3:], pool.kv.dtype))
        real = worker.take

        def take(message, now):
            real(message, now)
            most.append(len(worker.arriving) + len(worker.scheduler.running))

        worker.take = take
        return worker.serve(clock)

    first, answers = run_threads(2, on_rank)
    assert max(most) == 2
    assert [answers[i][0] for i in range(7)] == expected(requests)
    assert [first[i][0] for i in range(7)] == [ids[:4] for ids in expected(requests)]


def test_an_error_of_the_listening_thread_is_raised_where_messages_are_read():
    def receive(x, source):
        raise RuntimeError("Connection closed by peer")

    receiver = Receiver(SimpleNamespace(receive=receive), 0, (2, 2, 16), torch.float64)
    with pytest.raises(RuntimeError, match="Connection closed"):
        receiver.get(1.0)


def children_of(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_worker_that_is_killed_ends_the_run(distilled_checkpoint):
    command = [
        sys.executable,
        str(ROOT / "main_disaggregation.py"),
        "--checkpoint",
        str(distilled_checkpoint),
    ]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    run.stdout.readline()  # the header
    deadline, children = time.monotonic() + 30, []
    while not children and time.monotonic() < deadline:
        time.sleep(0.5)
        children = [
            pid for pid in children_of(run.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
    time.sleep(4.0)
    os.kill(children[0], signal.SIGKILL)
    _, error = run.communicate(timeout=60)
    lines = [line for line in error.splitlines() if line.startswith("main_disaggregation.py:")]
    assert run.returncode == 2 and len(lines) == 1 and "rank 1" in lines[0], error


# ---- The script ----


@pytest.mark.slow
def test_the_script(distilled_checkpoint):
    run = run_script("main_disaggregation.py", "--quick", "--json", "-", checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr
    report = run.json
    assert all(report["checks"].values()) and len(report["checks"]) == 4
    replicas, chunks, split = report["rows"]
    assert [row["baseline"] for row in report["rows"]] == [True, False, False]
    assert all(row["same_output"] for row in (replicas, chunks, split))
    assert split["method"].endswith("split") and "chunks" in chunks["method"]
    (moving,) = report["sweeps"].values()
    assert [line["tokens"] for line in moving] == [16, 64]


def test_one_process_is_too_few():
    run = run_script("main_disaggregation.py", "--world-size", "1", "--quick")
    assert run.status == 2 and "2 at least" in run.stderr and len(run.stderr.splitlines()) == 1
