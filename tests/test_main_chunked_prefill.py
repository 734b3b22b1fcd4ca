"""Chunked prefill: every policy and budget gives what each request gets alone; the steps are as planned."""

import random
from functools import partial
from itertools import pairwise

import pytest
import torch
from helpers import RecordingModel, random_tokens, run_script
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gptlite_paged import MODEL, PAGED, alone, assert_clean, poisoned_pool
from test_main_static_batching import refusal

from gptlite_paged import BlockPool, Sequence
from main_block_cache import BlockCache
from main_chunked_prefill import (
    PolicyScheduler,
    choose_budget,
    chunked,
    decode_first,
    mixed,
    prefill_first,
    serve_arrivals,
)
from main_kvcache import generate
from main_radix_cache import RadixCache

WHOLE = {"prefill first": prefill_first, "decode first": decode_first, "mixed": mixed}


def chunks_of(budget):
    return partial(chunked, budget=budget)


POLICIES = st.one_of(st.sampled_from(list(WHOLE.values())), st.integers(1, 24).map(chunks_of))


class Recorded(RecordingModel):
    """Also checks at every step that the work has its blocks and that the pool's books are right."""

    def step(self, pool, work):
        assert all(pool.n_missing(sequence, n) == 0 for sequence, n in work)
        assert sum(ref > 0 for ref in pool.ref) + len(pool.free) == pool.n_blocks
        return super().step(pool, work)


def drawn_requests(draw, n_requests, longest=16):
    lengths = [draw.randint(1, longest) for _ in range(n_requests)]
    prompts = [random_tokens(1, T, draw.randint(0, 10**6))[0] for T in lengths]
    return [(prompt, draw.randint(0, longest + 1 - len(prompt))) for prompt in prompts]


@given(st.integers(0, 10**6), st.integers(1, 16), POLICIES, st.sampled_from([0.0, 1.0]))
def test_every_request_gets_what_it_gets_alone(seed, block_size, policy, temperature):
    """Random arrivals, budgets from 1 up, pools down to the smallest that can run, with preemption."""
    draw = random.Random(seed)
    smallest = -(-16 // block_size)
    pool, model = poisoned_pool(draw.randint(smallest, 2 * smallest), block_size), Recorded(PAGED, think=True)
    how = {"swap": draw.random() < 0.5, "max_running": draw.randint(1, 6), "temperature": temperature}
    scheduler = PolicyScheduler(model, pool, policy, **how)
    requests, arrivals = drawn_requests(draw, 6), [draw.randint(0, 20) for _ in range(6)]
    outputs, received = serve_arrivals(scheduler, requests, arrivals)
    for i, (prompt, n_tokens) in enumerate(requests):
        assert outputs[i].tolist() == alone(prompt.tolist(), n_tokens, i, temperature)
        assert len(received[i]) == n_tokens
        assert received[i] == sorted(set(received[i]))
    computed = [sum(n for request, _, n in call if request == i) for call in model.calls for i in range(6)]
    if scheduler.n_preempted == 0 or how["swap"]:  # then nothing is computed twice
        assert sum(computed) == sum(len(prompt) + n - 1 for prompt, n in requests if n)
    assert_clean(pool)


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 6))
def test_tokens_are_those_of_generate(seed, budget, n_late):
    """Against the baseline without cache, at every budget; also a budget for everything at once."""
    draw = random.Random(seed)
    requests = drawn_requests(draw, n_late + 1)
    expected = [generate(MODEL, prompt[None], n_tokens, 16)[0] for prompt, n_tokens in requests]
    for policy in (*WHOLE.values(), chunks_of(budget)):
        arrivals = [draw.randint(0, 12) for _ in requests]
        scheduler = PolicyScheduler(PAGED, poisoned_pool(4 * len(requests), 4), policy)
        outputs, _ = serve_arrivals(scheduler, requests, arrivals)
        assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
        assert_clean(scheduler.pool)


@given(st.integers(0, 10**6), st.integers(1, 24))
def test_what_a_chunked_step_computes(seed, budget):
    """All that generate, then prompts in order, no token above the budget and none of it left unused."""
    draw = random.Random(seed)
    running = [Sequence(i, [0] * draw.choice([1, 1, 2, 5, 12]), 17) for i in range(draw.randint(1, 8))]
    work = dict(chunked(running, budget))
    generate_now = [s for s in running if s.pending == 1]
    assert all(work[s] == 1 for s in generate_now)
    assert all(1 <= n <= s.pending for s, n in work.items())
    wanted = sum(s.pending for s in running)
    assert sum(work.values()) == max(len(generate_now), min(budget, wanted))
    shares = [work.get(s, 0) / s.pending for s in running if s.pending > 1]
    assert shares == sorted(shares, reverse=True)  # the oldest prompt first
    assert sum(0 < share < 1 for share in shares) <= 1
    with pytest.raises(ValueError, match="at least 1"):
        chunked(running, 0)


A_AND_B = [[f"A{i}+1", f"B{i}+1"] for i in range(4)]
SCHEDULES = {  # by hand: A and B of 1 token and 4 new ones, C of 5 and 2, which comes before step 1
    "prefill first": [A_AND_B[0], ["C0+5"], [*A_AND_B[1], "C5+1"], *A_AND_B[2:]],
    "decode first": [*A_AND_B, ["C0+5"], ["C5+1"]],
    "mixed": [A_AND_B[0], [*A_AND_B[1], "C0+5"], [*A_AND_B[2], "C5+1"], A_AND_B[3]],
    # of the pieces only the last gives a token
    4: [A_AND_B[0], [*A_AND_B[1], "C0+2"], [*A_AND_B[2], "C2+2"], [*A_AND_B[3], "C4+1"], ["C5+1"]],
    2: [*A_AND_B, ["C0+2"], ["C2+2"], ["C4+1"], ["C5+1"]],
    1: [*A_AND_B, *([f"C{i}+1"] for i in range(6))],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_by_a_fake_model(name):
    model = Recorded(PAGED)
    pool = BlockPool(model, 20, 2)
    policy = WHOLE[name] if name in WHOLE else chunks_of(name)
    requests = [(torch.tensor([1]), 4), (torch.tensor([2]), 4), (torch.tensor([1, 2, 3, 4, 5]), 2)]
    outputs, received = serve_arrivals(PolicyScheduler(model, pool, policy), requests, [0, 0, 1])
    calls = [[f"{'ABC'[request]}{done}+{n}" for request, done, n in call] for call in model.calls]
    assert calls == SCHEDULES[name]
    assert [o.tolist() for o in outputs] == [[1, 2, 3, 4, 5], [2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]]
    steps = [i for i, call in enumerate(calls) if any(item in ("C0+5", "C4+1", "C5+1") for item in call)]
    assert received[2] == steps
    if name not in WHOLE:  # nobody who generates is paused
        assert all(b - a == 1 for steps in received[:2] for a, b in pairwise(steps))
    assert_clean(pool)


def test_prompts_share_a_step():
    """The rest of a budget goes to the next prompt; two prompts may end in one step."""
    model = Recorded(PAGED)
    requests = [(torch.tensor([1] * 5), 1), (torch.tensor([2] * 3), 1), (torch.tensor([3] * 9), 1)]
    scheduler = PolicyScheduler(model, BlockPool(model, 20, 2), chunks_of(10))
    _, received = serve_arrivals(scheduler, requests, [0, 0, 0])
    assert model.calls == [[(0, 0, 5), (1, 0, 3), (2, 0, 2)], [(2, 2, 7)]]
    assert received == [[0], [0], [1]]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("policy", [*WHOLE.values(), *map(chunks_of, (1, 2, 3, 5, 64))])
def test_preempted_twice(policy, swap):
    """CB-2: a pool for 1.5 of two requests; what is computed again is prompt and answer, in pieces too."""
    pool, model = poisoned_pool(6, 4), Recorded(PAGED, think=True)
    scheduler = PolicyScheduler(model, pool, policy, swap=swap)
    prompts = random_tokens(2, 6).tolist()
    sequences = [Sequence(i, list(prompt), 16) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add(sequence)
    forced, n_lost = 0, 0
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        if len(scheduler.running) == 2 and forced < 2:  # whatever the newest is doing
            forced += 1
            n_lost += 0 if swap else sequences[1].done
            scheduler.preempt()
    assert [s.ids for s in sequences] == [alone(prompt, 10, i) for i, prompt in enumerate(prompts)]
    assert scheduler.n_preempted >= forced == 2
    position = [0, 0]  # each piece begins where the last one ended, or at 0 after a preemption
    for request, done, n in (item for call in model.calls for item in call):
        assert done in ((position[request],) if swap or request == 0 else (position[request], 0))
        position[request] = done + n
    assert position == [15, 15]
    n_computed = sum(n for call in model.calls for _, _, n in call)
    assert n_computed >= 30 + n_lost if scheduler.n_preempted > forced else n_computed == 30 + n_lost
    assert_clean(pool)


@pytest.mark.parametrize("length", [3, 4, 5])
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
def test_blocks_follow_the_tokens(length, budget):
    """PA-1: a prompt has its blocks from its admission, a generated token the one it needs and no other."""
    pool = poisoned_pool(5, 4)
    scheduler = PolicyScheduler(PAGED, pool, chunks_of(budget))
    prompts = random_tokens(2, length).tolist()
    first, short = Sequence(0, list(prompts[0]), length + 6), Sequence(1, prompts[1][:2], 3)
    scheduler.add(first)
    while not first.finished:
        scheduler.step()
        if not first.finished:
            assert len(first.table) == -(-max(first.done, length) // 4)
    scheduler.add(short)  # in the blocks of a longer one
    while not short.finished:
        scheduler.step()
    assert first.ids == alone(prompts[0], 6)
    assert short.ids == alone(prompts[1][:2], 1, 1)
    assert_clean(pool)


CACHES = {"blocks": lambda: BlockCache(PAGED, 12, 4), "radix tree": lambda: RadixCache(PAGED, 48)}


@pytest.mark.parametrize("cache", CACHES)
def test_a_prompt_in_pieces_is_found_as_far_as_it_is_computed(cache):
    """B is the first 9 tokens of A, and comes when 4 of A's 12 are computed: it may not find 8."""
    pool = CACHES[cache]()
    pool.kv.fill_(float("nan"))
    prompt = random_tokens(1, 12)[0].tolist()
    scheduler, texts = PolicyScheduler(PAGED, pool, chunks_of(4)), []
    for request, n in enumerate((12, 9)):
        texts.append(Sequence(request, prompt[:n], n + 4))
        scheduler.add(texts[-1])
        scheduler.step()
    assert texts[1].done <= 4
    while scheduler.waiting or scheduler.running:
        scheduler.step()
    assert [s.ids for s in texts] == [alone(prompt, 4), alone(prompt[:9], 4, 1)]


@settings(max_examples=15)
@given(st.integers(0, 10**6), POLICIES, st.sampled_from(sorted(CACHES)))
def test_every_policy_over_every_cache(seed, policy, cache):
    draw, pool = random.Random(seed), CACHES[cache]()
    pool.kv.fill_(float("nan"))
    texts = random_tokens(2, 12, seed % 5)  # few beginnings, so that much is found
    requests = [(draw.choice(texts)[: draw.randint(1, 12)], draw.randint(0, 4)) for _ in range(6)]
    scheduler = PolicyScheduler(PAGED, pool, policy, max_running=draw.randint(1, 4))
    outputs, _ = serve_arrivals(scheduler, requests, [draw.randint(0, 9) for _ in requests])
    for i, (prompt, n_tokens) in enumerate(requests):
        assert outputs[i].tolist() == alone(prompt.tolist(), n_tokens, i)


def test_an_idle_server_takes_the_next_request_at_once():
    model = Recorded(PAGED)
    scheduler = PolicyScheduler(model, BlockPool(model, 8, 4), chunks_of(4))
    prompt = torch.tensor([1, 2])
    _, received = serve_arrivals(scheduler, [(prompt, 1), (prompt, 2), (prompt, 0)], [50, 0, 3])
    assert received == [[2], [0, 1], []]
    assert serve_arrivals(scheduler, [], []) == ([], [])


def test_requests_that_cannot_run_are_refused_alone():
    """SB-3, and a request larger than the pool."""
    pool, good = poisoned_pool(3, 4), torch.tensor([1, 2, 3])
    requests = [(good[:0], 3), (good, 4), (good, 11), (good, 10)]
    outputs, received = serve_arrivals(PolicyScheduler(PAGED, pool, chunks_of(2)), requests, [0, 1, 2, 3])
    assert [isinstance(output, ValueError) for output in outputs] == [True, False, True, False]
    assert outputs[1].tolist() == alone([1, 2, 3], 4)
    assert outputs[3].tolist() == alone([1, 2, 3], 10)
    assert [len(steps) for steps in received] == [0, 4, 0, 10]
    assert_clean(pool)


def test_choose_budget():
    assert choose_budget(8.0, 0.5, 24.0, 8, 808) == 32
    assert choose_budget(8.0, 0.5, 27.9, 8, 808) == 32  # 36 would fit; the multiple below it counts
    assert choose_budget(8.0, 0.5, 27.9, 8, 808, multiple=1) == 39
    assert choose_budget(8.0, 0.1, 8.0 + 0.1 * 48, 8, 808) == 48  # not 40 by rounding
    assert choose_budget(8.0, 0.5, 1e9, 8, 100) == 96
    assert choose_budget(8.0, 0.0, 9.0, 8, 100) == 96  # a step costs the same: no limit is needed
    for max_gap in (0.0, 5.0, 15.9):
        with pytest.raises(ValueError, match="no budget .* 16"):
            choose_budget(8.0, 0.5, max_gap, 8, 808)
    assert choose_budget(8.0, 0.5, float("inf"), 8, 100) == 96
    with pytest.raises(ValueError, match="no budget"):
        choose_budget(8.0, 0.5, 12.0, 8, 808)  # 8 tokens: all of them for those who generate


def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "gaps.png"
    options = ("--quick", "--json", "-", "--plot", figure)
    run = run_script("main_chunked_prefill.py", *options, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert all(report["checks"].values()) and len(report["why"]) == 4
    assert sum("ever paused" in name for name in report["checks"]) >= 2
    budget = report["config"]["budget"]
    rows = {row["method"]: row for row in report["rows"]}
    (events,) = report["sweeps"].values()
    assert [row["method"] for row in events] == list(rows)
    largest = {name: row["largest_step"] for name, row in rows.items()}
    steps = {name: row["n_steps"] for name, row in rows.items()}
    assert f"chunked, {budget} tokens" in steps
    assert largest["prefill first"] == 4 * 48
    assert largest["whole, mixed in"] == 4 * 48 + 8
    assert all(largest[name] <= int(name.split()[1]) for name in largest if name.startswith("chunked"))
    assert steps["chunked, 16 tokens"] > steps["chunked, 64 tokens"] >= steps["whole, mixed in"]
    assert len({row["forward_tokens"] for row in rows.values()}) == 1
    assert [row["baseline"] for row in rows.values()] == [True] + [False] * (len(steps) - 1)
    for row, event in zip(rows.values(), events, strict=True):
        worst = [event[f"worst gap for {n}"] for n in ("1 prompt", "4 prompts")]
        assert row["worst_gap_ms"] == max(worst) >= row["tpot_p99_ms"] >= row["tpot_ms"]
        assert event["latest TTFT"] >= row["ttft_ms"] > 0
    assert figure.stat().st_size > 1000


@pytest.mark.parametrize(
    "option",
    [("--prompt-len", 250), ("--n-tokens", 5), ("--n-tokens", 257), ("--max-gap", -3), ("--max-gap", "nan")],
)
def test_bad_input(distilled_checkpoint, option, monkeypatch, capsys):
    options = [*option, "--checkpoint", distilled_checkpoint]
    error = refusal("main_chunked_prefill.py", options, monkeypatch, capsys)
    assert option[0] in error.splitlines()[-1]
