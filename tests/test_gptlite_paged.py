"""GPTlite over a paged KV cache: equal to no cache for every schedule, and a pool that keeps its books."""

import random

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_paged import (
    BlockPool,
    GPTlite_Paged,
    Sequence,
    choose_tokens,
    chunk_attention,
    padded_paged_attention,
    paged_attention,
)

MODEL, PAGED = tiny_model(GPTlite), tiny_model(GPTlite_Paged)


def poisoned_pool(n_blocks, block_size, model=PAGED):
    """A pool in which everything that was never written is NaN: reading it would be seen."""
    pool = BlockPool(model, n_blocks, block_size)
    pool.kv.fill_(float("nan"))
    return pool


@torch.no_grad()
def alone(prompt, n_tokens, request=0, temperature=0.0):
    """What a request gets from the model without any cache; its own noise."""
    sequence = Sequence(request, list(prompt), len(prompt) + n_tokens)
    while not sequence.finished:
        logits = MODEL(torch.tensor([sequence.ids]))[:, -1]  # [1, V]
        sequence.ids += choose_tokens(logits, [sequence], temperature)
    return sequence.ids


def assert_clean(pool):
    assert pool.ref == [0] * pool.n_blocks
    assert sorted(pool.free) == list(range(pool.n_blocks))


# The naive form, and the fast ones against it


def scattered(lengths, block_size, seed=0, dtype=torch.float64, n_heads=2, d_head=4):
    """One layer of a pool in which texts of these lengths lie anywhere, all else NaN; queries; tables."""
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    n_each = [-(-n // block_size) for n in lengths]
    order = draw.sample(range(sum(n_each) + 3), sum(n_each))
    tables = [[order.pop() for _ in range(n)] for n in n_each]
    kv = torch.full((sum(n_each) + 3, block_size, 2, n_heads, d_head), float("nan"), dtype=dtype)
    for table, n in zip(tables, lengths, strict=True):
        for t in range(n):
            drawn = torch.randn(2, n_heads, d_head, generator=generator, dtype=torch.float64)
            kv[table[t // block_size], t % block_size] = drawn.to(dtype)
    Q = torch.randn(len(lengths), n_heads, d_head, generator=generator, dtype=torch.float64).to(dtype)
    return Q, kv, tables


def padded(Q, kv, tables, lengths):
    """padded_paged_attention, its slots and mask as the model makes them."""
    pool = BlockPool(PAGED, len(kv), kv.shape[1])
    pool.kv = pool.kv.to(Q.dtype)
    sequences = [
        Sequence(i, [0] * n, n + 1, done=n - 1, table=table)
        for i, (table, n) in enumerate(zip(tables, lengths, strict=True))
    ]
    slots, hidden = PAGED.padded_keys(pool, sequences, torch.tensor(lengths) - 1)
    return padded_paged_attention(Q, kv.flatten(0, 1), slots, hidden)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_padded_attention_equals_the_naive_one(block_size, dtype):
    lengths = [1, 3, 4, 5, 9, 17]
    Q, kv, tables = scattered(lengths, block_size, block_size, dtype)
    naive = paged_attention(Q, kv, tables, lengths)
    assert naive.shape == Q.shape
    assert_close(padded(Q, kv, tables, lengths), naive)
    exact = paged_attention(Q.double(), kv.double(), tables, lengths)
    assert_close(naive, exact, {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 2e-2))


def test_naive_attention_by_hand():
    """Block 1 holds the text, block 0 nothing: the mean of values 1 and 3, and 1 for a text of one token."""
    kv = torch.full((2, 2, 2, 1, 1), float("nan"))
    kv[1, :, 0], kv[1, :, 1, 0, 0] = 0.0, torch.tensor([1.0, 3.0])
    out = paged_attention(torch.ones(2, 1, 1), kv, [[1], [1]], [2, 1])
    assert out.flatten().tolist() == [2.0, 1.0]


@pytest.mark.parametrize("n_new", [1, 2, 5, 9])
def test_chunks_equal_the_naive_form_query_by_query(n_new):
    """Query i of a chunk is a single query over the tokens up to its own."""
    Q, kv, (table,) = scattered([9], 4)
    Q = torch.randn(n_new, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    visible = torch.ones(n_new, 9, dtype=torch.bool).tril(9 - n_new)  # [Sq, Sk]
    slots = torch.tensor(BlockPool(PAGED, len(kv), 4).slots(table, 0, 9))
    lengths = list(range(10 - n_new, 10))
    expected = paged_attention(Q, kv, [table] * n_new, lengths)
    assert_close(chunk_attention(Q, kv.flatten(0, 1), slots, visible), expected)


@pytest.mark.parametrize("form", ["naive", "padded", "chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_that_overflow_16_bits(form, dtype):
    """d = 64, all of q and k 40, two equal keys with values 1 and 3: 2; a key ten times larger wins alone."""
    for factor, right in ((1.0, 2.0), (10.0, 3.0)):
        Q, kv = torch.full((1, 1, 64), 40.0, dtype=dtype), torch.full((1, 2, 2, 1, 64), 40.0, dtype=dtype)
        kv[0, 1, 0] *= factor
        kv[0, :, 1] = torch.tensor([1.0, 3.0], dtype=dtype)[:, None, None]
        if form == "naive":
            out = paged_attention(Q, kv, [[0]], [2])
        elif form == "padded":
            out = padded(Q, kv, [[0]], [2])
        else:
            visible = torch.ones(1, 2, dtype=torch.bool)
            out = chunk_attention(Q, kv.flatten(0, 1), torch.tensor([0, 1]), visible)
        assert_close(out, torch.full_like(out, right))


# The model


@given(st.integers(0, 10**6), st.integers(1, 16), st.sampled_from([0.0, 1.0]))
def test_any_schedule_equals_no_cache(seed, block_size, temperature):
    """Random chunks, orders, preemptions, and pools down to the smallest that can run."""
    draw = random.Random(seed)
    requests = [
        (random_tokens(1, draw.randint(1, 9), seed + i)[0].tolist(), draw.randint(0, 7)) for i in range(4)
    ]
    smallest = -(-16 // block_size)
    pool = poisoned_pool(draw.randint(smallest, 3 * smallest), block_size)
    sequences = [Sequence(i, list(prompt), len(prompt) + n) for i, (prompt, n) in enumerate(requests)]
    live = [sequence for sequence in sequences if not sequence.finished]
    while live:
        work = []
        for sequence in draw.sample(live, draw.randint(1, len(live))):
            n = draw.randint(1, sequence.pending)
            if pool.n_missing(sequence, n) <= len(pool.free):
                pool.grow(sequence, n)
                work.append((sequence, n))
        if not work:
            pool.drop(draw.choice(live))
            continue
        complete, logits = PAGED.step(pool, work)
        assert complete == [sequence for sequence, _ in work if sequence.pending == 0]
        for sequence, token in zip(complete, choose_tokens(logits, complete, temperature), strict=True):
            sequence.ids.append(token)
        for sequence in [s for s in live if s.finished]:
            pool.drop(sequence)
            live.remove(sequence)
    for i, (prompt, n) in enumerate(requests):
        assert sequences[i].ids == alone(prompt, n, i, temperature)
    assert_clean(pool)


@given(st.integers(0, 10**6), st.integers(1, 16), st.integers(1, 7))
def test_logits_of_chunks_equal_one_forward(seed, block_size, largest):
    """Also for blocks that lie anywhere, in any order, and up to the last position of the context."""
    tokens, draw = random_tokens(1, 16, seed)[0].tolist(), random.Random(seed)
    pool = poisoned_pool(40, block_size)
    table = draw.sample(range(40), pool.blocks_for(16))
    with torch.no_grad():
        expected = MODEL(torch.tensor([tokens]))[0]  # [T, V]
    sequence = Sequence(0, [], 17, n_prompt=1, table=table)
    while sequence.done < 16:
        sequence.ids = tokens[: sequence.done + draw.randint(1, largest)]
        _, logits = PAGED.step(pool, [(sequence, sequence.pending)])
        assert_close(logits[0], expected[sequence.done - 1])


def test_one_sequence_may_share_blocks_that_another_fills_in_the_same_step():
    prompt = random_tokens(1, 9)[0].tolist()
    pool = poisoned_pool(8, 4)
    first, second = (Sequence(i, list(prompt), 10) for i in range(2))
    pool.grow(first, 9)
    pool.share(first.table[:2])
    second.table, second.done = first.table[:2], 8
    pool.grow(second, 1)
    _, logits = PAGED.step(pool, [(second, 1), (first, 9)])
    assert_close(logits[0], logits[1])
    assert_close(logits[0], MODEL(torch.tensor([prompt]))[0, -1].detach())


@pytest.mark.parametrize("length", [3, 4, 5])
def test_blocks_follow_the_tokens(length):
    """PA-1: a block is taken exactly when its first token is about to be written."""
    pool = poisoned_pool(4, 4)
    prompt = random_tokens(1, length)[0].tolist()
    sequence = Sequence(0, list(prompt), length + 6)
    while not sequence.finished:
        pool.grow(sequence, sequence.pending)
        complete, logits = PAGED.step(pool, [(sequence, sequence.pending)])
        assert len(sequence.table) == -(-sequence.done // 4)
        sequence.ids += choose_tokens(logits, complete)
    assert sequence.ids == alone(prompt, 6)
    pool.drop(sequence)
    assert_clean(pool)


def test_growing_takes_what_is_missing():
    """PA-1: room for 5 tokens, then for 9: three blocks, not five."""
    pool, sequence = BlockPool(PAGED, 8, 4), Sequence(0, [0] * 9, 10)
    pool.grow(sequence, 5)
    assert len(sequence.table) == 2
    pool.grow(sequence, 9)
    assert len(sequence.table) == 3
    assert len(pool.free) == 5


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 4)), max_size=40))
def test_pool_keeps_its_books(calls):
    """Free exactly where nobody uses a block, whatever happens; equal to a plain count."""
    pool, held = BlockPool(PAGED, 6, 2), []
    for call, number in calls:
        if call == "allocate" and number <= len(pool.free):
            oldest = list(pool.free)[:number]
            blocks = pool.allocate(number)
            assert blocks == oldest
            held.append(blocks)
        elif call == "allocate":
            with pytest.raises(ValueError, match="free"):
                pool.allocate(number)
        elif held and call == "share":
            pool.share(held[number % len(held)])
            held.append(held[number % len(held)])
        elif held:
            pool.release(held.pop(number % len(held)))
        counts = [sum(blocks.count(block) for blocks in held) for block in range(6)]
        assert pool.ref == counts
        assert set(pool.free) == {block for block in range(6) if counts[block] == 0}


def test_free_blocks_keep_their_contents_and_their_order():
    pool = BlockPool(PAGED, 4, 2)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.kv[:, first[0]] = 7.0
    pool.release(second)
    pool.release(first)  # the start of a text is handed out last
    assert list(pool.free) == [second[1], second[0], first[1], first[0]]
    pool.share([first[0]])  # a cache takes it back
    assert list(pool.free) == [second[1], second[0], first[1]]
    assert (pool.kv[:, first[0]] == 7.0).all()
    with pytest.raises(ValueError, match="more often"):
        pool.release([second[0]])


def test_work_that_cannot_be_computed_is_refused_before_anything_changes():
    pool, sequence = BlockPool(PAGED, 8, 4), Sequence(3, [1] * 6, 20)
    for work in ([], [(sequence, 1), (sequence, 1)]):
        with pytest.raises(ValueError, match="step needs work"):
            PAGED.step(pool, work)
    for n in (0, 7, 6):  # nothing, more than pending, and without blocks
        with pytest.raises(ValueError, match="request 3 cannot compute"):
            PAGED.step(pool, [(sequence, n)])
    long = Sequence(4, [1] * 17, 18, table=pool.allocate(5))
    with pytest.raises(ValueError, match="context of 16"):
        PAGED.step(pool, [(long, 17)])
    assert (sequence.done, long.done) == (0, 0)
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            BlockPool(PAGED, *sizes)


def test_noise_depends_on_request_and_position_alone():
    logits = torch.randn(3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sequences = [Sequence(i, [0] * (i + 1), 9) for i in range(3)]
    together = choose_tokens(logits, sequences, 1.0)
    apart = [choose_tokens(logits[i : i + 1], sequences[i : i + 1], 1.0)[0] for i in (2, 0, 1)]
    assert together == [apart[1], apart[2], apart[0]]
    assert choose_tokens(torch.tensor([[1.0, 3.0, 3.0]]), sequences[:1]) == [1]  # greedy: the lowest of a tie
    drawn = [choose_tokens(logits[:1], [Sequence(i, [0], 9)], 0.7)[0] for i in range(4000)]
    share = torch.bincount(torch.tensor(drawn), minlength=16) / 4000
    assert (share - F.softmax(logits[0] / 0.7, dim=-1)).abs().max() < 0.03


@pytest.mark.cuda
def test_on_cuda():
    model = tiny_model(GPTlite_Paged).cuda()
    pool, prompt = poisoned_pool(8, 4, model), random_tokens(1, 9)[0].tolist()
    sequence = Sequence(0, list(prompt), 14)
    while not sequence.finished:
        pool.grow(sequence, sequence.pending)
        complete, logits = model.step(pool, [(sequence, sequence.pending)])
        sequence.ids += choose_tokens(logits, complete)
    assert sequence.ids == alone(prompt, 5)
