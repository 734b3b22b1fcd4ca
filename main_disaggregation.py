"""Prefill-decode disaggregation: one process computes prompts, another generates; keys and values move.

Where one process does both, a prompt that arrives makes all who are generating wait. Here a prefill worker
computes prompts and chooses the first token; keys and values of a layer leave while the next layer is
computed, and a decode worker, whose steps hold no prompts, goes on with the text. It gives a credit back for
each text that ends, and the prefill worker starts none without a credit. A text that does not arrive whole is
computed again by the decode worker, that one only.

Exact: what arrives is what was computed, and sampling depends on request and position alone. Wins in the gaps
between tokens. Loses throughput where prompts and answers do not keep both workers busy: replicas that do
both share any load. Loses more the dearer it is to move keys and values against computing them: GPTlite's
take 18 kB a token. Where a prompt costs no more than a decode step, as this model's do on a large GPU, there
are no gaps to win. The transport is gloo between processes of one machine, also for GPUs.

Run: python main_disaggregation.py        (or: torchrun --nproc-per-node 2 main_disaggregation.py)

Source: Zhong et al., DistServe, 2024; Patel et al., Splitwise, 2024; Qin et al., Mooncake, 2025.
"""

import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch

from gptlite_paged import BlockPool, Sequence, choose_tokens
from inference_replicas import receive_tokens, since
from inference_scheduling import PagedScheduler
from inference_transfer import BEGIN, END, LAYER, TOKEN, Receiver, Sender


def missing_positions(n, held):
    """Which tokens of a prompt of n are not among those that the other side holds, as a list."""
    return sorted(set(range(n)) - set(held))


@contextmanager
def after_each_layer(model, function):
    """Inside, function(layer, kv) runs as soon as GPTlite_Paged has computed a block; kv [slots, 2, H, D]."""
    hooks = [
        block.register_forward_hook(lambda _, args, out, layer=layer: function(layer, args[1]))
        for layer, block in enumerate(model.blocks)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class PrefillWorker:
    """Computes prompts, first come, first served; keys and values leave as soon as a layer has them.

    Args: model: GPTlite_Paged; senders: to the decode workers, which take turns; temperature: as in
        choose_tokens; lost: requests of which only the first layer is sent, to see what becomes of them.
    """

    def __init__(self, model, senders, temperature=0.0, lost=()):
        self.model, self.senders, self.temperature, self.lost = model, senders, temperature, lost
        self.pool = BlockPool(model, -(-model.seqlen // 16))  # one text

    def prefill(self, sequence, held=()):
        """The first token of a text; keys and values of all positions but those held go to the decode worker.

        A text that ends with its first token is not sent.
        """
        request, n, pool = sequence.request, len(sequence.ids), self.pool
        sender = self.senders[request % len(self.senders)]
        positions, goes_on = missing_positions(n, held), sequence.end > n + 1
        pool.start(sequence, [], n)
        slots = torch.tensor(pool.slots(sequence.table, 0, n))[positions].to(pool.kv.device)  # [n_rows]

        def send_layer(layer, kv):
            if goes_on and not (layer > 0 and request in self.lost):
                data = kv[slots].cpu()  # [n_rows, 2, H, D], a copy
                sender.send(LAYER, request, layer, 0, len(positions), data=data)

        if goes_on:
            sender.wait()  # for the text before
            sender.take_credit()
            data = torch.tensor(sequence.ids + positions)  # [n + n_rows]
            sender.send(BEGIN, request, n, sequence.end, len(positions), data=data)
        with after_each_layer(self.model, send_layer):
            _, logits = self.model.step(pool, [(sequence, n)])  # [1, V]
        token = choose_tokens(logits, [sequence], self.temperature)[0]
        if goes_on:
            sender.send(TOKEN, request, token)
        pool.drop(sequence)
        return token

    def serve(self, requests, arrivals, clock):
        """Serves requests as they arrive: {request: (prompt and first token, [when it was there])}."""
        answers = {}
        for i in sorted(range(len(requests)), key=lambda i: arrivals[i]):
            prompt, n_tokens = requests[i][0].tolist(), requests[i][1]
            time.sleep(max(arrivals[i] - clock(), 0.0))
            if n_tokens > 0:
                token = self.prefill(Sequence(i, prompt, len(prompt) + n_tokens))
                answers[i] = [*prompt, token], [clock()]
        for sender in self.senders:
            sender.close()
        return answers


class DecodeWorker:
    """Goes on with the texts that arrive; its steps hold no prompts but of those that got lost.

    Args: pool: its memory, with room for all texts that the other side has credits for; receiver: from the
        prefill worker; patience: seconds after which a text of which nothing more comes is computed here.
    held: {request: Sequence with blocks for its prompt}, of texts of which some positions are there already.
    """

    def __init__(self, model, pool, receiver, temperature=0.0, patience=5.0):
        self.pool, self.receiver, self.patience, self.n_layers = pool, receiver, patience, len(model.blocks)
        self.scheduler = PagedScheduler(model, pool, watermark=0.0, temperature=temperature)
        self.arriving, self.held, self.computed_again, self.times = {}, {}, [], {}

    def take(self, message, now):
        """Does what a message says."""
        kind, request, value, end, _, data = message
        text = self.arriving.get(request)  # None for one that is not waited for any more
        if kind == BEGIN:
            sequence = self.held.pop(request, None) or Sequence(request, data[:value].tolist(), end)
            if not sequence.table:
                self.pool.start(sequence, [], value)
            slots = torch.tensor(self.pool.slots(sequence.table, 0, value))[data[value:]]  # [n_rows]
            slots = slots.to(self.pool.kv.device)
            text = self.arriving[request] = SimpleNamespace(sequence=sequence, slots=slots, layers=set())
        elif kind == LAYER and text:
            self.pool.kv[value].flatten(0, 1)[text.slots] = data.to(self.pool.kv.device)
            text.layers.add(value)
        elif kind == TOKEN and text and len(text.layers) == self.n_layers:
            sequence = self.arriving.pop(request).sequence
            sequence.done = sequence.n_prompt
            sequence.ids.append(value)  # chosen by the prefill worker, and there only
            self.scheduler.running.append(sequence)
            self.times[request] = [now]
        elif kind == TOKEN and text:
            self.compute(request)
        if text:
            text.until = now + self.patience

    def compute(self, request):
        """Computes a text here that did not arrive whole; its tokens came with the first message."""
        sequence = self.arriving.pop(request).sequence
        self.pool.drop(sequence)
        self.scheduler.add(sequence)
        self.computed_again.append(request)

    def serve(self, clock):
        """Generates until the prefill worker has ended: {request: (token ids, [when each was there])}."""
        scheduler, answers, more = self.scheduler, {}, True
        while more or self.arriving or scheduler.running or scheduler.waiting:
            busy = scheduler.running or scheduler.waiting
            if message := self.receiver.get(0.0 if busy else self.patience / 4):
                self.take(message, clock())
                more = message.kind != END
                continue  # all messages first
            for request in [r for r, text in self.arriving.items() if text.until < clock()]:
                self.compute(request)
            if busy:
                for sequence in receive_tokens(scheduler, self.times, clock):
                    answers[sequence.request] = sequence.ids, self.times[sequence.request]
                    self.receiver.give_credit()
        self.receiver.close()
        return answers


def serve_disaggregated(team, requests, arrivals, start, n_slots, temperature=0.0, lost=()):
    """Rank 0 computes the prompts, the others generate. To be run on all ranks; see serve_merged.

    Args: n_slots: texts at a time on each of the others; lost: as in PrefillWorker.
    """
    model, clock = team.kept.model, partial(since, start)
    if team.rank == 0:
        senders = [Sender(team, rank, n_slots) for rank in range(1, team.world_size)]
        return PrefillWorker(model, senders, temperature, lost).serve(requests, arrivals, clock)
    pool = BlockPool(model, n_slots * -(-model.seqlen // 16))
    receiver = Receiver(team, 0, pool.kv.shape[3:], pool.kv.dtype)
    return DecodeWorker(model, pool, receiver, temperature).serve(clock)


if __name__ == "__main__":
    import inference_replicas as replicas
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_paged import GPTlite_Paged
    from inference_distributed import Ranks, add_world_size, collective_ms

    quick = {"n_requests": 4, "batch_size": 2}
    parser = harness.options(__doc__, repeats=1, batch_size=8, n_requests=20, quick=quick)
    add_world_size(parser)
    with harness.script(parser) as args:
        W = args.world_size
        if W < 2:
            raise ValueError("--world-size 1: prompts and answers need a process each, so 2 at least")
        text = harness.load_text(args)
        plain, paged = harness.load_models(args, GPTlite, GPTlite_Paged, packed=False)
        report = harness.Report(args, "prefill-decode disaggregation", paged, replicas.COLUMNS, text=text)
        both, split, shapes = f"{W} replicas", "split", [(160, 16), (64, 64), (16, 160)]
        ways = {
            both: (replicas.serve_replica, {}),
            f"{both}, chunks": (replicas.serve_replica, {"budget": 32}),
        }
        ways[split] = serve_disaggregated, {}
        workloads = {
            f"{T} + {n}": replicas.draw_workload(text, args.n_requests, T, n, args.seed)
            for T, n in ([(48, 8)] if args.quick else shapes)
        }
        with Ranks(W, "cpu") as team:
            team.run(replicas.keep_model, paged, args.device)
            loads = (0.5,) if args.quick else (0.5, 0.8)
            rows = replicas.compare_ways(report, team, plain, ways, workloads, loads, args.batch_size)
            serve, requests = partial(replicas.serve_merged, team), [*workloads.values()][-1]
            work = requests, [0.0] * len(requests), args.batch_size
            team.reset_counts()
            whole, _ = serve(serve_disaggregated, *work)
            kv = BlockPool(paged, 1, 1).kv[:, 0, 0]  # of one token: [L, 2, H, D]
            moved = [len(prompt) for prompt, n in requests if n > 1]
            kv_bytes = sum(moved) * kv.nbytes
            about = 40 * (len(moved) * (len(kv) + 2) + W - 1) + 16 * sum(moved)  # headers, ids and positions
            right = team.sent_bytes["send"] == kv_bytes + about
            name = (
                f"of {sum(moved)} tokens of prompts {kv.nbytes} bytes each are sent, and {about} about them"
            )
            report.check(name, right)
            again, _ = serve(serve_disaggregated, *work, lost=(1,))
            report.check("a text whose keys and values get lost has the same tokens", again == whole)
            lines = []
            for T in (16, 64) if args.quick else (16, 64, 160, 256):
                prompt = text.prompts(1, T)[0].cpu()  # [T]
                _, ((ready,),) = serve(serve_disaggregated, [(prompt, 1)], [0.05], 1)
                ms = team.run(collective_ms, "send", T * kv.nbytes // 4)
                lines.append({"tokens": T, "computing": 1000 * (ready - 0.05), "moving": ms})
                lines[-1] |= {"MB": T * kv.nbytes / 1e6, "GB/s": T * kv.nbytes / ms / 1e6}
            report.sweep("A prompt, its keys and values: time (ms)", lines)

        for T, n in ([] if args.quick else shapes[::2]) or [(48, 8)]:
            ours, base = rows[f"{T} + {n}", split], rows[f"{T} + {n}", both]
            report.why(words.compare(ours, base, "tpot_p99_ms") + words.compare(ours, base, "tokens_per_s"))
        chunks = rows[f"{T} + {n}", f"{both}, chunks"]
        report.why(words.compare(ours, chunks, "tpot_p99_ms") + words.compare(ours, chunks, "ttft_ms"))
        report.why(words.crossover(lines, "tokens", "moving", "computing"))
        report.plot_sweep("A prompt, its keys and values: time (ms)", names=["computing", "moving"])
        report.finish()
