"""Continuous batching whose steps are one compiled graph over all slots.

Idea: between two arrivals the batch does not change its shape: one token for each slot. That is the decode
step of kvcache_compiled.py, with a place in the text for each slot instead of one for all, so it can be
compiled once for each multiple of 64 rows of the cache. Steps that take in newcomers run as they are written:
prompts have any length, and a graph for each would not pay.

Exact up to rounding. Wins where steps are short against their calls: small models, few slots, long answers.
Loses the time to compile, once; empty slots are computed along; and where many requests come with short
answers, most steps have newcomers in them and nothing is gained.

Run: python more/continuous_compiled.py            (--longest 256 has longer answers)

Source: Yu et al., Orca, 2022 (steps of any requests); Ansel et al., PyTorch 2, 2024 (compilation).
"""

from torch import nn

import _root  # noqa: F401 (the files above become importable)
from gptlite_compiled import compiled, decode_step, packed_in_graph, rows_to_read


class CompiledSlots(nn.Module):
    """GPTlite_Slots whose steps without newcomers are one graph, for gptlite_slots.SlotBatch.

    Args: model: GPTlite_Slots with ordinary linear layers; bucket: the past that is read is a multiple of it;
        backend: of torch.compile; None runs the step as it is written.
    """

    def __init__(self, model, bucket=64, backend="inductor"):
        super().__init__()
        self.model = packed_in_graph(model)
        self.seqlen, self.blocks, self.bucket = model.seqlen, self.model.blocks, bucket
        self.token_embedding, self.position_embedding = model.token_embedding, model.position_embedding
        self.step = compiled(decode_step, backend)

    def forward(self, tokens, step, k, v):
        """Token ids [N] and the cache k, v [L, slots, H, S, D], written in place -> logits [B, V]."""
        if step.prompts:
            return self.model(tokens, step, k, v)
        n, n_slots, window = len(tokens), k.shape[1], k.shape[3]
        x, positions = tokens.new_zeros(2, n_slots)  # [slots] each; at position 0 an empty slot sees nothing
        x[:n], positions[:n] = tokens, step.positions
        rows = rows_to_read(step.n_keys, self.bucket, window)
        past = k[:, :, :, :rows], v[:, :, :, :rows]  # [L, slots, H, rows, D]
        logits, K, V = self.step(self.model, x, *past, positions, window)  # [slots, V], [L, slots, H, D]
        k[:, step.slots, :, step.positions] = K[:, :n].transpose(0, 1)  # [n, L, H, D]
        v[:, step.slots, :, step.positions] = V[:, :n].transpose(0, 1)
        return logits[:n]


if __name__ == "__main__":
    import inference_queue as queueing
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_slots import GPTlite_Slots, SlotBatch
    from inference_queue import Way
    from inference_utils import Timer, parameters_of
    from main_continuous_batching import continuous_batching_kvcache as serve

    sizes = {"batch_size": 8, "n_requests": 48, "longest": 128}
    parser = harness.options(__doc__, repeats=3, quick={"n_requests": 6, "longest": 16}, **sizes)
    columns = queueing.COLUMNS | {"compile_s": ("compile s", "{:.0f}")}
    with harness.script(parser) as args:
        text, B = harness.load_text(args), args.batch_size
        plain, slots = harness.load_models(args, GPTlite, GPTlite_Slots)
        (ordinary,) = harness.load_models(args, GPTlite_Slots, packed=False)
        requests = queueing.draw_requests(args, text, plain.seqlen)
        report = harness.Report(args, "compiled continuous batching", plain, columns, text=text)
        graphs = CompiledSlots(ordinary, backend=None if args.quick else "inductor")
        with Timer(args.device) as timer:  # each view of the cache that these requests need
            serve(graphs, requests, B, plain.seqlen)
        buffers = SlotBatch(slots, B, plain.seqlen)
        ways = [
            Way("one at a time", serve, slots, 1, buffers=buffers),
            Way("continuous", serve, slots, B, buffers=buffers),
            Way("continuous, compiled", serve, graphs, B, buffers=buffers),
        ]
        rows = queueing.compare_queue(report, plain, requests, ways)
        _, eager, ours = rows.values()
        served_s = sum(n for _, n in requests) / ours["tokens_per_s"]
        ours["compile_s"] = max(timer.seconds - served_s, 0.0)  # what the first time takes longer
        report.why(words.compare(ours, eager, "tokens_per_s") + words.compare(ours, eager, "ttft_ms"))
        report.why(words.compare(ours, eager) + words.compare(ours, eager, "tpot_p99_ms"))
        saved = (eager["tpot_ms"] or 0) - (ours["tpot_ms"] or 0)
        report.why(words.pays_back(1000 * ours["compile_s"], saved, "ms", "steps"))
        n_past = int(sum(len(prompt) + n / 2 for prompt, n in requests) / len(requests))
        cost = harness.forward_cost(parameters_of(plain), text.vocab_size, B, 1, n_past, args.dtype)
        report.why_step({row["method"]: cost for row in (eager, ours)}, rows)
        points = {name: (row["tpot_ms"], row["tokens_per_s"]) for name, row in rows.items()}
        report.plot_points(points, "time per token (ms)", "tokens/s", f"{len(requests)} requests")
        report.finish()
