"""Cache-aware routing: a request goes to the replica that has computed its beginning, unless it is busy.

Idea: several replicas of a model each have a prefix cache of their own. Sent in turns, requests make every
replica compute every shared beginning, and evict it again where not all fit. A router that remembers what it
sent where takes the replica with the longest match, so each beginning stays in one place. A hot beginning
would then overload its replica: beyond a difference of load the shortest queue is taken instead.

Exact: neither a cache nor the place where a request runs changes an output. Wins where many requests share
beginnings that do not all fit every cache: fewer tokens are computed, so first tokens come sooner. Loses the
look-up where nothing is shared, and some tokens that are computed twice in a burst. What the router remembers
is a guess: it does not see what a replica evicts.

The replicas are simulated on virtual clocks: a step of n tokens takes t0 + slope * n, both measured on this
machine's engine, and the first prompts are served for real. In processes: more/routing_processes.py.

Run: python main_cache_routing.py            (--load 0.5: replicas half as busy)

Source: Zheng et al., SGLang, 2024, and the cache-aware load balancer of its router (release v0.4, 2024);
Srivatsa et al., Preble: Efficient Distributed Prompt Scheduling for LLM Serving, 2024.
"""

from collections import OrderedDict, deque, namedtuple

from gptlite_blocks import block_keys

# at: arrival in s; keys: of the full blocks that can be found, each stands for all the text up to its end
Request = namedtuple("Request", "number at keys n_prompt n_new")


def make_request(number, at, ids, n_new, block_size):
    """A Request for a prompt of these token ids; its last token has to be computed, so no block holds it."""
    return Request(number, at, list(block_keys(ids[:-1], block_size)), len(ids), n_new)


class KnownPrefixes:
    """Which beginnings of texts are known, in blocks; those not used for longest are forgotten first."""

    def __init__(self, n_blocks):
        self.n_blocks, self.blocks = n_blocks, OrderedDict()  # keys, the least recently used first

    def match(self, keys):
        """How many of a text's first blocks are known."""
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def insert(self, keys):
        """A text is known from now on; of its blocks the last one is forgotten first."""
        for key in reversed(keys):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > self.n_blocks:
            self.blocks.popitem(last=False)


class Replica:
    """One engine on a virtual clock: continuous batching, whole prompts, a prefix cache of n_blocks blocks.

    Args: t0, slope: a step of n tokens takes t0 + slope * n seconds; max_running: requests at a time.
    """

    def __init__(self, t0, slope, n_blocks, block_size, max_running=8):
        self.t0, self.slope, self.block_size, self.max_running = t0, slope, block_size, max_running
        self.cache, self.waiting, self.running = KnownPrefixes(n_blocks), deque(), []
        self.now, self.n_computed, self.n_found, self.received = 0.0, 0, {}, {}

    @property
    def load(self):
        return len(self.waiting) + len(self.running)

    def step(self):
        """Admits who fits, and computes their prompts and a token for each of the others."""
        n_new = min(self.max_running - len(self.running), len(self.waiting))
        admitted = [self.waiting.popleft() for _ in range(n_new)]
        for request in admitted:  # before anything of this step is findable
            self.n_found[request.number] = self.cache.match(request.keys) * self.block_size
        n_tokens = len(self.running) + sum(r.n_prompt - self.n_found[r.number] for r in admitted)
        self.now += self.t0 + self.slope * n_tokens
        self.n_computed += n_tokens
        for request in admitted:
            self.cache.insert(request.keys)
        self.running += admitted
        for request in self.running:
            self.received.setdefault(request.number, []).append(self.now)
        self.running = [r for r in self.running if len(self.received[r.number]) < r.n_new]

    def run_until(self, at):
        """Makes all steps that begin before this time; an idle replica waits."""
        while self.load and self.now < at:
            self.step()
        if not self.load and at < float("inf"):
            self.now = max(self.now, at)


# ---- Routers: choose(request, loads) -> number of the replica ----


class RoundRobin:
    """In turns."""

    def __init__(self, n_replicas):
        self.n_replicas, self.turn = n_replicas, -1

    def choose(self, request, loads):
        self.turn = (self.turn + 1) % self.n_replicas
        return self.turn


class LeastLoaded:
    """The shortest queue."""

    def choose(self, request, loads):
        return loads.index(min(loads))


class HashedBeginning:
    """Equal first blocks to equal replicas, whatever their load. n_blocks: how much of a text counts."""

    def __init__(self, n_replicas, n_blocks=2):
        self.n_replicas, self.n_blocks = n_replicas, n_blocks

    def choose(self, request, loads):
        keys = request.keys[: self.n_blocks]
        return int.from_bytes(keys[-1][:8], "big") % self.n_replicas if keys else 0


class CacheAware:
    """The longest match in what was sent to each replica; the shortest queue where loads differ too much.

    Args: n_blocks: how much the router remembers of each replica; threshold: a match counts from this share
        of the prompt on, else the replica that got the fewest texts is taken; max_difference, max_ratio: the
        loads are unbalanced where the largest exceeds the smallest by more than both tell.
    """

    def __init__(self, n_replicas, n_blocks, threshold=0.3, max_difference=4, max_ratio=1.5):
        self.known = [KnownPrefixes(n_blocks) for _ in range(n_replicas)]
        self.threshold, self.max_difference, self.max_ratio = threshold, max_difference, max_ratio

    def choose(self, request, loads):
        matches = [known.match(request.keys) for known in self.known]  # [n_replicas], in blocks
        low, high = min(loads), max(loads)
        if high - low > self.max_difference and high > self.max_ratio * low:
            chosen = loads.index(low)
        elif max(matches) > self.threshold * len(request.keys):
            chosen = matches.index(max(matches))
        else:
            sizes = [len(known.blocks) for known in self.known]
            chosen = min(range(len(loads)), key=lambda i: (sizes[i], loads[i]))  # all are full in the end
        self.known[chosen].insert(request.keys)
        return chosen


def serve(replicas, router, requests):
    """Serves requests in the order of their arrivals; returns the replica's number of each."""
    chosen = []
    for request in requests:
        for replica in replicas:
            replica.run_until(request.at)
        chosen.append(router.choose(request, [replica.load for replica in replicas]))
        replicas[chosen[-1]].waiting.append(request)
    for replica in replicas:
        replica.run_until(float("inf"))
    return chosen


if __name__ == "__main__":
    from functools import partial
    from itertools import accumulate

    import torch

    import inference_report as harness
    import inference_routing as routing
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_kvcache import GPTlite_KVCache
    from gptlite_paged import GPTlite_Paged
    from inference_queue import fit_step
    from inference_utils import served_as_alone, tie_margin
    from main_prefix_cache import generate_reusing

    quick = {"n_requests": 60, "n_tokens": 8, "repeats": 2}
    parser = harness.options(__doc__, 5, quick=quick, n_requests=240, n_tokens=16)
    parser.add_argument("--n-replicas", type=harness.positive_int, default=4, help="engines side by side")
    parser.add_argument(
        "--load", type=harness.positive, default=1.0, help="share of the capacity without caches"
    )
    with harness.script(parser) as args:
        text, n, n_new = harness.load_text(args), args.n_replicas, args.n_tokens
        plain, cached, paged = harness.load_models(args, GPTlite, GPTlite_KVCache, GPTlite_Paged)
        W, T, size, n_blocks = plain.seqlen, 200, 16, 32  # 2 or 3 of 12 beginnings fit a replica's cache
        if T + n_new > W or args.n_requests > 100_000 or n > 1000 or not 0.01 <= args.load <= 100:
            sizes = f"answers of at most {W - T} tokens, 100,000 requests and 1000 replicas"
            raise ValueError(f"{sizes}, and a load of 0.01 to 100")
        pieces = text.prompts(args.n_requests + routing.N_GROUPS, T).tolist()
        config = {"n_replicas": n, "load": args.load}
        report = harness.Report(args, "cache-aware routing", paged, routing.COLUMNS, **config)
        t0, slope = (max(ms, 1e-3) / 1000 for ms in fit_step(paged, 8, T, 3))  # noise may fit less than 0
        rate = n / routing.request_seconds(t0, slope, T, n_new, 8)  # requests per s without any cache
        aware = partial(CacheAware, n, n_blocks)
        routers = {"round robin": partial(RoundRobin, n), "least loaded": LeastLoaded}
        routers |= {"hashed beginning": partial(HashedBeginning, n)}
        routers |= {"longest match": partial(aware, max_difference=float("inf")), "cache-aware": aware}

        def run(make, kind, load, seed):
            prompts = routing.draw_prompts(pieces, args.n_requests, kind, seed)
            arrivals = list(accumulate(gap / (load * rate) for _, gap in prompts))
            asked = enumerate(zip(arrivals, prompts, strict=True))
            requests = [make_request(i, at, ids, n_new, size) for i, (at, (ids, _)) in asked]
            replicas = [Replica(t0, slope, n_blocks, size) for _ in range(n)]
            return replicas, requests, serve(replicas, make(), requests)

        rows, drawn = {}, {}
        for kind in routing.KINDS:
            for name, make in routers.items():
                runs = [run(make, kind, args.load, args.seed + i) for i in range(args.repeats)]
                figures, drawn[kind, name] = routing.routing_figures(runs), runs
                base = name == "round robin"
                rows[kind, name] = report.row(f"{kind}: {name}", baseline=base, **figures)
            routing.check_runs(report, kind, [one for name in routers for one in drawn[kind, name]])

        # The first prompts for real, each behind what its replica has
        prompts = routing.draw_prompts(pieces, 12, "skewed", args.seed)
        prompts = torch.tensor([ids for ids, _ in prompts], device=args.device)  # [12, T]
        chosen = run(aware, "skewed", args.load, args.seed)[2][:12]
        outputs = routing.serve_for_real(generate_reusing, cached, prompts[: len(chosen)], chosen, n_new)
        asked = [(prompt, n_new) for prompt in prompts[: len(chosen)]]
        same = served_as_alone(plain, outputs, asked, tie_margin(args.dtype))
        report.check("behind what its replica has, each prompt gets the tokens it gets alone", same)

        lines, shown = [], ("round robin", "least loaded", "cache-aware")
        for load in sorted({0.4, args.load} if args.quick else {0.4, 0.6, 0.8, 1.0, 1.2, args.load}):
            runs = {name: [run(routers[name], "skewed", load, args.seed)] for name in shown}
            p90 = {name: routing.routing_figures(served)["ttft_p90_ms"] for name, served in runs.items()}
            lines.append({"load": load} | p90)
        title = f"TTFT p90 (ms) by load, skewed; a step of n takes {1000 * t0:.1f} + {1000 * slope:.2f} n ms"
        report.sweep(title, lines)

        aware, texts = "cache-aware", (("skewed", "round robin"), ("bursts", "longest match"))
        for kind, other in (*texts, ("nothing shared", "least loaded")):
            runs = drawn[kind, aware], drawn[kind, other]
            work = words.compare(rows[kind, aware], rows[kind, other], "forward_tokens")
            report.why(words.about(kind, routing.by_draw(aware, other, *runs)) + work)
        report.plot_sweep(title, "TTFT p90 (ms)", "y")
        report.finish()
