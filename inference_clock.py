"""The times of a scheduler's requests, taken from outside: a request's TTFT counts from its arrival.

ServingClock takes them, measure_serving() lets several schedulers serve the same work in alternation, and
clock_figures() makes the figures of a row from the clocks of all runs.
"""

import time
from collections import namedtuple
from itertools import pairwise
from statistics import median

from inference_queue import waiting_figures
from inference_utils import synchronize


class ServingClock:
    """with ServingClock(scheduler) as clock: serve(scheduler, requests); then the times of each request.

    All that a step does belongs to it: admission, look-ups, eviction, loading, the forward, the choice of
    tokens. In ms: arrived {request: when it was added}, begun {request: when the step began that ran it
    first}, received {request: [when it got each token]}; steps_ms, total_ms; forward_tokens: those that went
    through the model. observe: a function of the scheduler, whose value in front of every forward is in
    `observed`.
    """

    def __init__(self, scheduler, observe=None):
        self.scheduler, self.observe = scheduler, observe
        self.device = next(scheduler.model.parameters()).device
        self.arrived, self.begun, self.received = {}, {}, {}
        self.steps_ms, self.observed, self.forward_tokens = [], [], 0

    def __enter__(self):
        self._methods = self.scheduler.add, self.scheduler.step
        self.scheduler.add, self.scheduler.step = self._add, self._step
        self._hook = self.scheduler.model.register_forward_pre_hook(self._before_forward)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_):
        self._hook.remove()
        del self.scheduler.add, self.scheduler.step  # the class's own again
        self.total_ms = self._now()

    def _now(self):
        synchronize(self.device)
        return 1000 * (time.perf_counter() - self._start)

    def _before_forward(self, _model, args):
        self.forward_tokens += args[0].numel()
        if self.observe:
            self.observed.append(self.observe(self.scheduler))

    def _add(self, sequence):
        self.arrived[sequence.request] = self._now()
        self._methods[0](sequence)

    def _step(self):
        begin = self._now()
        finished = self._methods[1]()
        end = self._now()
        self.steps_ms.append(end - begin)
        for sequence in [*self.scheduler.running, *finished]:
            self.begun.setdefault(sequence.request, begin)
            tokens = self.received.setdefault(sequence.request, [])
            if len(sequence.ids) - sequence.n_prompt > len(tokens):
                tokens.append(end)
        return finished

    def waits(self, since):
        """{request: ms to its first token} from {request: when}."""
        return {r: tokens[0] - since[r] for r, tokens in self.received.items() if tokens}

    def gaps(self):
        """Times from each token to the next, of all requests."""
        return [b - a for tokens in self.received.values() for a, b in pairwise(tokens)]


Served = namedtuple("Served", "scheduler output clocks")  # of the last run, and the clock of each run


def measure_serving(makers, run, repeats, observe=None):
    """The same work with each scheduler, in alternation: {name: Served}. A warm-up is the caller's.

    Args: makers: {name: function that makes a scheduler with an empty pool}; run: scheduler -> output;
        observe: as in ServingClock.
    """
    served, clocks = {}, {name: [] for name in makers}
    for _ in range(repeats):
        for name, make in makers.items():
            scheduler = make()
            with ServingClock(scheduler, observe) as clock:
                output = run(scheduler)
            clocks[name].append(clock)
            served[name] = Served(scheduler, output, clocks[name])
    return served


def clock_figures(clocks):
    """Figures of a row from the clocks of several runs: TTFT is a request's, from its arrival."""
    speeds = [1000 * sum(map(len, c.received.values())) / c.total_ms for c in clocks]
    figures = waiting_figures([[*c.waits(c.arrived).values()] for c in clocks], [c.gaps() for c in clocks])
    return figures | {
        "tokens_per_s": median(speeds),
        "tokens_per_s_spread": (min(speeds), max(speeds)),
        "forward_tokens": clocks[-1].forward_tokens,
        "n_steps": len(clocks[-1].steps_ms),
    }


def pool_usage(scheduler):
    """(tokens held, tokens reserved, sequences, waiting) of a scheduler over blocks, else None."""
    if not hasattr(scheduler, "pool"):
        return None
    texts, pool = scheduler.running, scheduler.pool
    reserved = (pool.n_blocks - len(pool.free)) * pool.block_size
    return sum(len(sequence.ids) for sequence in texts), reserved, len(texts), len(scheduler.waiting)


def usage_figures(observed):
    """What the reserved room holds, and for how many texts, while requests wait: then memory is the limit.

    observed: of a clock that observed pool_usage, one for each step.
    """
    limited = [usage for usage in observed if usage[3] > 0] or observed
    held, reserved, n_texts, _ = map(sum, zip(*limited, strict=True))
    return {
        "held_share": held / reserved,
        "at_a_time": n_texts / len(limited),
        "mean_length": held / n_texts,
    }
