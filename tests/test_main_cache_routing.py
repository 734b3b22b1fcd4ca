"""Routers and replicas on virtual clocks, by hand and against invariants; the replicas' outputs for real."""

import random

import pytest
import torch
from helpers import random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_routing as routing
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from inference_utils import served_as_alone
from main_cache_routing import (
    CacheAware,
    HashedBeginning,
    KnownPrefixes,
    LeastLoaded,
    Replica,
    RoundRobin,
    make_request,
    serve,
)
from main_prefix_cache import generate_reusing


def request(number, ids, at=0.0, n_new=2, block_size=2):
    return make_request(number, at, ids, n_new, block_size)


def routers(n):
    return [
        RoundRobin(n),
        LeastLoaded(),
        HashedBeginning(n),
        CacheAware(n, 8),
        CacheAware(n, 8, max_difference=float("inf")),
    ]


# What is known


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8))
def test_with_room_the_longest_common_beginning_is_known(texts):
    known, block_size = KnownPrefixes(1000), 2
    for i, text in enumerate(texts):
        keys = request(i, text).keys
        common = max(
            (k for k in range(len(text)) for old in texts[:i] if old[: len(old) - 1][:k] == text[:k]),
            default=0,
        )
        assert known.match(keys) * block_size == min(common, len(text) - 1) // block_size * block_size
        known.insert(keys)


def test_what_was_not_used_for_longest_is_forgotten_first():
    known, (a, b, c) = KnownPrefixes(4), (request(i, [i] * 5).keys for i in range(3))  # 2 blocks each
    for keys in (a, b, a):
        known.insert(keys)
    known.insert(c)  # b has to go
    assert [known.match(keys) for keys in (a, b, c)] == [2, 0, 2]
    known.insert(b[:1])  # the end of a, not its beginning
    assert [known.match(keys) for keys in (a, b, c)] == [1, 1, 2]
    assert len(known.blocks) == 4
    longer = KnownPrefixes(1)
    longer.insert(request(0, [1, 2, 3, 4, 5]).keys)
    assert longer.match(request(1, [1, 2, 3, 4, 5]).keys) == 1  # the beginning is what stays


def test_the_last_token_is_never_found():
    known = KnownPrefixes(9)
    known.insert(request(0, [1, 2, 3, 4]).keys)
    assert known.match(request(1, [1, 2, 3, 4]).keys) == 1  # of two full blocks


# A replica


def test_times_by_hand():
    """t0 = 10, 1 a token. a: 4 tokens at 0, b as long at 1; then both decode; c begins like a."""
    replica = Replica(10.0, 1.0, 100, 2)
    a, b = request(0, [1, 2, 3, 4]), request(1, [5, 6, 7, 8], at=1.0)
    c = request(2, [1, 2, 3, 9], at=100.0)
    assert serve([replica], RoundRobin(1), [a, b, c]) == [0, 0, 0]
    assert replica.received[0] == [14.0, 29.0]  # with b's prompt: 10 + 1 + 4
    assert replica.received[1] == [29.0, 40.0]
    assert replica.n_found == {0: 0, 1: 0, 2: 2}
    assert replica.received[2] == [112.0, 123.0]  # two tokens of its prompt are left
    assert replica.n_computed == 4 + 5 + 1 + 2 + 1


def test_equal_prompts_of_one_step_do_not_find_each_other():
    replica = Replica(1.0, 1.0, 100, 2)
    serve([replica], RoundRobin(1), [request(i, [1, 2, 3, 4, 5]) for i in range(2)])
    assert replica.n_found[0] == 0 and replica.n_found[1] in (0, 4)
    batch = Replica(1.0, 1.0, 100, 2)
    batch.waiting.extend(request(i, [1, 2, 3, 4, 5]) for i in range(3))
    batch.step()
    assert batch.n_found == {0: 0, 1: 0, 2: 0} and batch.n_computed == 15


def test_no_more_run_than_may():
    replica = Replica(1.0, 0.0, 100, 2, max_running=2)
    serve([replica], RoundRobin(1), [request(i, [i, 1]) for i in range(5)])
    assert [replica.received[i][0] for i in range(5)] == [1.0, 2.0, 3.0, 3.0, 5.0] or all(
        b >= a for a, b in zip([1, 1, 3, 3, 5], [replica.received[i][0] for i in range(5)], strict=True)
    )
    assert max(replica.received[4]) >= 6.0


@given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 99))
def test_every_router_serves_each_request_once(n_replicas, n_requests, seed):
    draw = random.Random(seed)
    requests, at = [], 0.0
    for i in range(n_requests):
        at += draw.random() * 5
        requests.append(
            request(i, [draw.randrange(2) for _ in range(draw.randint(1, 9))], at, draw.randint(1, 3))
        )
    for router in routers(n_replicas):
        replicas = [Replica(1.0, 0.5, 8, 2, max_running=2) for _ in range(n_replicas)]
        chosen = serve(replicas, router, requests)
        received = routing.received_by(replicas)
        assert sum(len(replica.received) for replica in replicas) == n_requests == len(chosen)
        for r, i in zip(requests, chosen, strict=True):
            times = replicas[i].received[r.number]
            assert received[r.number] == times and len(times) == r.n_new
            assert times[0] > r.at and times == sorted(times)
            assert replicas[i].n_found[r.number] < r.n_prompt
        found = sum(sum(replica.n_found.values()) for replica in replicas)
        work = sum(r.n_prompt + r.n_new - 1 for r in requests) - found
        assert sum(replica.n_computed for replica in replicas) == work


# Routers


def test_routers_by_hand():
    one, other = request(0, [1] * 9), request(1, [2] * 9)
    turns = RoundRobin(3)
    assert [turns.choose(one, [0, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]
    assert LeastLoaded().choose(one, [2, 1, 1]) == 1
    hashed = HashedBeginning(3)
    assert hashed.choose(one, [9, 9, 9]) == hashed.choose(request(5, [1] * 9 + [7]), [0, 0, 0])
    assert hashed.choose(request(6, [1]), [0, 0, 0]) == 0  # shorter than a block
    assert {hashed.choose(request(i, [i] * 9), [0, 0, 0]) for i in range(30)} == {0, 1, 2}
    aware = CacheAware(3, 100)
    first = aware.choose(one, [0, 0, 0])
    second = aware.choose(other, [0, 0, 0])  # no match: who got the fewest texts
    assert second != first
    assert aware.choose(one, [1, 1, 1]) == first and aware.choose(other, [1, 1, 1]) == second


def test_an_overloaded_replica_is_left_alone_and_the_text_is_known_at_both():
    hot = request(0, [1] * 9)
    for loads, balanced in (
        ([4, 0, 0], False),
        ([5, 0, 0], True),
        ([15, 11, 10], False),
        ([16, 11, 10], True),
    ):
        aware = CacheAware(3, 100)
        assert aware.choose(hot, [0, 0, 0]) == 0
        chosen = aware.choose(hot, loads)
        assert chosen == (loads.index(min(loads)) if balanced else 0)
        if balanced:
            assert aware.known[chosen].match(hot.keys) == aware.known[0].match(hot.keys) == 4
    never = CacheAware(3, 100, max_difference=float("inf"))
    never.choose(hot, [0, 0, 0])
    assert never.choose(hot, [99, 0, 0]) == 0


def test_a_short_match_does_not_count():
    aware = CacheAware(2, 100)
    aware.choose(request(0, [1] * 3 + [2] * 18), [0, 0])
    assert aware.choose(request(1, [1] * 3 + [3] * 18), [0, 0]) == 1  # 1 of 10 blocks
    assert aware.choose(request(2, [1] * 3 + [2] * 8 + [3] * 10), [0, 0]) == 0  # 5 of 10


def test_one_place_for_each_beginning_where_all_do_not_fit():
    """Four beginnings on two replicas with room for two each: each is computed once by who is aware."""
    texts = [[i] * 8 + [9, j] for j in range(6) for i in range(4)]
    draw = random.Random(0)
    draw.shuffle(texts)
    found = {}
    for name, router in (("turns", RoundRobin(2)), ("aware", CacheAware(2, 10))):
        replicas = [Replica(1.0, 0.1, 10, 2) for _ in range(2)]
        serve(replicas, router, [request(i, ids, at=100.0 * i) for i, ids in enumerate(texts)])
        found[name] = sum(sum(replica.n_found.values()) for replica in replicas)
    assert found["aware"] == 8 * 20 > found["turns"]


# Workloads and figures


def test_workloads():
    pieces = [[i] * 200 for i in range(100 + routing.N_GROUPS)]
    for kind in routing.KINDS:
        prompts = routing.draw_prompts(pieces, 88, kind, 3)
        assert len(prompts) == 88 and all(len(ids) == 200 for ids, _ in prompts)
        assert prompts == routing.draw_prompts(pieces, 88, kind, 3)
        assert prompts[:5] == routing.draw_prompts(pieces, 5, kind, 3)
        assert len({ids[-1] for ids, _ in prompts}) == 88  # each ends in its own way
    assert len({ids[0] for ids, _ in routing.draw_prompts(pieces, 88, "nothing shared", 3)}) == 88
    skewed = [ids[0] for ids, _ in routing.draw_prompts(pieces, 88, "skewed", 3)]
    assert max(skewed, key=skewed.count) == 0 and set(skewed) <= set(range(12))
    gaps = [gap for _, gap in routing.draw_prompts(pieces * 50, 4000, "bursts", 3)]
    assert 0.15 < gaps.count(0.0) / 4000 < 0.35 and 0.8 < sum(gaps) / 4000 < 1.2


def test_figures_by_hand():
    replicas = [Replica(10.0, 1.0, 100, 2) for _ in range(2)]
    requests = [
        request(0, [1, 2, 3, 4]),
        request(1, [1, 2, 3, 5], at=30.0),
        request(2, [1, 2, 3, 6], at=60.0),
    ]
    run = replicas, requests, serve(replicas, RoundRobin(2), requests)
    figures = routing.routing_figures([run])
    assert figures["ttft_ms"] == 14_000 and figures["ttft_p90_ms"] == 14_000 and figures["tpot_ms"] == 11_000
    assert figures["found_share"] == pytest.approx(2 / 12)
    assert figures["imbalance"] == pytest.approx(8 / 6.5) and figures["forward_tokens"] == 13
    assert figures["tokens_per_s"] == pytest.approx(6 / 83)
    assert routing.request_seconds(10.0, 1.0, 4, 2, 8) == 5 + 20 / 8


def test_draws_are_compared_one_by_one():
    def run(t0):
        replica, requests = Replica(t0, 1.0, 9, 2), [request(0, [1, 2, 3])]
        serve([replica], RoundRobin(1), requests)
        return [replica], requests, [0]

    slow, fast = run(5.0), run(1.0)
    assert "in each of 2 draws (4000 ms against 8000)" in routing.by_draw("a", "b", [fast] * 2, [slow] * 2)
    assert "in 1 of 2 draws" in routing.by_draw("a", "b", [fast, slow], [slow, fast])
    assert "in none of 2 draws" in routing.by_draw("a", "b", [slow] * 2, [fast, slow])


class Checks:
    def __init__(self):
        self.found = {}

    def check(self, name, passed):
        self.found[name] = passed


def test_checks_see_what_is_wrong():
    def run():
        replicas, requests = [Replica(1.0, 1.0, 9, 2)], [request(i, [1, 2, 3], at=9.0 * i) for i in range(3)]
        return replicas, requests, serve(replicas, RoundRobin(1), requests)

    def checked(*runs):
        report = Checks()
        routing.check_runs(report, "kind", runs)
        return list(report.found.values())

    assert checked(run()) == [True, True]
    lost, early, worked = run(), run(), run()
    del lost[0][0].received[1]
    early[0][0].received[1][0] = 1.0
    worked[0][0].n_computed += 1
    assert [checked(run(), wrong) for wrong in (early, worked)] == [[False, True], [True, False]]
    with pytest.raises(KeyError):
        lost[0][0].received[1]
    assert checked(lost)[0] is False


@torch.no_grad()
def test_real_replicas_give_what_each_request_gets_alone():
    model, prompts = tiny_model(GPTlite_KVCache), random_tokens(5, 9)
    prompts[1:4, :6] = prompts[0, :6].clone()
    outputs = routing.serve_for_real(generate_reusing, model, prompts, [0, 0, 1, 1, 0], 3)
    assert served_as_alone(tiny_model(GPTlite), outputs, [(prompt, 3) for prompt in prompts])


def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "ttft.png"
    options = ["--quick", "--json", "-", "--plot", figure]
    run = run_script("main_cache_routing.py", *options, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr
    assert figure.stat().st_size > 1000 and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    turns, aware = rows["skewed: round robin"], rows["skewed: cache-aware"]
    assert aware["found_share"] > turns["found_share"] and aware["forward_tokens"] < turns["forward_tokens"]
    assert rows["bursts: cache-aware"]["imbalance"] <= rows["bursts: longest match"]["imbalance"]
    for name in ("round robin", "cache-aware", "longest match"):
        assert rows[f"nothing shared: {name}"]["found_share"] == 0


@pytest.mark.parametrize(
    "options", [["--n-tokens", "57"], ["--load", "0.001"], ["--n-replicas", "1001"]], ids=str
)
def test_script_refuses(distilled_checkpoint, options):
    run = run_script("main_cache_routing.py", "--quick", *options, checkpoint=distilled_checkpoint)
    assert run.status == 2 and run.stdout == "" and "replicas" in run.stderr
