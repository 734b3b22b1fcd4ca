"""A decode step compiled, and what smaller weights buy it.

Idea: a step of one sequence should take as long as reading the weights does, but some 400 small calls of
Python and PyTorch cost more than that. torch.compile fuses them into a few kernels. Three things make that
fast on a CPU: nothing is written inside the step (it attends to the past and to the new token apart, and
returns the new keys and values), a product of one row is a sum that the compiler fuses with reading the
weight, and the past is a view of the next multiple of 64 rows. Recorded instead: more/kvcache_graph.py.

Exact up to rounding with 32-bit weights; weights of 16 and 8 bits are cast while they are read, approximate,
with their loss. Wins where a step is short against its calls: small models, few sequences. Loses the time to
compile, once for each batch size and each view of the cache, and gains little where the products are large.

Run: python more/kvcache_compiled.py

Source: Ansel et al., PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and
Graph Compilation, 2024; Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

import copy
import math

import torch
from torch import nn

import _root  # noqa: F401 (the files above become importable)
from linear_packed import LinearInGraph, can_pack, pack_linears


class LinearAsSum(nn.Module):
    """A linear layer as products and a sum, [B, E_in] -> [B, E_out]: for one row, compiled.

    The weight is kept in dtype: float32, bfloat16, or int8 with a scale for each output. Compiled, it is cast
    while it is read, so half or a quarter of the bytes are read; the sum is in float32.
    """

    def __init__(self, linear, dtype=torch.float32):
        super().__init__()
        weight, self.bias = linear.weight.detach(), linear.bias  # [E_out, E_in]
        self.scale = None
        if dtype == torch.int8:
            self.scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127  # [E_out]
            weight = (weight / self.scale[:, None]).round()
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)  # [E_out, E_in]

    def forward(self, x):
        out = (self.weight.float() * x[:, None]).sum(dim=-1)  # [B, E_out]
        return (out if self.scale is None else out * self.scale) + self.bias

    def as_linear(self):
        """nn.Linear with the weights as they are read, for texts of many tokens."""
        linear = nn.Linear(self.weight.shape[1], self.weight.shape[0])
        weight = self.weight.detach().float()  # [E_out, E_in]
        linear.weight.data = weight if self.scale is None else weight * self.scale[:, None]
        linear.bias.data = self.bias.detach()
        return linear


def replace_linears(model, make, kind=nn.Linear):
    """A copy of the model with make(layer) in the place of every linear layer of this kind."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, kind):
                setattr(module, name, make(child))
    return model


def decode_step(model, x, k, v, position, window):
    """One token a sequence, over a past that it only reads.

    Args: x: token ids [B]; k, v: the first n rows of a StaticKVCache [L, B, H, n, D], n at least the tokens
        that are cached, or all; position: how many tokens were read before, int64 [1] for all sequences
        alike, or [B]; window: rows in all.
    Returns: logits [B, V]; keys and values of the new tokens [L, B, H, D].
    """
    B, n = len(x), k.shape[3]
    rows = torch.arange(n, device=x.device)  # [n]
    position = position[:, None]  # [1 or B, 1]
    visible = (rows < position) & (rows != position % window)  # the new token takes the place of the oldest
    x = model.token_embedding(x) + model.position_embedding(position[:, 0].clamp(max=window - 1))  # [B, E]
    keys, values = [], []
    for layer, block in enumerate(model.blocks):
        mha, h = block.mha, block.ln1(x)  # [B, E]
        shape = (B, mha.n_heads, mha.d_head)
        Q, K, V = (proj(h).view(shape) for proj in (mha.query_proj, mha.key_proj, mha.value_proj))
        past = (k[layer] * Q[:, :, None]).sum(dim=-1) / math.sqrt(mha.d_head)  # [B, H, n]
        own = (K * Q).sum(dim=-1, keepdim=True) / math.sqrt(mha.d_head)  # [B, H, 1]
        past = past.masked_fill(~visible[:, None], float("-inf"))  # [B, H, n]
        largest = torch.maximum(past.amax(dim=-1, keepdim=True), own)  # [B, H, 1]
        past, own = torch.exp(past - largest), torch.exp(own - largest)  # [B, H, n], [B, H, 1]
        seen = v[layer].masked_fill(~visible[:, None, :, None], 0.0)  # a row without a token may hold NaN
        out = (past[..., None] * seen).sum(dim=-2) + own * V  # [B, H, D]
        out = out / (past.sum(dim=-1, keepdim=True) + own)  # [B, H, D]
        x = x + mha.out_proj(out.flatten(1))  # [B, E]
        x = x + block.ffwd(block.ln2(x))  # [B, E]
        keys.append(K)
        values.append(V)
    return model.fc_out(model.ln(x)), torch.stack(keys), torch.stack(values)


class CompiledStep(nn.Module):
    """The decode step compiled, for a StaticKVCache: (token ids [B, 1], cache) -> (logits [B, 1, V], cache).

    Args: model: GPTlite_StaticKVCache with ordinary linear layers; batch_size: decides the form of its
        products; dtype: of the weights (with one row); bucket: the past that is read is a multiple of it;
        backend: of torch.compile; None runs the step as it is written.
    """

    def __init__(self, model, batch_size, dtype=torch.float32, bucket=64, backend="inductor"):
        super().__init__()
        weight = model.fc_out.weight
        if weight.is_cpu and weight.dtype == torch.float32:
            if batch_size == 1:
                model = replace_linears(model, lambda linear: LinearAsSum(linear, dtype))
            elif can_pack(weight):
                model = replace_linears(model, LinearInGraph)
        self.model, self.batch_size, self.bucket = model, batch_size, bucket
        self.step = decode_step
        if backend:
            torch._dynamo.config.recompile_limit = 64  # a graph for each view of the cache and each form
            self.step = torch.compile(decode_step, fullgraph=True, dynamic=False, backend=backend)

    @torch.no_grad()
    def forward(self, x, kv_cache):
        kv_cache.check_fits(self.model, self.batch_size)
        if x.shape != (self.batch_size, 1):  # others would be cut off, or broadcast over the cache
            raise ValueError(f"made for {self.batch_size} sequences and one token, not {list(x.shape)}")
        length, window = kv_cache.length, kv_cache.window
        n = min(-(-max(length, 1) // self.bucket) * self.bucket, window)  # rows of the view
        position = torch.tensor([length], device=x.device)  # [1]
        k, v = kv_cache.k[:, :, :, :n], kv_cache.v[:, :, :, :n]  # [L, B, H, n, D]
        logits, K, V = self.step(self.model, x[:, 0].contiguous(), k, v, position, window)
        kv_cache.k[:, :, :, length % window], kv_cache.v[:, :, :, length % window] = K, V
        kv_cache.advance(1)
        return logits[:, None], kv_cache  # [B, 1, V]


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
    from inference_report import Method
    from inference_utils import Timer, parameters_of, weight_bytes
    from main_kvcache import generate_kvcache, generate_static

    sizes = {"batch_size": 8, "prompt_len": 64, "n_tokens": 64}
    quick = {"batch_size": 2, "prompt_len": 8, "n_tokens": 6}  # within one view: one graph a method
    parser = harness.options(__doc__, quick=quick, **sizes)
    parser.add_argument("--peers", action="store_true", help="add transformers' generate and engines")
    columns = {"weights_mb": ("weights MB", "{:.1f}"), "compile_s": ("compile s", "{:.0f}")}
    with harness.script(parser) as args:
        text = harness.load_text(args)
        if args.prompt_len + args.n_tokens > 257:
            raise ValueError("--prompt-len and --n-tokens: 257 tokens at most, the last of which is not read")
        cached, static = harness.load_models(args, GPTlite_KVCache, GPTlite_StaticKVCache)
        (ordinary,) = harness.load_models(args, GPTlite_StaticKVCache, packed=False)
        hide = ("forward_tokens", "n_parameters")
        report = harness.Report(args, "compiled decode steps", static, columns, hide, text)
        whole_mb = weight_bytes(static) / 1e6
        backend = None if args.quick else "inductor"  # compiling alone takes longer than a quick run

        def compiled(name, B, dtype):
            """A Method whose steps are compiled, with the time that took and the loss of its weights."""
            step, buffers = CompiledStep(ordinary, B, dtype, backend=backend), StaticKVCache(static, B)
            with Timer(args.device) as timer:
                generate_static(static, text.prompts(B, args.prompt_len), args.n_tokens, buffers, step)
            as_read = replace_linears(step.model, LinearAsSum.as_linear, LinearAsSum)
            figures = report.loss_figures(pack_linears(as_read), static)
            figures |= {"compile_s": timer.seconds, "weights_mb": weight_bytes(step) / 1e6}
            how = {"exact": dtype == torch.float32, "steps": [static, step]}
            return Method(name, generate_static, static, buffers, step, **how, **figures)

        tables = {}
        for B in sorted({1, args.batch_size}):
            methods = [Method("static", generate_static, static, StaticKVCache(static, B))]
            methods.append(Method("dynamic", generate_kvcache, cached))
            methods.append(compiled("compiled", B, torch.float32))
            if B == 1 and args.device.type == "cpu" and args.dtype == torch.float32:
                methods.append(compiled("compiled, bfloat16 weights", B, torch.bfloat16))
                methods.append(compiled("compiled, int8 weights", B, torch.int8))
            if args.peers:
                from gptlite_opt import generate_opt, opt_from_gptlite
                from inference_engines import engine_methods

                methods.append(
                    Method(
                        "transformers",
                        generate_opt,
                        pack_linears(opt_from_gptlite(ordinary)),
                        None,
                        loss=False,
                    )
                )
                methods += engine_methods(args, ordinary)
            tables[B] = report.compare(text.prompts(B, args.prompt_len), args.n_tokens, *methods)

        p, n = parameters_of(static), args.prompt_len + args.n_tokens // 2
        cost = harness.forward_cost(p, text.vocab_size, 1, 1, n - 1, args.dtype)
        one, many = tables[1], tables[args.batch_size]
        saved = {}
        for name in one:
            n_bytes = cost.n_bytes + 1e6 * (one[name].get("weights_mb", whole_mb) - whole_mb)
            saved[name] = harness.Cost(cost.flops, n_bytes)
        report.why_step({name: saved[name] for name in one if name.startswith(("static", "compiled"))}, one)
        report.why(
            words.compare(one["compiled"], one["static"]) + words.compare(many["compiled"], many["static"])
        )
        smallest = one.get("compiled, int8 weights", one["compiled"])
        report.why(words.compare(smallest, one["compiled"]) + words.loss(smallest))
        gain = (one["static"]["tpot_ms"] or 0) - (one["compiled"]["tpot_ms"] or 0)
        report.why(words.pays_back(1000 * one["compiled"]["compile_s"], gain, "ms", "tokens"))
        report.plot_steps([f"{name}, batch 1" for name in one])
        report.finish()
