"""Schedulers: admission, preemption, and every kind of pool give what each request gets alone."""

import random
from tempfile import TemporaryDirectory

import pytest
import torch
from helpers import RecordingModel, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from test_gptlite_paged import MODEL, PAGED, alone, assert_clean, poisoned_pool

from gptlite import GPTlite
from gptlite_paged import BlockPool, GPTlite_Paged, Sequence
from gptlite_slots import GPTlite_Slots
from inference_pages import PageStore
from inference_scheduling import (
    LongestFirstScheduler,
    PagedScheduler,
    SlotScheduler,
    serve,
    swap_in,
    swap_out,
)
from main_block_cache import BlockCache
from main_continuous_batching import continuous_batching, continuous_batching_kvcache
from main_radix_cache import RadixCache
from main_static_batching import static_batching
from paged_sharing import SharingPool
from radix_offload import OffloadingCache


def make_requests(draw, n_requests, seqlen=16):
    lengths = [draw.randint(1, seqlen) for _ in range(n_requests)]
    prompts = [random_tokens(1, T, draw.randint(0, 10**6))[0] for T in lengths]
    return [(prompt, draw.randint(0, seqlen + 1 - len(prompt))) for prompt in prompts]


@given(st.integers(0, 10**6), st.integers(1, 16), st.booleans(), st.sampled_from([0.0, 1.0]))
def test_every_request_gets_what_it_gets_alone(seed, block_size, swap, temperature):
    draw = random.Random(seed)
    smallest = -(-16 // block_size)
    pool = poisoned_pool(draw.randint(smallest, 2 * smallest), block_size)
    how = {"swap": swap, "max_running": draw.randint(1, 6), "watermark": draw.choice([0.0, 0.01, 0.3])}
    scheduler = PagedScheduler(PAGED, pool, temperature=temperature, **how)
    requests = make_requests(draw, 6)
    for i, output in enumerate(serve(scheduler, requests)):
        prompt, n_tokens = requests[i]
        assert output.tolist() == alone(prompt.tolist(), n_tokens, i, temperature)
    assert not scheduler.swapped
    assert_clean(pool)


@pytest.mark.parametrize("reserve", [lambda s: 16, lambda s: s.end - 1])
def test_reservation_never_preempts(reserve):
    pool = poisoned_pool(8, 4)
    scheduler = PagedScheduler(PAGED, pool, reserve=reserve)
    requests = make_requests(random.Random(1), 8)
    outputs = serve(scheduler, requests)
    assert [o.tolist() for o in outputs] == [alone(q.tolist(), n, i) for i, (q, n) in enumerate(requests)]
    assert scheduler.n_preempted == 0
    assert_clean(pool)


@pytest.mark.parametrize("swap", [False, True])
def test_preempted_twice(swap):
    """CB-2: a pool for 1.5 of two requests; the newest is preempted again and again, nothing is lost."""
    pool = poisoned_pool(6, 4)  # one request takes 4 blocks
    prompts = random_tokens(2, 6).tolist()
    scheduler = PagedScheduler(PAGED, pool, swap=swap)
    sequences = [Sequence(i, list(prompt), 16) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add(sequence)
    finished = []
    while scheduler.running or scheduler.waiting:
        finished += scheduler.step()
        assert sum(ref > 0 for ref in pool.ref) + len(pool.free) == pool.n_blocks
        for sequence in scheduler.running:
            assert len(sequence.table) == -(-sequence.done // 4)
        if len(scheduler.running) == 2 and scheduler.n_preempted == 0:
            scheduler.preempt()  # once more than the pool asks for
    assert finished == sequences
    assert scheduler.n_preempted >= 2
    assert (scheduler.n_bytes_swapped > 0) == swap
    assert [s.ids for s in sequences] == [alone(q, 10, i) for i, q in enumerate(prompts)]
    assert_clean(pool)


def test_schedule_of_preemption_by_a_fake_model():
    """The newest makes room, is first in the queue, is computed again with what it had generated."""
    model = RecordingModel(PAGED)
    pool = BlockPool(model, 4, 2)
    requests = [(torch.tensor([first, first]), 4) for first in (0, 4, 8)]
    outputs = serve(PagedScheduler(model, pool, watermark=0.0), requests)
    assert [output.tolist() for output in outputs] == [[i, i, i + 1, i + 2, i + 3, i + 4] for i in (0, 4, 8)]
    assert model.calls == [
        [(0, 0, 2), (1, 0, 2), (2, 0, 2)],
        [(0, 2, 1), (1, 2, 1)],  # 2 had to go: its block was the last that 1 could get
        [(0, 3, 1), (1, 3, 1)],
        [(0, 4, 1)],  # the third block of 0 is one of 1's
        [(1, 0, 5)],
        [(2, 0, 3)],
        [(2, 3, 1)],
        [(2, 4, 1)],
    ]
    assert_clean(pool)


def test_requests_that_cannot_run_are_refused_alone():
    """SB-3 and the whole-pool deadlock: the others finish."""
    pool = poisoned_pool(3, 4)
    good, empty = torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.int64)
    outputs = serve(PagedScheduler(PAGED, pool), [(empty, 3), (good, 4), (good, 11), (good, 10), (good, 0)])
    assert [isinstance(output, ValueError) for output in outputs] == [True, False, True, False, False]
    assert outputs[1].tolist() == alone([1, 2, 3], 4)
    assert outputs[3].tolist() == alone([1, 2, 3], 10)  # the whole pool: 12 cached tokens
    assert outputs[4].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="do not fit"):
        PagedScheduler(PAGED, pool).add(Sequence(0, [1] * 6, 14))
    assert_clean(pool)


def test_swap_is_bitwise_and_may_land_elsewhere():
    pool = BlockPool(PAGED, 8, 4)
    sequence = Sequence(0, random_tokens(1, 7)[0].tolist(), 16)
    pool.grow(sequence, 12)  # a block more than is filled
    PAGED.step(pool, [(sequence, 7)])
    before, table = pool.kv[:, sequence.table[:2]], sequence.table
    data = swap_out(pool, sequence)
    assert data.shape[1] == 2
    assert_clean(pool)
    pool.kv.fill_(float("nan"))
    swap_in(pool, sequence, data)
    assert sequence.table != table
    assert torch.equal(pool.kv[:, sequence.table], before)


# Every scheduler over every pool


class Budget(PagedScheduler):
    """Prompts in pieces: a step computes so many tokens at most, those who generate first."""

    budget = 4

    def choose_work(self):
        work, left = [], self.budget
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):
            if left > 0:
                work.append((sequence, min(sequence.pending, left)))
                left -= work[-1][1]
        return work


def pools(folder=None):
    """{name: function model, n_tokens -> pool}, all kinds that the collection has."""
    return {
        "plain": lambda model, n: BlockPool(model, -(-n // 4), 4),
        "sharing": lambda model, n: SharingPool(model, -(-n // 4), 4),
        "blocks": lambda model, n: BlockCache(model, -(-n // 4), 4),
        "tree": lambda model, n: RadixCache(model, n),
        "pages": lambda model, n: RadixCache(model, n, page_size=4),
        "offloading": lambda model, n: OffloadingCache(model, n, PageStore(2, folder), 4),
    }


@pytest.mark.parametrize("pool", pools())
@pytest.mark.parametrize("scheduler", [PagedScheduler, LongestFirstScheduler, Budget])
@given(st.integers(0, 10**6), st.booleans())
def test_every_scheduler_over_every_pool(scheduler, pool, seed, swap):
    """Requests that share beginnings, small pools, preemption; twice through the same pool."""
    draw = random.Random(seed)
    base = random_tokens(1, 12, seed)[0].tolist()
    with TemporaryDirectory() as folder:
        made = pools(folder)[pool](PAGED, draw.choice([16, 20, 28]))
        made.kv.fill_(float("nan"))
        for _ in range(2):
            options = {"max_running": draw.randint(1, 4), "swap": swap}
            running = scheduler(PAGED, made, **options)
            requests = []
            for _ in range(4):
                prompt = base[: draw.randint(1, 12)] + random_tokens(1, 2, draw.randint(0, 9))[0].tolist()
                requests.append((torch.tensor(prompt), draw.randint(0, 17 - len(prompt))))
            for (prompt, n), output in zip(requests, serve(running, requests), strict=True):
                assert output.tolist() == alone(prompt.tolist(), n)
            assert_clean(made)


CACHES = [name for name in pools() if name not in ("plain", "sharing")]


@pytest.mark.parametrize("pool", CACHES)
def test_nothing_is_found_before_it_is_computed(pool):
    """Budget 4, block 4: one step of a prompt of 20 tokens, then another one that begins alike."""
    model = tiny_model(GPTlite_Paged, seqlen=24)
    made = pools()[pool](model, 48)
    made.kv.fill_(float("nan"))
    text = random_tokens(1, 20)[0].tolist()
    first, second = Sequence(0, list(text), 22), Sequence(1, text[:17], 19)
    scheduler = Budget(model, made)
    scheduler.add(first)
    scheduler.step()
    assert first.done == 4 and made.n_found(text) in (0, 4)  # all that is there
    scheduler.add(second)
    while scheduler.waiting or scheduler.running:
        scheduler.step()
    fresh = PagedScheduler(model, BlockPool(model, 12, 4))
    expected = serve(fresh, [(torch.tensor(text), 2), (torch.tensor(text[:17]), 2)])
    assert [first.ids, second.ids] == [output.tolist() for output in expected]


@pytest.mark.parametrize("pool", CACHES)
def test_a_prompt_that_is_preempted_halfway_leaves_only_what_was_computed(pool):
    made, text = pools()[pool](PAGED, 32), random_tokens(1, 13)[0].tolist()
    made.kv.fill_(float("nan"))
    scheduler = Budget(PAGED, made)
    scheduler.add(Sequence(0, list(text), 14))
    scheduler.step()
    scheduler.preempt()
    assert made.n_found(text) <= 4
    assert_clean(made)
    assert serve(PagedScheduler(PAGED, made), [(torch.tensor(text), 3)])[0].tolist() == alone(text, 3)


@pytest.mark.parametrize("pool", CACHES)
def test_a_forward_that_raises_leaves_nothing_findable(pool):
    made, text = pools()[pool](PAGED, 32), random_tokens(1, 13)[0].tolist()
    made.kv.fill_(float("nan"))
    scheduler = PagedScheduler(PAGED, made)
    scheduler.add(Sequence(0, list(text), 15))

    def fail(*_):
        raise RuntimeError("a device that went away")

    hook = PAGED.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="went away"):
        scheduler.step()
    hook.remove()
    assert made.n_found(text) == 0
    other = Sequence(1, list(text), 15)
    scheduler.add(other)
    while scheduler.waiting or scheduler.running:  # the engine goes on, with both
        scheduler.step()
    assert other.ids == alone(text, 2)
    assert_clean(made)


@pytest.mark.parametrize("pool", CACHES)
@pytest.mark.parametrize("change", ["load", "another model", "in place"])
def test_other_weights_find_nothing(pool, change, tmp_path):
    """A prompt, other weights, the same prompt: in blocks, tree, host memory and files."""
    model, text = tiny_model(GPTlite_Paged), random_tokens(1, 13)[0].tolist()
    made = pools(tmp_path)[pool](model, 32)
    assert serve(PagedScheduler(model, made), [(torch.tensor(text), 2)])[0].tolist() == alone(text, 2)
    if hasattr(made, "evict"):
        made.evict(4)
    other = tiny_model(GPTlite_Paged, seed=1)
    right = serve(PagedScheduler(other, BlockPool(other, 4, 4)), [(torch.tensor(text), 3)])[0].tolist()
    if change == "load":
        model.load_state_dict(other.state_dict())
    elif change == "in place":
        with torch.no_grad():
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                p.copy_(q)
    else:
        model = other
    scheduler = PagedScheduler(model, made)
    assert serve(scheduler, [(torch.tensor(text), 3)])[0].tolist() == right
    assert scheduler.found == [(0, 13, 0)]
    assert serve(scheduler, [(torch.tensor(text), 3)])[0].tolist() == right
    assert scheduler.found[-1][-1] > 0  # what the new weights computed is found again
    assert_clean(made)


@pytest.mark.parametrize("pool", CACHES)
def test_a_text_that_runs_while_the_weights_change_is_not_kept(pool):
    model, text = tiny_model(GPTlite_Paged), random_tokens(1, 10)[0].tolist()
    made = pools()[pool](model, 48)
    scheduler = PagedScheduler(model, made)
    scheduler.add(Sequence(0, list(text), 16))
    scheduler.step()
    model.load_state_dict(tiny_model(GPTlite_Paged, seed=1).state_dict())
    scheduler.add(Sequence(1, [3, 3, 3], 4))  # its admission sees the new weights, beside the old text
    while scheduler.waiting or scheduler.running:
        scheduler.step()
    assert made.n_found([*text, 0]) == 0
    assert_clean(made)


@pytest.mark.parametrize("pool", CACHES)
@pytest.mark.parametrize("evict", [False, True])
def test_what_was_computed_under_another_salt_is_not_found(pool, evict, tmp_path):
    """LO-2: one text with no adapter, A, B, A, and other weights for A; in lower levels as well."""
    made, text, in_pool = pools(tmp_path)[pool](PAGED, 96), random_tokens(1, 13)[0].tolist(), []
    emptied, stored = evict and hasattr(made, "evict"), hasattr(made, "store")
    scheduler = LongestFirstScheduler(PAGED, made)
    for i, salt in enumerate((b"", b"A", b"B", b"A", b"A, trained on", b"")):
        in_pool.append(made.n_found(text, salt) > 0)
        scheduler.add(Sequence(i, list(text), 15, salt=salt))
        while scheduler.waiting or scheduler.running:
            scheduler.step()
        if emptied:
            made.evict(96)
            assert not made.roots  # a tree that is empty is gone
    again = [False, False, False, True, False, True]
    assert in_pool == [seen and not emptied for seen in again]
    assert [n > 0 for _, _, n in scheduler.found] == [seen and (stored or not emptied) for seen in again]
    assert_clean(made)


def test_slots_give_what_each_request_gets_alone():
    requests = make_requests(random.Random(3), 7)
    outputs = serve(SlotScheduler(tiny_model(GPTlite_Slots), 3, 16), requests)
    assert [o.tolist() for o in outputs] == [alone(q.tolist(), n) for q, n in requests]
    too_long = serve(SlotScheduler(tiny_model(GPTlite_Slots), 3, 8), [(torch.tensor([1, 2]), 9)])
    assert isinstance(too_long[0], ValueError) and MODEL is not None


def test_a_request_with_an_unknown_token_is_refused_alone():
    """In a batch it would stop all the others, at every step again."""
    good = (random_tokens(1, 4)[0], 3)
    for make in (
        lambda: PagedScheduler(PAGED, BlockPool(PAGED, 8, 4)),
        lambda: SlotScheduler(tiny_model(GPTlite_Slots), 2, 16),
    ):
        for bad in ([99], [3, -1]):
            outputs = serve(make(), [good, (torch.tensor(bad), 2), good])
            assert isinstance(outputs[1], ValueError) and "vocabulary" in str(outputs[1])
            assert torch.equal(outputs[0], outputs[2]) and len(outputs[0]) == 7
            scheduler = make()
            scheduler.add(Sequence(0, [1, 2], 5))
            for sequence in (Sequence(1, bad, 4), Sequence(2, [], 3), Sequence(3, [1], 99)):
                with pytest.raises(ValueError, match="request"):
                    scheduler.add(sequence)
            assert len(scheduler.waiting) == 1


def test_every_way_to_serve_refuses_an_unknown_token():
    requests = [(torch.tensor([1, 2]), 2), (torch.tensor([16]), 2)]
    plain = tiny_model(GPTlite)
    served = [static_batching(plain, requests, 2, 16), continuous_batching(plain, requests, 2, 16)]
    served.append(continuous_batching_kvcache(tiny_model(GPTlite_Slots), requests, 2, 16))
    for outputs, _ in served:
        assert len(outputs[0]) == 4 and "token 16 is not in" in str(outputs[1])
