"""Block-hash prefix cache: every request gets what it gets alone, and nothing stale is ever found."""

import random

import pytest
import torch
from helpers import RecordingModel, assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_blocks import block_keys
from gptlite_paged import GPTlite_Paged, Sequence, choose_tokens
from inference_scheduling import PagedScheduler
from inference_serving import serve_chats
from main_block_cache import BlockCache
from main_kvcache import generate

MODEL, PAGED = tiny_model(GPTlite), tiny_model(GPTlite_Paged)


def poisoned(n_blocks, block_size, model=PAGED):
    """A cache in which everything that was never written is NaN: reading it would be seen."""
    cache = BlockCache(model, n_blocks, block_size)
    cache.kv.fill_(float("nan"))
    return cache


@torch.no_grad()
def alone(ids, n_tokens, request=0, temperature=0.0):
    """What a request gets from the model without any cache."""
    if temperature == 0.0:
        return generate(MODEL, torch.tensor([ids]), n_tokens, 16)[0].tolist()
    sequence = Sequence(request, list(ids), len(ids) + n_tokens)
    while not sequence.finished:
        sequence.ids += choose_tokens(MODEL(torch.tensor([sequence.ids]))[:, -1], [sequence], temperature)
    return sequence.ids


def assert_books(cache, texts):
    """Every entry of the cache points to a block that holds its text: compared with the model's own K and V.

    texts: all texts that were served, whose blocks are all that can be in the cache.
    """
    size, known = cache.block_size, {}
    for ids in texts:
        known |= {key: ids[: (j + 1) * size] for j, key in enumerate(block_keys(ids, size))}
    assert {block: key for key, block in cache.block_of.items()} == cache.key_of
    assert all((cache.ref[block] == 0) == (block in cache.free) for block in range(cache.n_blocks))
    for key, block in cache.block_of.items():
        ids, other = known[key], BlockCache(PAGED, 1, len(known[key]))
        PAGED.step(other, [(Sequence(0, ids, len(ids) + 1, table=[0]), len(ids))])
        assert_close(cache.kv[:, block], other.kv[:, 0, -size:])


def assert_clean(cache):
    assert cache.ref == [0] * cache.n_blocks
    assert sorted(cache.free) == list(range(cache.n_blocks))


def run(scheduler, requests):
    """Serves requests (ids, n_tokens) that are there together; their sequences."""
    sequences = [Sequence(i, list(ids), len(ids) + n) for i, (ids, n) in enumerate(requests)]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.waiting or scheduler.running:
        scheduler.step()
    return sequences


def tree_of_texts(draw, n, longest=16):
    """Requests that share beginnings of all lengths: each continues a beginning of an earlier one."""
    requests = []
    for _ in range(n):
        source = draw.choice(requests)[0] if requests and draw.random() < 0.8 else []
        start = source[: draw.randint(0, len(source))]
        more = draw.randint(0 if start else 1, longest - len(start))
        ids = start + [draw.randrange(16) for _ in range(more)]
        requests.append((ids, draw.randint(0, longest + 1 - len(ids))))
    return requests


@given(st.integers(0, 10**6), st.integers(1, 16), st.sampled_from([0.0, 1.0]))
def test_every_request_gets_what_it_gets_alone(seed, block_size, temperature):
    """Pools down to the smallest that can run, preempted requests that hit their own blocks, any batch."""
    draw = random.Random(seed)
    smallest = -(-16 // block_size)
    cache = poisoned(draw.randint(smallest, 3 * smallest), block_size)
    scheduler = PagedScheduler(PAGED, cache, max_running=draw.randint(1, 5), temperature=temperature)
    requests = tree_of_texts(draw, 8)
    sequences = run(scheduler, requests)
    for i, (ids, n) in enumerate(requests):
        assert sequences[i].ids == alone(ids, n, i, temperature)
    assert_clean(cache)
    assert_books(cache, [s.ids[: s.end - 1] for s in sequences])


def test_only_full_blocks_are_shared_at_every_step():
    """PC-6: a common beginning of 6 with blocks of 4, texts that part at the 7th token, decoded in turns."""
    cache, common = poisoned(8, 4), [3, 1, 4, 1, 5, 9]
    scheduler = PagedScheduler(PAGED, cache)
    sequences, shared = [Sequence(i, [*common, token], 11) for i, token in enumerate((2, 7))], set()
    scheduler.add(sequences[0])
    scheduler.step()
    scheduler.add(sequences[1])
    while scheduler.waiting or scheduler.running:
        scheduler.step()
        for sequence in scheduler.running:
            for place, block in enumerate(sequence.table):
                if cache.ref[block] > 1:
                    shared.add(place)
                    assert (place + 1) * 4 <= sequence.done
    assert shared == {0}
    assert [s.ids for s in sequences] == [alone([*common, token], 4) for token in (2, 7)]


@pytest.mark.parametrize("n_tokens", [(3, 3), (1, 6)])
def test_identical_requests_in_one_step(n_tokens):
    """PC-3: both compute what nobody has computed before; no block is lost, and a third copy hits."""
    ids, cache = random_tokens(1, 9)[0].tolist(), poisoned(10, 4)
    scheduler = PagedScheduler(PAGED, cache)
    sequences = run(scheduler, [(ids, n) for n in n_tokens])
    assert scheduler.found == [(0, 9, 0), (1, 9, 0)]
    assert [s.ids for s in sequences] == [alone(ids, n) for n in n_tokens]
    assert len(cache.block_of) == (9 + max(n_tokens) - 1) // 4  # one copy of each text is findable
    assert_clean(cache)
    third = run(scheduler, [(ids, 4)])
    assert scheduler.found[-1] == (0, 9, 8)
    assert third[0].ids == alone(ids, 4)
    assert_clean(cache)


def test_evicted_blocks_are_not_found():
    """PC-4: a pool of 3 blocks; A fills 2 and ends, B fills all 3, A comes again."""
    a, b = random_tokens(1, 8)[0].tolist(), random_tokens(1, 12, 1)[0].tolist()
    cache = poisoned(3, 4)
    scheduler = PagedScheduler(PAGED, cache)
    run(scheduler, [(a, 1)])
    assert len(cache.block_of) == 2
    run(scheduler, [(b, 1)])
    assert cache.n_evicted == 2
    assert cache.match([*a, 0]) == []
    assert len(cache.match([*b, 0])) == 3
    assert run(scheduler, [(a, 4)])[0].ids == alone(a, 4)
    assert scheduler.found[-1] == (0, 8, 0)
    assert_books(cache, [b, alone(a, 4)[:-1]])


def test_a_prefix_is_not_changed_by_its_users():
    """PC-7: P + S1, P + S2, P + S1 again."""
    p, cache = random_tokens(1, 8)[0].tolist(), poisoned(12, 4)
    scheduler, outputs = PagedScheduler(PAGED, cache), []
    for end in ([1, 2], [3], [1, 2]):
        before = cache.kv[:, cache.match([*p, 0])].clone()
        outputs.append(run(scheduler, [(p + end, 5)])[0].ids)
        blocks = cache.match([*p, 0])
        assert len(blocks) == 2
        assert len(outputs) == 1 or torch.equal(before, cache.kv[:, blocks])
    assert outputs[0] == outputs[2] == alone([*p, 1, 2], 5)
    assert outputs[1] == alone([*p, 3], 5)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 8, 16])
def test_prompts_that_are_in_the_cache_as_a_whole(block_size):
    """At every exact multiple of the block, one token more and one less: one token at least is computed."""
    ids = random_tokens(1, 16)[0].tolist()
    for length in range(1, 16):
        cache = poisoned(2 * (-(-16 // block_size)), block_size)
        scheduler = PagedScheduler(PAGED, cache)
        run(scheduler, [(ids[:length], 1)])
        again = run(scheduler, [(ids[:length], 2)])[0]
        assert scheduler.found[-1] == (0, length, (length - 1) // block_size * block_size)
        assert again.ids == alone(ids[:length], 2)
        assert_clean(cache)


def test_preempted_requests_hit_their_own_blocks():
    """CB-2: a pool for 1.5 of two requests; what is computed again is less than without the cache."""
    prompts = random_tokens(2, 6).tolist()
    cache = poisoned(6, 4)
    scheduler = PagedScheduler(PAGED, cache)
    sequences = run(scheduler, [(ids, 10) for ids in prompts])
    assert scheduler.n_preempted >= 1
    assert [s.ids for s in sequences] == [alone(ids, 10) for ids in prompts]
    again = [entry for entry in scheduler.found[2:] if entry[0] == 1]
    assert again and any(n_found > 0 for _, _, n_found in again)
    assert_clean(cache)


def test_generated_tokens_are_found_as_their_blocks_fill():
    """A turn's answer is part of the next turn's prompt; the newest token is in no block."""
    ids, cache = random_tokens(1, 5)[0].tolist(), poisoned(8, 4)
    scheduler = PagedScheduler(PAGED, cache)
    sequence = Sequence(0, list(ids), 13)
    scheduler.add(sequence)
    while not sequence.finished:
        scheduler.step()
        assert len(cache.match([*sequence.ids, 0])) == (len(sequence.ids) - 1) // 4
    assert len(cache.match([*sequence.ids, 0])) == 3
    run(scheduler, [([*sequence.ids, 1, 2], 1)])
    assert scheduler.found[-1] == (0, 15, 12)


def test_least_recently_used_block_leaves_and_ends_of_texts_first():
    cache = poisoned(6, 2)
    scheduler = PagedScheduler(PAGED, cache)
    a, b, c = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
    for ids in (a, b, [*a, 0]):
        run(scheduler, [(ids, 1)])  # a is now the more recent one
    run(scheduler, [(c, 1)])
    assert [len(cache.match([*ids, 0])) for ids in (a, b, c)] == [2, 2, 2]
    run(scheduler, [([13, 14], 1)])  # one block: the end of b
    assert [len(cache.match([*ids, 0])) for ids in (a, b, c)] == [2, 1, 2]
    run(scheduler, [([15, 14, 13, 12], 1)])
    assert [len(cache.match([*ids, 0])) for ids in (a, b, c)] == [1, 0, 2]


def test_blocks_in_use_are_never_handed_out():
    """A long-running text and many others through a pool that is always full."""
    cache = poisoned(6, 4)
    scheduler = PagedScheduler(PAGED, cache, max_running=2)
    sequences = [Sequence(0, [1, 2, 3], 17)] + [Sequence(i, [i, 3, 5, 7], 6) for i in range(1, 9)]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.waiting or scheduler.running:
        scheduler.step()
        used = [block for sequence in scheduler.running for block in sequence.table]
        assert cache.ref == [used.count(block) for block in range(6)]
        assert not set(used) & set(cache.free)
    assert cache.n_evicted > 0
    assert [s.ids for s in sequences] == [alone(s.ids[: s.n_prompt], s.end - s.n_prompt) for s in sequences]


def test_schedule_by_a_fake_model():
    """Hits in the free list are not free for anything else: with 3 blocks the second has to wait."""
    model = RecordingModel(PAGED)
    scheduler = PagedScheduler(model, BlockCache(model, 3, 2))
    run(scheduler, [([1, 2, 3], 1)])
    sequences = run(scheduler, [([1, 2, 3, 9], 2), ([7, 7, 7, 7], 2)])
    assert [s.ids for s in sequences] == [[1, 2, 3, 9, 10, 11], [7, 7, 7, 7, 8, 9]]
    assert model.calls == [[(0, 0, 3)], [(0, 2, 2)], [(0, 4, 1)], [(1, 0, 4)], [(1, 4, 1)]]


@given(st.integers(0, 10**6), st.integers(1, 8), st.booleans())
def test_chats_in_turns(seed, block_size, roomy):
    """All turns through one cache, also a thrashing one, against the uncached model turn by turn."""
    draw = random.Random(seed)
    smallest = -(-16 // block_size)
    cache = poisoned(8 * smallest if roomy else smallest, block_size)
    scheduler = PagedScheduler(PAGED, cache, max_running=draw.randint(1, 4))
    system = [draw.randrange(16) for _ in range(3)]
    chats = [[system + [draw.randrange(16)], [1, 2], [3]][: draw.randint(1, 3)] for _ in range(3)]
    sequences = serve_chats(scheduler, chats, 3)
    assert len(sequences) == sum(map(len, chats))
    by_request = {s.request: s for s in sequences}
    for i, chat in enumerate(chats):
        history = []
        for turn, message in enumerate(chat):
            history = alone(history + message, 3)
            assert by_request[turn * len(chats) + i].ids == history
    assert_clean(cache)


# The script


def test_script(checkpoint, tmp_path):
    figure = tmp_path / "hits.png"
    options = ["--quick", "--repeats", "1", "--json", "-", "--plot", figure]
    run = run_script("main_block_cache.py", *options, checkpoint=checkpoint)
    assert run.status == 0, run.stdout + run.stderr
    assert figure.stat().st_size > 1000
    assert run.json["checks"] and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert all(row["same_output"] for row in rows.values())
    for workload in ("system prompt", "few-shot", "documents", "chats"):
        none, large, small = (rows[f"{workload}: {way}"] for way in ("no cache", "pool 2x", "pool 0.5x"))
        assert none["baseline"] and none["n_found"] == 0
        assert large["forward_tokens"] <= small["forward_tokens"] and large["n_evicted"] == 0
        assert none["forward_tokens"] - large["forward_tokens"] == large["n_found"] > 0
        assert large["n_found"] % 16 == 0
    assert rows["no sharing: pool 2x"]["n_found"] == 0
    (lines,) = run.json["sweeps"].values()
    assert [line["found"] for line in lines] == [0, 48, 96, 144, 192]
    assert lines[0]["GFLOP"] > 20 * lines[-1]["GFLOP"]
