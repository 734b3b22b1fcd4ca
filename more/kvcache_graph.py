"""A decode step recorded as a CUDA graph: one launch replaces more than a hundred.

Idea: on a GPU the kernels of a small decode step take less time than starting them from Python one by one. A
CUDA graph records them once and replays them with one call. It repeats the same kernels on the same
addresses, so all shapes are fixed: the step reads the whole window of the cache and masks what is not there.

Exact. Wins where the launches take longer than the kernels: small models, few sequences, fast GPUs. Loses
where the kernels are long (large models, large batches), since it reads the empty rows of the window too, and
memory: a graph keeps its own. One graph serves one batch size and one cache. Needs CUDA.

Run: python more/kvcache_graph.py

Source: Gray, Getting Started with CUDA Graphs (NVIDIA), 2019; Ng and others, Accelerating PyTorch with CUDA
Graphs (PyTorch), 2021.
"""

import torch
from torch import nn

import _root  # noqa: F401 (the files above become importable)
from gptlite_compiled import decode_step


class CudaGraphStep(nn.Module):
    """The decode step recorded once as a CUDA graph over one StaticKVCache: a replay is one launch.

    A graph repeats the same kernels on the same addresses, so token and position go into fixed buffers, and
    what comes out is copied. Raises ValueError for another cache or batch than those it was recorded for.
    """

    def __init__(self, model, kv_cache):
        super().__init__()
        device, B = kv_cache.k.device, kv_cache.k.shape[1]
        self.model, self.kv_cache = model, kv_cache
        self.x = torch.zeros(B, dtype=torch.int64, device=device)  # [B]
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # [1]
        self.before = torch.cuda.memory_allocated()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up outside the recording
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.reset_peak_memory_stats()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.run()  # [B, V]
        self.workspace_bytes = torch.cuda.max_memory_allocated() - self.before  # its pool, which stays taken

    @torch.no_grad()
    def run(self):
        k, v, window = self.kv_cache.k, self.kv_cache.v, self.kv_cache.window
        logits, K, V = decode_step(self.model, self.x, k, v, self.position, window)
        row = self.position % window  # [1]
        k.index_copy_(3, row, K[:, :, :, None])
        v.index_copy_(3, row, V[:, :, :, None])
        return logits  # [B, V]

    def forward(self, x, kv_cache):
        if kv_cache is not self.kv_cache or x.shape != (len(self.x), 1):
            raise ValueError(f"recorded for {len(self.x)} sequences and one cache: record another graph")
        self.x.copy_(x[:, 0])
        self.position.fill_(kv_cache.length)
        self.graph.replay()
        kv_cache.advance(1)
        return self.logits[:, None].clone(), kv_cache  # [B, 1, V]


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
    from inference_report import Method
    from inference_utils import Timer, parameters_of
    from main_kvcache import generate_kvcache, generate_static

    sizes = {"batch_size": 8, "prompt_len": 64, "n_tokens": 64}
    parser = harness.options(__doc__, quick={"batch_size": 2, "n_tokens": 6}, **sizes)
    columns = {"record_s": ("record s", "{:.2f}")}
    with harness.script(parser) as args:
        if args.prompt_len + args.n_tokens > 257:
            raise ValueError("--prompt-len and --n-tokens: 257 tokens at most, the last of which is not read")
        text = harness.load_text(args)
        cached, static = harness.load_models(args, GPTlite_KVCache, GPTlite_StaticKVCache)
        if args.device.type != "cuda":
            raise ValueError("a CUDA graph needs CUDA; more/kvcache_compiled.py runs on a CPU")
        report = harness.Report(args, "recorded decode steps", static, columns, ("forward_tokens",), text)
        tables = {}
        for B in sorted({1, args.batch_size}):
            buffers = StaticKVCache(static, B)
            with Timer(args.device) as timer:
                graph = CudaGraphStep(static, buffers)
            how = {"steps": [static, graph], "record_s": timer.seconds}
            tables[B] = report.compare(
                text.prompts(B, args.prompt_len),
                args.n_tokens,
                Method("static", generate_static, static, StaticKVCache(static, B)),
                Method("dynamic", generate_kvcache, cached),
                Method("CUDA graph", generate_static, static, buffers, graph, **how),
            )
        p, n = parameters_of(static), args.prompt_len + args.n_tokens // 2
        cost = harness.forward_cost(p, text.vocab_size, 1, 1, n - 1, args.dtype)
        one, many = tables[1], tables[args.batch_size]
        report.why_step({"static": cost, "CUDA graph": cost}, one)
        report.why(words.compare(one["CUDA graph"], one["static"]))
        report.why(words.compare(many["CUDA graph"], many["static"]))
        gain = (one["static"]["tpot_ms"] or 0) - (one["CUDA graph"]["tpot_ms"] or 0)
        report.why(words.pays_back(1000 * one["CUDA graph"]["record_s"], gain, "ms", "tokens"))
        report.plot_steps([f"{name}, batch 1" for name in one])
        report.finish()
