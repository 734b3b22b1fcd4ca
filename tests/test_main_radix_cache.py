"""Radix prefix cache: the tree finds exactly the longest common beginning, and every text stays right."""

import random

import pytest
import torch
from helpers import RecordingModel, assert_close, random_tokens, run_script
from hypothesis import given
from hypothesis import strategies as st
from test_main_block_cache import PAGED, alone, assert_clean, run, tree_of_texts

from gptlite_kvcache import common_length
from gptlite_paged import Sequence
from inference_scheduling import LongestFirstScheduler, PagedScheduler
from inference_serving import serve_chats
from main_block_cache import BlockCache
from main_radix_cache import RadixCache


def poisoned(n_slots, model=PAGED):
    """A cache in which everything that was never written is NaN: reading it would be seen."""
    cache = RadixCache(model, n_slots)
    cache.kv.fill_(float("nan"))
    return cache


def make_scheduler(model, cache, longest_first, oldest_every=16, **options):
    if longest_first:
        return LongestFirstScheduler(model, cache, oldest_every, **options)
    return PagedScheduler(model, cache, **options)


def texts_of(cache):
    """{slot: all tokens up to the one that it holds}; checks the tree's own rules on the way."""
    held, stack = {}, [(root, []) for root in cache.roots.values()]
    while stack:
        node, ids = stack.pop()
        for token, child in node.children.items():
            assert child.parent is node and child.key[0] == token
            assert len(child.key) == len(child.slots) >= 1
            assert len({cache.ref[slot] for slot in child.slots}) == 1
            if node.parent is not None:
                assert cache.ref[node.slots[0]] >= cache.ref[child.slots[0]]  # locks go up to the root
                assert node.last_used >= child.last_used
            for i, slot in enumerate(child.slots):
                assert slot not in held
                held[slot] = [*ids, *child.key[: i + 1]]
            stack.append((child, [*ids, *child.key]))
    assert set(held) == cache.cached
    unused_first = [slot in cache.cached for slot in cache.free]
    assert unused_first == sorted(unused_first)
    return held


def assert_contents(cache):
    """Every slot of the tree holds the keys and values that the model computes for its text."""
    for slot, ids in texts_of(cache).items():
        other = RadixCache(PAGED, len(ids))
        table = list(range(len(ids)))
        PAGED.step(other, [(Sequence(0, ids, len(ids) + 1, table=table), len(ids))])
        assert_close(cache.kv[:, slot], other.kv[:, -1])


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.0, 1.0]))
def test_every_request_gets_what_it_gets_alone(seed, longest_first, temperature):
    """Pools down to the smallest that can run, any batch, preempted requests that hit their own text."""
    draw = random.Random(seed)
    cache = poisoned(draw.randint(16, 48))
    options = {"max_running": draw.randint(1, 5), "temperature": temperature}
    scheduler = make_scheduler(PAGED, cache, longest_first, draw.randint(1, 5), **options)
    requests = tree_of_texts(draw, 8)
    sequences = [Sequence(i, list(ids), len(ids) + n) for i, (ids, n) in enumerate(requests)]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.waiting or scheduler.running:
        scheduler.step()
        texts_of(cache)
        used = [slot for sequence in scheduler.running for slot in sequence.table]
        assert cache.ref == [used.count(slot) for slot in range(cache.n_blocks)]
    for i, (ids, n) in enumerate(requests):
        assert sequences[i].ids == alone(ids, n, i, temperature)
    assert_clean(cache)
    assert_contents(cache)


@given(st.integers(0, 10**6), st.integers(2, 16))
def test_tree_equals_a_list_of_texts(seed, n_tokens):
    """Insertions and look-ups against comparing with every text; slots tell whose copy is found."""
    draw, cache, known = random.Random(seed), RadixCache(PAGED, 200), []
    for _ in range(12):
        ids = [draw.randrange(n_tokens) for _ in range(draw.randint(1, 8))]
        if known and draw.random() < 0.6:
            source = draw.choice(known)
            ids = (source[: draw.randint(1, len(source))] + ids)[:10]
        expected = max((common_length(ids, text) for text in known), default=0)
        found = max((common_length(ids[:-1], text) for text in known), default=0)
        assert cache.n_found(ids) == found
        slots = cache.match(ids)
        assert len(slots) == found
        held = texts_of(cache)
        assert [held[slot] for slot in slots] == [ids[: i + 1] for i in range(found)]
        own = cache.allocate(len(ids))
        slots = cache.insert(ids, own)
        assert slots[expected:] == own[expected:] and slots[:-1] == cache.match(ids)
        assert not set(slots[:expected]) & set(own)
        cache.release(own)
        known.append(ids)
        held = texts_of(cache)
        assert sorted(map(tuple, held.values())) == sorted(
            {tuple(t[:i]) for t in known for i in range(1, len(t) + 1)}
        )


def test_split():
    """Texts that part inside of a node: the upper part keeps its slots, users and time."""
    cache = RadixCache(PAGED, 20)
    a = cache.allocate(5)
    assert cache.insert([1, 2, 3, 4, 5], a) == a
    assert cache.match([1, 2, 9, 9]) == a[:2]
    (upper,) = cache.roots[b""].children.values()
    (lower,) = upper.children.values()
    assert (upper.key, upper.slots, lower.key, lower.slots) == ([1, 2], a[:2], [3, 4, 5], a[2:])
    assert upper.last_used > lower.last_used
    b = cache.allocate(4)
    assert cache.insert([1, 2, 9, 9], b) == [*a[:2], *b[2:]]
    assert cache.match([1, 2, 9, 9, 0]) == [*a[:2], *b[2:]]
    cache.release(b)
    assert set(list(cache.free)[:2]) == set(b[:2])  # this copy of the common part holds nothing now
    texts_of(cache)
    assert cache.match([1]) == [] and cache.match([7, 7]) == [] and cache.n_found([]) == 0


def test_identical_requests_in_one_step():
    """PC-3: both compute what nobody has computed before; then they share one copy, and a third hits."""
    ids, cache = random_tokens(1, 9)[0].tolist(), poisoned(30)
    scheduler = PagedScheduler(PAGED, cache)
    sequences = run(scheduler, [(ids, 3), (ids, 5)])
    assert scheduler.found == [(0, 9, 0), (1, 9, 0)]
    assert [s.ids for s in sequences] == [alone(ids, 3), alone(ids, 5)]
    assert_clean(cache)
    assert len(cache.cached) == 13  # one copy of the longer text, without its newest token
    assert run(scheduler, [(ids, 4)])[0].ids == alone(ids, 4)
    assert scheduler.found[-1] == (0, 9, 8)
    assert_contents(cache)


def test_common_beginnings_to_the_token():
    """PC-6: a common beginning of 6, parting at the 7th token, decoded in turns."""
    cache, common = poisoned(30), [3, 1, 4, 1, 5, 9]
    scheduler = PagedScheduler(PAGED, cache)
    sequences = run(scheduler, [([*common, token], 4) for token in (2, 7)])
    assert scheduler.found == [(0, 7, 0), (1, 7, 0)]
    assert len(cache.cached) == 6 + 2 * 4  # the common part once
    assert [s.ids for s in sequences] == [alone([*common, token], 4) for token in (2, 7)]


def test_evicted_texts_are_not_found():
    """PC-4: 12 slots; A fills 8 and ends, B fills all, A comes again."""
    a, b = [1, *random_tokens(1, 7)[0].tolist()], [2, *random_tokens(1, 11, 1)[0].tolist()]
    cache = poisoned(12)
    scheduler = PagedScheduler(PAGED, cache)
    run(scheduler, [(a, 1)])
    run(scheduler, [(b, 1)])
    assert cache.n_evicted == 8
    assert cache.n_found([*a, 0]) == 0 and cache.n_found([*b, 0]) == 12
    assert run(scheduler, [(a, 4)])[0].ids == alone(a, 4)
    assert scheduler.found[-1] == (0, 8, 0)
    assert cache.n_found([*b, 0]) == 1  # the end goes first
    assert_contents(cache)


def test_a_prefix_is_not_changed_by_its_users():
    """PC-7: P + S1, P + S2, P + S1 again."""
    p, cache = random_tokens(1, 8)[0].tolist(), poisoned(48)
    scheduler, outputs, kept = PagedScheduler(PAGED, cache), [], None
    for end in ([1, 2], [3], [1, 2]):
        outputs.append(run(scheduler, [(p + end, 5)])[0].ids)
        now = cache.kv[:, cache.match([*p, 0])].clone()
        assert now.shape[1] == 8 and (kept is None or torch.equal(now, kept))
        kept = now
    assert outputs[0] == outputs[2] == alone([*p, 1, 2], 5)
    assert outputs[1] == alone([*p, 3], 5)


@pytest.mark.parametrize("length", range(1, 16))
def test_prompts_that_are_in_the_cache_as_a_whole(length):
    ids, cache = random_tokens(1, 16)[0].tolist()[:length], poisoned(32)
    scheduler = PagedScheduler(PAGED, cache)
    for n_found in (0, length - 1):
        assert run(scheduler, [(ids, 2)])[0].ids == alone(ids, 2)
        assert scheduler.found[-1] == (0, length, n_found)


def test_least_recently_used_leaf_leaves_and_parents_last():
    cache = RadixCache(PAGED, 12)
    for ids in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8]):
        slots = cache.allocate(len(ids))
        cache.insert(ids, slots)
        cache.release(slots)
    cache.match([1, 2, 3, 4, 0])
    cache.evict(1)
    assert [cache.n_found([*ids, 0]) for ids in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8])] == [4, 3, 2]
    cache.evict(2)
    assert [cache.n_found([*ids, 0]) for ids in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8])] == [4, 2, 1]
    cache.evict(4)
    assert [cache.n_found([*ids, 0]) for ids in ([1, 2, 3, 4], [7, 8])] == [1, 0]
    cache.evict(1)
    assert not cache.nodes() and not cache.cached and len(cache.free) == 12


def test_what_is_used_is_never_evicted():
    cache = RadixCache(PAGED, 6)
    cache.insert([1, 2, 3, 4], cache.allocate(4))  # its user has not left
    other = cache.allocate(2)
    cache.insert([5, 6], other)
    cache.release(other)
    assert len(cache.allocate(2)) == 2
    assert cache.n_found([5, 6, 0]) == 0 and cache.n_found([1, 2, 3, 4, 0]) == 4
    with pytest.raises(ValueError, match="0 of 6 are free"):
        cache.allocate(1)


@pytest.mark.parametrize("n", [0, 1, 5, 6, 99])
def test_evicting_more_than_can_go_takes_what_can(n):
    cache = RadixCache(PAGED, 12)
    used, other = cache.allocate(4), cache.allocate(6)
    cache.insert([1, 2, 3, 4], used)  # its user has not left
    cache.insert([5, 6, 7, 8, 9, 10], other)
    cache.release(other)
    assert cache.evict(n) == min(n, 6) == cache.n_evicted
    assert cache.n_found([1, 2, 3, 4, 0]) == 4 and len(cache.free) == 8
    texts_of(cache)


def test_two_that_compute_the_same_use_one_copy():
    """The second's own copy is free as soon as both are computed, also of a text that goes on elsewhere."""
    cache = poisoned(40)
    scheduler = PagedScheduler(PAGED, cache)
    sequences = [Sequence(i, [*range(1, 9), token], 14) for i, token in enumerate((9, 10))]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.step()
    assert sequences[0].table[:8] == sequences[1].table[:8]
    assert len(cache.free) == 40 - 8 - 2
    while scheduler.running:
        scheduler.step()
        texts_of(cache)
    assert [s.ids for s in sequences] == [alone([*range(1, 9), token], 5) for token in (9, 10)]


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_pages_find_what_blocks_find(seed, size):
    """With room for all: a tree in pages against the block cache, request by request."""
    draw = random.Random(seed)
    requests = tree_of_texts(draw, 6)
    found = []
    for cache in (RadixCache(PAGED, 200, page_size=size), BlockCache(PAGED, 200, size)):
        scheduler = PagedScheduler(PAGED, cache, max_running=1)
        sequences = run(scheduler, requests)
        assert [s.ids for s in sequences] == [alone(ids, n) for ids, n in requests]
        found.append(scheduler.found)
    assert found[0] == found[1]


def test_longest_prefix_first_and_no_starvation():
    """With 13 slots in order of arrival each text throws the other out; longest first keeps it. By a fake."""
    a, b = [1] * 8, [2] * 8
    requests = [([*text, i], 1) for i in range(3, 6) for text in (a, b)]  # a b a b a b
    found, orders = {}, {}
    for longest_first in (False, True):
        model = RecordingModel(PAGED)
        scheduler = make_scheduler(model, RadixCache(model, 13), longest_first, max_running=1)
        run(scheduler, requests)
        found[longest_first] = sum(n for _, _, n in scheduler.found)
        orders[longest_first] = [request for request, _, _ in scheduler.found]
    assert orders == {False: [0, 1, 2, 3, 4, 5], True: [0, 2, 4, 1, 3, 5]}
    assert found[True] == 4 * 8 > found[False]
    model = RecordingModel(PAGED)
    scheduler = LongestFirstScheduler(model, RadixCache(model, 13), oldest_every=2, max_running=1)
    run(scheduler, requests)
    assert [request for request, _, _ in scheduler.found][:2] == [0, 1]  # the second turn is the oldest's


def test_preempted_requests_hit_their_own_text():
    """CB-2: room for 1.5 of two requests."""
    prompts = random_tokens(2, 6).tolist()
    cache = poisoned(23)
    scheduler = PagedScheduler(PAGED, cache)
    sequences = run(scheduler, [(ids, 10) for ids in prompts])
    assert scheduler.n_preempted >= 1
    assert [s.ids for s in sequences] == [alone(ids, 10) for ids in prompts]
    assert scheduler.found[-1][0] == 1 and scheduler.found[-1][2] >= 6
    assert_clean(cache)


@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_chats_in_turns(seed, roomy, longest_first):
    draw = random.Random(seed)
    cache = poisoned(64 if roomy else 16)
    scheduler = make_scheduler(PAGED, cache, longest_first, max_running=draw.randint(1, 4))
    system = [draw.randrange(16) for _ in range(3)]
    chats = [[system + [draw.randrange(16)], [1, 2], [3]][: draw.randint(1, 3)] for _ in range(3)]
    sequences = serve_chats(scheduler, chats, 3)
    by_request = {s.request: s for s in sequences}
    for i, chat in enumerate(chats):
        history = []
        for turn, message in enumerate(chat):
            history = alone(history + message, 3)
            assert by_request[turn * len(chats) + i].ids == history
    if roomy:  # all of the last turn but its newest token, and the message
        for request, n, n_found in scheduler.found:
            assert request < 3 or n - n_found <= 3
    assert_clean(cache)


# The script


def test_script(checkpoint, tmp_path):
    figure = tmp_path / "hits.png"
    options = ["--quick", "--repeats", "1", "--json", "-", "--plot", figure]
    run = run_script("main_radix_cache.py", *options, checkpoint=checkpoint)
    assert run.status == 0, run.stdout + run.stderr
    assert figure.stat().st_size > 1000
    assert run.json["checks"] and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert all(row["same_output"] for row in rows.values())
    for workload in ("system prompt", "few-shot", "documents", "chats"):
        none, pages, tree = (
            rows[f"{workload}: {way}"] for way in ("no cache", "pages of 16, 2x", "in order, 2x")
        )
        assert tree["forward_tokens"] < pages["forward_tokens"] < none["forward_tokens"]
        assert tree["n_evicted"] == 0
        assert none["forward_tokens"] - tree["forward_tokens"] == tree["n_found"]
    side_by_side, alone_rows = run.json["sweeps"].values()
    assert [line["found"] for line in alone_rows] == [0, 100, 192, 199]
    assert all(line["in order, 2x"] >= line["pages of 16, 2x"] for line in side_by_side)
