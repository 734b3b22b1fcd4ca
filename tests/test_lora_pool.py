"""Adapters and texts in one pool: its books, and that each request gets what its merged weights give it."""

import copy
import random

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from test_gptlite_lora import random_adapter

import inference_words as words
from gptlite import GPTlite
from gptlite_lora import Adapter, AdapterSequence, GPTlite_PagedLoRA, MergedCopies, adapter_bytes, merge
from gptlite_paged import GPTlite_Paged
from inference_scheduling import LongestFirstScheduler, PagedScheduler
from inference_serving import all_free
from inference_utils import make_model, weight_bytes
from lora_pool import (
    AdapterPool,
    add_grouped,
    add_naively,
    by_adapter,
    draw_requests,
    serve_adapters,
    two_halves,
)
from main_block_cache import BlockCache
from main_kvcache import generate

MODEL, PAGED = tiny_model(GPTlite), tiny_model(GPTlite_Paged)
NAIVE, GROUPED = (tiny_model(GPTlite_PagedLoRA).read_adapters(add) for add in (add_naively, add_grouped))
PAIRS = [random_adapter(MODEL, rank, i) for i, rank in enumerate((1, 3, 2, 3))]
ADAPTERS = [None, *(Adapter(MODEL, pairs) for pairs in PAIRS)]  # blocks of 4 tokens: 0, 3, 7, 5, 7 of them
MERGED = {
    a: merge(copy.deepcopy(MODEL), p) if p else MODEL for a, p in zip(ADAPTERS, [None, *PAIRS], strict=True)
}


def poisoned(model, n_blocks, block_size=4, make=AdapterPool):
    """A pool in which everything that was never written is NaN: reading it would be seen."""
    pool = make(model, n_blocks, block_size)
    for one in (pool, pool.adapters):
        one.kv.fill_(float("nan"))
    return pool


def alone(ids, n_tokens, adapter):
    """What a request gets from the merged weights, without any cache."""
    return generate(MERGED[adapter], torch.tensor([ids]), n_tokens, 16)[0].tolist()


def assert_books(pool, running):
    """No block has two owners, none is lost, adapters in use are there, bit for bit."""
    here, users = pool.adapters, {}
    for sequence in running:
        if sequence.adapter is not None:
            users.setdefault(sequence.adapter.key, []).append(sequence.adapter)
    assert {block: key for key, table in here.tables.items() for block in table} == here.holds
    assert sum(map(len, here.tables.values())) == len(here.holds)
    for one in {pool, here}:
        texts = [block for s in running for block in s.table] if one is pool else []
        expected = [texts.count(block) for block in range(one.n_blocks)]
        if one is here:
            assert not set(texts) & set(one.holds)
            assert not set(one.key_of) & set(one.holds)  # what holds an adapter is not found as a text
            for block, key in one.holds.items():
                expected[block] = len(users.get(key, []))
        assert one.ref == expected
        assert all((one.ref[block] == 0) == (block in one.free) for block in range(one.n_blocks))
    for key, adapters in users.items():
        assert key in here.tables
        slots = here.row_slots(adapters[0])
        assert torch.equal(here.rows[:, slots], adapters[0].rows.to(here.rows))


# ---- Rows ----


def test_an_adapter_as_rows_of_d_model():
    """18 r rows a layer, as many bytes as the adapter; keys tell weights, shapes and types, not names."""
    for rank, pairs, adapter in zip((1, 3, 2, 3), PAIRS, ADAPTERS[1:], strict=True):
        assert adapter.rank == rank and adapter.rows.shape == (2, 18 * rank, 32)
        assert adapter.rows.nbytes == adapter_bytes(pairs)
    assert [AdapterPool(PAGED, 1, 4).n_blocks_of(a) for a in ADAPTERS] == [0, 3, 7, 5, 7]
    assert len({a.key for a in ADAPTERS[1:]}) == 4
    again = Adapter(MODEL, [(A.clone(), B.clone()) for A, B in PAIRS[0]])
    assert again.key == ADAPTERS[1].key
    changed = [(A.clone(), B.clone()) for A, B in PAIRS[0]]
    changed[-1][1][0, -1] += 1e-12
    assert Adapter(MODEL, changed).key != again.key
    assert Adapter(MODEL, [(A.float(), B.float()) for A, B in changed]).key != again.key
    with pytest.raises(ValueError, match=r"ranks \[1, 3\]"):
        Adapter(MODEL, PAIRS[0][:6] + PAIRS[1][6:])


def test_an_adapter_is_a_copy():
    pairs = [(A.clone(), B.clone()) for A, B in PAIRS[0]]
    adapter = Adapter(MODEL, pairs)
    before = adapter.rows.clone()
    for A, B in pairs:
        A.zero_(), B.zero_()
    assert torch.equal(adapter.rows, before)


@pytest.mark.parametrize("block_size", [1, 4, 7])
def test_weights_come_back_from_scattered_blocks(block_size):
    """What LinearFromPool gathers by table is A and B of its layer, in all layers."""
    pool = poisoned(GROUPED, 40 * 4 // block_size, block_size)
    draw, free = random.Random(block_size), list(pool.free)
    draw.shuffle(free)
    pool.free = type(pool.free).fromkeys(free)
    sequences = [AdapterSequence(i, [1, 2], 3, adapter=a) for i, a in enumerate(ADAPTERS)]
    for sequence in sequences:
        pool.start(sequence, [], 2)
    GROUPED.reading.use(pool, [(sequence, 2) for sequence in sequences])
    layers = [m for block in GROUPED.blocks for m in block.modules() if hasattr(m, "bounds")]
    for adapter, pairs in zip(ADAPTERS[1:], PAIRS, strict=True):
        assert len(layers) == len(pairs) == 12
        for layer, (A, B) in zip(layers, pairs, strict=True):
            got_A, got_B = layer.weights(adapter)
            assert torch.equal(got_A, A) and torch.equal(got_B, B)


# ---- A step ----


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 7)), min_size=1, max_size=5), st.integers(0, 99))
def test_grouped_is_naive_is_merged(work, seed):
    """Any mixture of adapters, single tokens and prompts of any length, against each one's own model."""
    logits = []
    for model in (NAIVE, GROUPED):
        pool, sequences = poisoned(model, 80), []
        for i, (a, T) in enumerate(work):
            ids = random_tokens(1, T, seed + i)[0].tolist()
            sequences.append(AdapterSequence(i, ids, T + 1, adapter=ADAPTERS[a]))
            pool.start(sequences[-1], [], T)
        complete, out = model.step(pool, [(s, s.pending) for s in sequences])
        assert complete == sequences and model.reading.rows is None
        logits.append(out)
    assert_close(*logits)
    expected = [MERGED[s.adapter](torch.tensor([s.ids]))[0, -1] for s in sequences]
    assert_close(logits[1], torch.stack(expected))


# ---- The pool ----


@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans())
def test_the_books_hold_whatever_happens(seed, block_size, halves):
    """Starts, growth, ends in any order, as far as the pool says that there is room; and who leaves first."""
    draw, running, used, clock = random.Random(seed), [], {}, 0
    pool = poisoned(
        PAGED, draw.randint(100, 200) // block_size, block_size, two_halves if halves else AdapterPool
    )
    here = pool.adapters
    for i in range(30):
        clock, before, running_before = clock + 1, set(here.tables), list(running)
        kind = draw.random()
        if kind < 0.5:
            adapter = draw.choice(ADAPTERS)
            ids = [draw.randrange(2) for _ in range(draw.randint(1, 15))]
            sequence = AdapterSequence(i, ids, 16, adapter=adapter)
            found = pool.match(ids, sequence.salt)
            n_free, n_taken = len(pool.free), pool.n_taken(sequence, found, len(ids))
            if n_taken <= n_free:
                pool.start(sequence, found, len(ids))
                running.append(sequence)
                assert n_free - len(pool.free) == n_taken
                sequence.done = len(ids)
                pool.computed(sequence, len(ids) - len(found) * block_size)
        elif running and kind < 0.75:
            sequence = draw.choice(running)
            if len(sequence.ids) < 16 and pool.n_missing(sequence, 1) <= len(pool.free):
                pool.grow(sequence, 1)
                sequence.ids.append(draw.randrange(2))
                sequence.done += 1
                pool.computed(sequence, 1)
        elif running:
            sequence = running.pop(draw.randrange(len(running)))
            pool.drop(sequence)
        assert_books(pool, running)
        for s in {*running_before, *running}:
            if s.adapter is not None:
                used[s.adapter.key] = clock  # idle since then
        gone = before - set(here.tables)
        kept = {key for key in here.tables if here.ref[here.tables[key][0]] == 0}
        if gone and kept:  # the least recently used leave first
            assert max(used[key] for key in gone) <= min(used[key] for key in kept)
    for sequence in running:
        pool.drop(sequence)
    assert all_free(pool) and all_free(here)
    assert_books(pool, [])


def test_the_least_recently_used_adapter_leaves_first_and_none_in_use():
    """12 blocks; adapters of 3, 7 and 5 blocks and texts of one, by hand."""
    pool, (a, b, c) = poisoned(GROUPED, 12), ADAPTERS[1:4]
    sequences = [AdapterSequence(i, [i], 5, adapter=x) for i, x in enumerate((a, b, c, a, b))]
    pool.start(sequences[0], [], 1)  # 3 + 1 blocks
    pool.start(sequences[1], [], 1)  # 7 + 1: the pool is full
    assert pool.n_taken(sequences[2], [], 1) == 6 and len(pool.free) == 0
    pool.drop(sequences[0])
    pool.drop(sequences[1])  # both stay, and their blocks are free
    assert {*pool.tables} == {a.key, b.key} and all_free(pool) and pool.n_loaded == 2
    pool.start(sequences[3], [], 1)  # a is here: nothing is loaded
    assert pool.n_loaded == 2 and len(pool.free) == 12 - 4
    pool.start(sequences[2], [], 1)  # c needs 5 + 1 of 8 blocks: b leaves, though a was loaded first
    assert {*pool.tables} == {a.key, c.key} and pool.n_loaded == 3
    assert pool.n_taken(sequences[4], [], 1) == 8 > len(pool.free) == 2
    pool.drop(sequences[2])
    pool.drop(sequences[3])
    pool.start(sequences[4], [], 1)  # b needs 7 + 1: two blocks are empty, and c was dropped before a
    assert {*pool.tables} == {b.key, a.key} and pool.n_loaded == 4
    assert_books(pool, [sequences[4]])


def test_what_is_left_of_an_adapter_is_handed_out_before_what_can_be_found():
    pool, (a, b) = poisoned(GROUPED, 12), ADAPTERS[1:3]  # of 3 and 7 blocks
    for i, adapter in enumerate((a, b)):
        sequence = AdapterSequence(i, [i], 5, adapter=adapter)
        pool.start(sequence, [], 1)
        pool.drop(sequence)
    rest, kept = pool.tables[a.key], pool.tables[b.key]
    taken = pool.allocate(3)  # two that are empty, one of a
    assert {*pool.tables} == {b.key} and len({*taken} & {*rest}) == 1
    assert {*list(pool.free)[:2]} == {*rest} - {*taken} and {*list(pool.free)[2:]} == {*kept}
    pool.release(taken)
    late = AdapterSequence(2, [2], 5, adapter=b)  # used again: the last to leave now
    pool.start(late, [], 1)
    pool.drop(late)
    assert {*pool.allocate(5)} == {*range(12)} - {*kept} and {*pool.tables} == {b.key}


def test_texts_take_the_room_of_idle_adapters_and_adapters_that_of_old_texts():
    pool, (a, b) = poisoned(GROUPED, 10), (ADAPTERS[1], ADAPTERS[2])
    first = serve_adapters(PagedScheduler(GROUPED, pool), [(torch.arange(9), 2, a)])
    assert (
        first[0].tolist() == alone(list(range(9)), 2, a) and len(pool.block_of) == 2 and len(pool.tables) == 1
    )
    serve_adapters(PagedScheduler(GROUPED, pool), [(torch.arange(4), 2, b)])  # 7 + 2 blocks
    assert {*pool.tables} == {b.key} and pool.match(list(range(9)), a.key) == []
    requests = [(random_tokens(1, 12, i)[0], 4, None) for i in range(2)]  # 4 blocks each
    assert serve_adapters(PagedScheduler(GROUPED, pool), requests) is not None
    assert not pool.tables and pool.n_loaded == 2 and all_free(pool)


def test_a_prompt_that_is_found_is_not_taken_by_its_own_adapter():
    """The found blocks are free, and the adapter needs almost all of the pool."""
    pool, a, ids = poisoned(GROUPED, 10), ADAPTERS[2], list(range(9))
    scheduler = PagedScheduler(GROUPED, pool)
    serve_adapters(scheduler, [(torch.tensor(ids), 1, a)])
    pool.allocate(0)
    other = AdapterSequence(1, [5, 5, 5], 4, adapter=None)
    pool.start(other, [], 3)  # one block: a leaves
    pool.drop(other)
    for _ in range(3):
        again = serve_adapters(scheduler, [(torch.tensor(ids), 4, a)])
        assert again[0].tolist() == alone(ids, 4, a)
        assert scheduler.found[-1][-1] == 8
    assert_books(pool, [])


# ---- Serving ----


@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans(), st.booleans())
def test_every_request_gets_what_its_merged_weights_give_it(seed, block_size, halves, longest_first):
    """Pools down to the smallest that can run, preemption, shared beginnings, requests without an adapter."""
    draw = random.Random(seed)
    n_adapter, n_text = -(-27 // block_size), -(-16 // block_size)
    least = 2 * max(n_adapter, n_text) if halves else n_adapter + n_text
    pool = poisoned(
        GROUPED, draw.randint(least, 2 * least), block_size, two_halves if halves else AdapterPool
    )
    options = {"max_running": draw.randint(1, 6), "watermark": draw.choice([0.0, 0.1])}
    kind = LongestFirstScheduler if longest_first else PagedScheduler
    scheduler, base = kind(GROUPED, pool, **options), random_tokens(1, 15, seed)[0]
    requests = []
    for _ in range(8):
        T = draw.randint(1, 15)
        prompt = torch.cat([base[: T // 2], random_tokens(1, T - T // 2, draw.randint(0, 1))[0]])
        requests.append((prompt, draw.randint(1, 17 - T), draw.choice(ADAPTERS)))
    outputs = serve_adapters(scheduler, requests)
    assert [o.tolist() for o in outputs] == [alone(p.tolist(), n, a) for p, n, a in requests]
    assert_books(pool, [])


def test_at_every_step_the_adapters_of_the_running_are_there():
    pool = poisoned(GROUPED, 16)
    scheduler = PagedScheduler(GROUPED, pool, max_running=4)
    for i in range(10):
        ids = random_tokens(1, 5, i)[0].tolist()
        scheduler.add(AdapterSequence(i, ids, 12, adapter=ADAPTERS[i % 5]))
    most = 0
    while scheduler.waiting or scheduler.running:
        scheduler.step()
        assert_books(pool, scheduler.running)
        most = max(most, len({s.adapter for s in scheduler.running}))
    assert most >= 2 and pool.n_loaded > 4 and scheduler.n_preempted + pool.n_loaded > 4


def test_adapters_of_the_running_are_shared():
    """Four requests with one adapter: it is loaded once, and four run at a time where two halves take two."""
    requests = [(torch.tensor([i, 1, 2]), 6, ADAPTERS[1]) for i in range(4)]
    at_a_time = {}
    for make in (AdapterPool, two_halves):
        pool, most = poisoned(GROUPED, 11, make=make), 0
        scheduler = PagedScheduler(GROUPED, pool, reserve=lambda s: s.end - 1)  # 2 blocks each
        for i, (prompt, n, adapter) in enumerate(requests):
            scheduler.add(AdapterSequence(i, prompt.tolist(), 3 + n, adapter=adapter))
        while scheduler.waiting or scheduler.running:
            scheduler.step()
            most = max(most, len(scheduler.running))
        at_a_time[make] = most
        assert pool.adapters.n_loaded == 1
    assert at_a_time == {AdapterPool: 4, two_halves: 3}


@pytest.mark.parametrize("make", [AdapterPool, two_halves])
def test_texts_are_not_copied_out_of_a_pool_with_adapters(make):
    """Their adapters would stay in use, and nothing could run."""
    with pytest.raises(ValueError, match="use swap=False"):
        PagedScheduler(GROUPED, make(GROUPED, 16, 4), swap=True)


@pytest.mark.parametrize("make", [AdapterPool, two_halves])
def test_what_could_never_run_is_refused(make):
    scheduler = PagedScheduler(GROUPED, poisoned(GROUPED, 8, make=make))
    serve_adapters(scheduler, [(torch.arange(4), 1, ADAPTERS[1])])
    for adapter, T in ((ADAPTERS[2], 5), (ADAPTERS[1], 40)):
        with pytest.raises(ValueError, match="do not fit"):
            scheduler.add(AdapterSequence(0, [1] * T, T + 1, adapter=adapter))
    assert not scheduler.waiting


@pytest.mark.parametrize("make", [AdapterPool, two_halves])
def test_a_prefix_belongs_to_the_weights_that_computed_it(make):
    """LO-2: one prompt with no adapter, A, B, A; then other weights for A under its name."""
    names = {"none": None, "A": ADAPTERS[1], "B": ADAPTERS[3]}
    trained_on = [(A, B + 0.05) for A, B in PAIRS[0]]
    ids, pool = random_tokens(1, 9)[0].tolist(), poisoned(GROUPED, 60, make=make)
    scheduler, found = PagedScheduler(GROUPED, pool), []
    for name in ("none", "A", "B", "A", "A again", "none"):
        if name == "A again":
            names["A"] = Adapter(MODEL, trained_on)
            MERGED[names["A"]] = merge(copy.deepcopy(MODEL), trained_on)
        adapter = names[name.split()[0]]
        output = serve_adapters(scheduler, [(torch.tensor(ids), 5, adapter)])[0].tolist()
        assert output == alone(ids, 5, adapter)
        found.append(scheduler.found[-1][-1])
    assert found == [0, 0, 0, 8, 0, 8]
    same = Adapter(MODEL, [(A.clone(), B.clone()) for A, B in PAIRS[0]])  # the old weights under a new name
    serve_adapters(scheduler, [(torch.tensor(ids), 5, same)])
    assert scheduler.found[-1][-1] == 8


def test_requests_that_run_keep_the_weights_that_they_began_with():
    """A's weights are replaced while a request with the old ones runs, is preempted and goes on."""
    pool, ids = poisoned(GROUPED, 30), [3, 1, 4, 1]
    scheduler = PagedScheduler(GROUPED, pool)
    scheduler.add(AdapterSequence(0, list(ids), 12, adapter=ADAPTERS[1]))
    scheduler.step()
    newer = Adapter(MODEL, PAIRS[2])
    MERGED[newer] = MERGED[ADAPTERS[3]]
    (first,) = scheduler.running
    second = AdapterSequence(1, list(ids), 12, adapter=newer)
    scheduler.add(second)
    scheduler.step()
    while first in scheduler.running:
        scheduler.preempt()
    while scheduler.waiting or scheduler.running:
        scheduler.step()
    assert first.ids == alone(ids, 8, ADAPTERS[1]) and second.ids == alone(ids, 8, newer)
    assert first.ids != second.ids


def test_merged_copies_in_the_same_scheduler():
    """The baseline: as many models as adapters, a step for each that has texts, the same tokens."""
    pairs = dict(zip(ADAPTERS, [None, *PAIRS], strict=True))
    copies, calls = MergedCopies(PAGED, pairs), []
    copies.register_forward_pre_hook(lambda _, args: calls.append(args[0].numel()))
    requests = [(random_tokens(1, 3 + i, i)[0], 4, ADAPTERS[i % 5]) for i in range(10)]
    outputs = serve_adapters(PagedScheduler(copies, BlockCache(copies, 60, 4)), requests)
    assert [o.tolist() for o in outputs] == [alone(p.tolist(), n, a) for p, n, a in requests]
    assert len(calls) == 5 * 4 and sum(calls) == sum(len(p) + n - 1 for p, n, _ in requests)
    assert weight_bytes(copies) == 5 * weight_bytes(PAGED)


def test_requests_of_the_script():
    prompts = random_tokens(11, 8)
    requests = draw_requests(prompts, 3, ADAPTERS[1:], seed=1)
    assert len(requests) == 10 and {a for _, _, a in requests} == {*ADAPTERS[1:]}
    assert all(torch.equal(p[:4], prompts[0, :4]) and len(p) == 8 and n == 3 for p, n, _ in requests)
    assert sorted(p[4:].tolist() for p, _, _ in requests) == sorted(prompts[1:, 4:].tolist())
    many = draw_requests(random_tokens(401, 2), 1, ADAPTERS[1:], seed=2)
    counts = [sum(a is adapter for _, _, a in many) for adapter in ADAPTERS[1:]]
    assert counts[0] > counts[1] > counts[3] > 0
    groups = by_adapter(requests, list(range(10)))
    assert sum(len(outputs) for outputs, _ in groups.values()) == 10
    for adapter, (outputs, asked) in groups.items():
        assert [requests[i][2] for i in outputs] == [adapter] * len(asked)
        assert all(torch.equal(requests[i][0], prompt) for i, (prompt, _) in zip(outputs, asked, strict=True))


def test_100_adapters_are_served_in_less_memory_than_two_merged_models_take():
    """The default sizes, counted: weights, and the pool of 64 blocks; the adapters are in host memory."""
    model = make_model(GPTlite_Paged, 96)
    whole, pool = weight_bytes(model), AdapterPool(model, 64)
    assert whole + pool.kv.nbytes < 2 * whole
    assert pool.kv.nbytes == 64 * 294_912 and pool.kv.dtype == torch.float32
    rows = [18 * (4, 8, 16)[i % 3] for i in range(100)]
    assert all(-(-n // 32) + -(-72 // 16) <= 64 for n in rows)  # each fits, with a text


# ---- The script ----


def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "pool.png"
    options = ["--quick", "--json", "-", "--plot", figure]
    run = run_script("more/lora_pool.py", *options, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stdout + run.stderr
    assert figure.stat().st_size > 1000 and all(run.json["checks"].values())
    merged, halves, ours = run.json["rows"]
    assert merged["method"] == "merged copies" and merged["baseline"]
    assert ours["at_a_time"] >= halves["at_a_time"]
    assert ours["peak_memory_mb"] < merged["peak_memory_mb"]
    assert ours["n_loaded"] >= 4 and merged["n_loaded"] is None
    (lines,) = run.json["sweeps"].values()
    assert [line["adapters"] for line in lines] == [2, 12]
    assert all(line["one pool"] >= line["two halves"] for line in lines)


@pytest.mark.parametrize(
    "options", [["--n-blocks", "17"], ["--prompt-len", "250", "--n-tokens", "7"], ["--n-adapters", "10001"]]
)
def test_script_refuses(distilled_checkpoint, options):
    run = run_script("more/lora_pool.py", "--quick", *options, checkpoint=distilled_checkpoint)
    assert run.status == 2 and run.stdout == "" and "at most" in run.stderr


def test_words_follow_the_figures():
    line = {"adapters": 100, "weights and pool": 60.0, "two merged models": 86.0}
    names = "adapters", "weights and pool", "two merged models", "memory in MB"
    lower, higher = (words.at_size(line | {"weights and pool": mb}, *names) for mb in (60.0, 99.0))
    assert "lower" in lower and "higher" in higher and lower.startswith("At 100 adapters")
