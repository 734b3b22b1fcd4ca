"""Methods that keep something from call to call, such as caches of a service, measured side by side.

measure_calls() makes every call with each method in turn, in alternation, with a clock of its own;
generation_figures() makes the figures of a row from calls that generate text. replay() asks caches of answers
a stream of questions and counts what is found, what is found wrongly, and what it costs.
"""

from collections import namedtuple
from functools import partial
from statistics import median

from inference_cost import Cost, forward_cost
from inference_queue import waiting_figures
from inference_utils import Timer, parameters_of, percentile

Calls = namedtuple("Calls", "values runs")  # what the last run's calls gave, and the clocks of each run


def measure_calls(makers, n_calls, repeats, clock=Timer):
    """The same calls with each method, call by call in alternation: {name: Calls}. A warm-up is the caller's.

    Args: makers: {name: function that makes an iterator, whose every next() is a call}: with nothing kept
        from the run before; clock: function that makes a clock for one call.
    """
    measured = {name: Calls(None, []) for name in makers}
    for _ in range(repeats):
        calls = {name: (make(), [], []) for name, make in makers.items()}
        for _ in range(n_calls):
            for iterator, values, clocks in calls.values():
                with clock() as one:
                    values.append(next(iterator))
                clocks.append(one)
        for name, (_, values, clocks) in calls.items():
            measured[name] = Calls(values, [*measured[name].runs, clocks])
    return measured


def generation_figures(runs, n_tokens):
    """Figures of a row from the StepClocks of calls, a list for each run, that generate n_tokens each.

    The TTFT of a call counts from its beginning: look-ups and eviction are part of it.
    """
    first = [[clock.steps_ms[0] for clock in clocks] for clocks in runs]
    later = [[ms for clock in clocks for ms in clock.steps_ms[1:]] for clocks in runs]
    speeds = [1000 * n_tokens * len(clocks) / sum(clock.total_ms for clock in clocks) for clocks in runs]
    return waiting_figures(first, later) | {
        "tokens_per_s": median(speeds),
        "tokens_per_s_spread": (min(speeds), max(speeds)),
        "forward_tokens": sum(clock.forward_tokens for clock in runs[-1]),
    }


# ---- Caches of answers ----

THRESHOLD = 0.8719  # what more/semantic_threshold.py chooses on its pairs: 95% right hits when confirmed

STREAM_COLUMNS = {
    "hit_rate": ("hits", "{:.1%}"),
    "exact_rate": ("exact", "{:.1%}"),
    "precision": ("right hits", "{:.1%}"),
    "recall": ("recall", "{:.1%}"),
    "wrong_per_thousand": ("wrong/1000", "{:.1f}"),
    "latency_ms": ("mean ms", "{:.1f}"),
    "hit_p50_ms": ("hit p50 ms", "{:.2f}"),
    "hit_p99_ms": ("hit p99 ms", "{:.2f}"),
    "time_saved": ("time saved", "{:.1%}"),
}


def answer_cost(model, n_prompt, n_tokens, dtype):
    """Cost of an answer of n_tokens tokens: the question at once, then a token a step, with a KV cache."""
    steps = [(n_prompt, 0), *((1, n_past) for n_past in range(n_prompt, n_prompt + n_tokens - 1))]
    sizes = parameters_of(model), model.fc_out.out_features, 1
    return Cost(*map(sum, zip(*(forward_cost(*sizes, *step, dtype) for step in steps), strict=True)))


def no_cache():
    """The baseline of replay(): every question goes to the model."""
    return lambda query, generate_fn: (generate_fn(query), 0.0, False)


def exact_match():
    """What a semantic cache stands beside: the same words only, at no cost."""
    answers = {}  # query -> answer

    def cache(query, generate_fn):
        hit = query in answers
        if not hit:
            answers[query] = generate_fn(query)
        return answers[query], float(hit), hit

    return cache


def replay(makers, stream, meaning, answer_ms, repeats=1):
    """Asks several caches all questions of a stream, in alternation: {name: figures of a row}.

    The model is made to give what stands for its answer, so that a wrong answer is seen, and every miss is
    charged the time that GPTlite takes for an answer: it only continues text, and stands in, by its time,
    for a model that can answer.

    Args: makers: {name: function that makes an empty cache, (query, generate_fn) -> (answer, similarity,
        hit)}; meaning: {question: what stands for its answer}; answer_ms: the time of an answer.
    Figures: precision: share of the hits that are right; recall: right hits among the questions whose answer
        was asked for earlier in the stream; latency_ms: mean over the questions, time of the cache included.
    """

    def ask(make):
        cache = make()
        return (cache(query, meaning.get) for query in stream)

    measured = measure_calls({n: partial(ask, make) for n, make in makers.items()}, len(stream), repeats)
    n_known = len(stream) - len({meaning[query] for query in stream})
    rows = {}
    for name, (values, runs) in measured.items():
        right = [answer == meaning[query] for query, (answer, *_) in zip(stream, values, strict=True)]
        hits = [hit for *_, hit in values]
        n_right_hits = sum(hit and ok for hit, ok in zip(hits, right, strict=True))
        charged = answer_ms * (len(hits) - sum(hits))
        latency = [(sum(clock.ms for clock in clocks) + charged) / len(stream) for clocks in runs]
        hit_ms = [c.ms for clocks in runs for c, hit in zip(clocks, hits, strict=True) if hit]
        rows[name] = {
            "hit_rate": sum(hits) / len(stream),
            "precision": n_right_hits / sum(hits) if any(hits) else None,
            "recall": n_right_hits / n_known if n_known else None,
            "wrong_per_thousand": 1000 * (len(stream) - sum(right)) / len(stream),
            "latency_ms": median(latency),
            "latency_ms_spread": (min(latency), max(latency)),
            "hit_p50_ms": percentile(hit_ms, 50) if hit_ms else None,
            "hit_p99_ms": percentile(hit_ms, 99) if hit_ms else None,
            "time_saved": 1 - median(latency) / answer_ms if hit_ms else None,
        }
    return rows
