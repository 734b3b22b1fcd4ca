"""Requests for several replicas, and the figures of a run: waiting, what was found, how even the load was.

A run is (replicas that have served, their requests, the replica's number of each). Replicas have n_computed
tokens, n_found {request: tokens} and received {request: [when it got each token, in s]}.
"""

import random
from statistics import median

import torch

import inference_words as words
from gptlite_kvcache import common_length
from inference_queue import waiting_figures
from inference_utils import percentile

COLUMNS = {
    "ttft_p90_ms": ("TTFT p90", "{:.0f}"),
    "found_share": ("found", "{:.0%}"),
    "imbalance": ("max/mean load", "{:.2f}"),
}
KINDS = ("skewed", "bursts", "nothing shared")
N_GROUPS, N_BURST = 12, 12  # shared beginnings; requests of a burst


def draw_prompts(pieces, n_requests, kind, seed):
    """Prompts of 200 token ids, and the gaps before them in units of the mean gap: [(ids, gap)].

    Args: pieces: n_requests + N_GROUPS texts [200]; kind: "skewed": 160 tokens of one of twelve texts, the
        r-th most wanted with weight 1 / r, then 40 of their own; "bursts": the same, but about each fourth
        request belongs to a burst of twelve with the first text; "nothing shared". Gaps are exponential.
    """
    draw, prompts = random.Random(seed), []
    groups, weights = pieces[:N_GROUPS], [1 / rank for rank in range(1, N_GROUPS + 1)]
    while len(prompts) < n_requests:
        n = N_BURST if kind == "bursts" and draw.random() < 0.025 else 1
        group = groups[0] if n > 1 else draw.choices(groups, weights)[0]
        gap = n * draw.expovariate(1.0)  # a burst is waited for as long: the rate stays the same
        for _ in range(min(n, n_requests - len(prompts))):
            own = pieces[N_GROUPS + len(prompts)]
            ids = own if kind == "nothing shared" else group[:160] + own[160:]
            prompts.append((ids, gap))
            gap = 0.0
    return prompts


def request_seconds(t0, slope, n_prompt, n_new, n_running):
    """What a request takes of a busy replica that finds nothing and shares each step among n_running."""
    return slope * (n_prompt + n_new - 1) + t0 * n_new / n_running


def routing_figures(runs):
    """Figures of a row from the runs of several draws."""
    ttft, gaps, speeds, found, uneven = [], [], [], [], []
    for replicas, requests, _ in runs:
        received = received_by(replicas)
        ttft.append([1000 * (received[r.number][0] - r.at) for r in requests])
        gaps.append(
            [1000 * (b - a) for times in received.values() for a, b in zip(times, times[1:], strict=False)]
        )
        end = max(times[-1] for times in received.values())
        speeds.append(sum(map(len, received.values())) / (end - requests[0].at))
        work = [replica.n_computed for replica in replicas]
        uneven.append(max(work) * len(work) / sum(work))
        n_found = sum(sum(replica.n_found.values()) for replica in replicas)
        found.append(n_found / sum(r.n_prompt for r in requests))
    speeds.sort()
    return waiting_figures(ttft, gaps) | {
        "ttft_p90_ms": percentile([ms for run in ttft for ms in run], 90),
        "tokens_per_s": speeds[len(speeds) // 2],
        "tokens_per_s_spread": (speeds[0], speeds[-1]),
        "forward_tokens": sum(replica.n_computed for replica in runs[-1][0]),
        "found_share": sum(found) / len(found),
        "imbalance": sum(uneven) / len(uneven),
    }


def by_draw(one, other, runs, others):
    """In how many draws the median TTFT of one router is lower than another's; runs of the same draws."""
    pairs = [
        [1000 * median(received_by(run[0])[r.number][0] - r.at for r in run[1]) for run in both]
        for both in zip(runs, others, strict=True)
    ]
    n, wins = len(pairs), sum(a < b for a, b in pairs)
    a, b = (median(column) for column in zip(*pairs, strict=True))
    figures = f"({a:.0f} ms against {b:.0f})"
    return words.choose(
        wins / n,
        (1, f"The median TTFT of {one} is lower than that of {other} in each of {n} draws {figures}."),
        (1e-9, f"The median TTFT of {one} is lower than that of {other} in {wins} of {n} draws {figures}."),
        f"The median TTFT of {one} is lower than that of {other} in none of {n} draws {figures}.",
    )


def as_simulated(rows):
    """How near a simulation is to what processes do, from rows with figures of both."""
    ratios = [row["ttft_ms"] / row["predicted_ms"] for row in rows]
    off = max(abs(row["found_share"] - row["predicted_found"]) for row in rows)
    times = f"{min(ratios):.2f} to {max(ratios):.2f}"
    figures = f"(TTFT {times} times the simulated, shares found differ by {off:.0%} at most)"
    return words.choose(
        max(*ratios, 1 / min(ratios)),
        (1.5, f"The simulation is far from what the processes do {figures}."),
        f"The simulation is near what the processes do {figures}.",
    )


def moved(n_requests):
    """What became of the requests of a replica that died."""
    return words.choose(
        n_requests,
        (2, f"{n_requests} requests of the replica that died went to the others."),
        (1, "One request of the replica that died went to another."),
        "The replica that died had no requests.",
    )


def received_by(replicas):
    """{request: [when it got each token]} of all replicas."""
    return {number: times for replica in replicas for number, times in replica.received.items()}


def check_runs(report, kind, runs):
    """Adds checks: every request is served, once, after its arrival, and what is found is not computed."""
    once, counted = True, True
    for replicas, requests, _ in runs:
        received = received_by(replicas)
        n_served = sum(len(replica.received) for replica in replicas)
        once &= n_served == len(requests) and all(
            len(received[r.number]) == r.n_new and received[r.number][0] > r.at for r in requests
        )
        n_found = sum(sum(replica.n_found.values()) for replica in replicas)
        work = sum(r.n_prompt + r.n_new - 1 for r in requests) - n_found
        counted &= sum(replica.n_computed for replica in replicas) == work
    report.check(f"{kind}: each request gets its tokens, once, after it has come", once)
    report.check(f"{kind}: a token that is found is one computed less", counted)


@torch.no_grad()
def serve_for_real(generate, model, prompts, chosen, n_new):
    """Serves prompts one after the other behind what their replicas have: a list of texts [T + n_new].

    Args: generate: generate_reusing (main_prefix_cache.py); model: GPTlite_KVCache; prompts [N, T]; chosen:
        the replica's number of each. Every replica has the keys and values of the prompts it has served.
    """
    held, outputs = {i: [] for i in chosen}, []
    for prompt, i in zip(prompts, chosen, strict=True):
        ids = prompt.tolist()
        best = max(held[i], key=lambda one: common_length(one[0], ids), default=([], None))
        outputs.append(generate(model, prompt[None], n_new, model.seqlen, *best)[0])
        held[i].append((ids, model(prompt[None])[1]))
    return outputs
