"""Quantised weights: int8 with a scale for each output, int4 with a scale and a zero for groups of inputs.

A decode step of few sequences takes as long as reading the weights does, so smaller weights make it shorter.
Each weight becomes the nearest of the points of a grid: 255 of them for int8, where one scale an output can
be taken out of the sum; 16 for int4, too few for a whole row, so that each group of inputs has a grid of its
own. Two of int4's codes lie in a byte and are unpacked while they are read (linear_quantized.py).

Approximate. Wins memory on every machine, and time where few rows meet every weight and the product unpacks
what it reads. Loses time where an unpacked copy is written first, which moves more bytes than without
quantisation, and where many rows (a prompt, a large batch) make a step wait for computing. Embeddings stay as
they are, the head has 8 bits throughout. A loss hardly tells methods of 4 bits apart, since some guesses
become better by chance: compare their KL divergence from the model they stand for. Better than rounding to
the nearest: more/quantization_gptq.py and its neighbours.

Run: python main_quantization.py

Source: Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference, 2018; Dettmers and Zettlemoyer, The case for 4-bit precision, 2023 (groups).
"""

from collections import namedtuple
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from gptlite_compiled import replace_linears
from linear_quantized import constant, fast_form, pack_int4, unpack_int4

Grid = namedtuple("Grid", "scale zero")  # of each group: a weight is code * scale + zero; zero may be None


def in_groups(weight, n_groups):
    """[O, I] -> [O, n, I / n], in float32 at least."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)).unflatten(1, (n_groups, -1))


def grid_of(weight, n_bits, group=None, symmetric=True):
    """The grid that holds all weights of each group of inputs, in 16 bits.

    Args: weight [O, I]; n_bits: 2 to 8; group: inputs of a grid, None for a whole row; symmetric: as many
        points above 0 as below, else from the smallest to the largest weight.
    Returns: Grid of scale and zero [O, I / group], zero None if symmetric. Raises ValueError for others.
    """
    n_in, half = weight.shape[1], 2 ** (n_bits - 1)
    group = group or n_in
    if not 2 <= n_bits <= 8 or n_in % group:
        raise ValueError(f"{n_bits} bits in groups of {group} of {n_in} inputs: 2 to 8, and whole groups")
    groups = in_groups(weight, n_in // group)  # [O, n, group]
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)  # [O, n]
    if symmetric:
        zero, scale = None, torch.maximum(high, -low) / (half - 1)
    else:  # the zero in 16 bits first: the scale is as large as this zero then needs
        zero = (low + (high - low) * half / (2 * half - 1)).bfloat16()
        scale = torch.maximum((high - zero) / (half - 1), (zero - low) / half)
    return Grid(scale.clamp(min=1e-12).bfloat16(), zero)  # nothing but zeros: not 0 / 0


def round_to(weight, grid, n_bits):
    """The codes of the points nearest to weights [O, I], int8 [O, I]: at most half a scale away."""
    half = 2 ** (n_bits - 1)
    groups = in_groups(weight, grid.scale.shape[1])  # [O, n, group]
    if grid.zero is not None:
        groups = groups - grid.zero[..., None]
    codes = (groups / grid.scale[..., None]).round()
    return codes.clamp(1 - half if grid.zero is None else -half, half - 1).to(torch.int8).flatten(1)


def dequantize(codes, grid):
    """The weights that codes [O, I] stand for, float32 [O, I]."""
    groups = in_groups(codes, grid.scale.shape[1]) * grid.scale.float()[..., None]  # [O, n, group]
    return (groups if grid.zero is None else groups + grid.zero.float()[..., None]).flatten(1)


def nearest(weight, n_bits, group=None, symmetric=True):
    """A weight [O, I] at the nearest points of its grid, still of its own type."""
    grid = grid_of(weight, n_bits, group, symmetric)
    return dequantize(round_to(weight, grid, n_bits), grid).to(weight.dtype)


class LinearInt8(nn.Module):
    """nn.Linear with a weight of int8 [O, I], a scale for each output [O, 1]: unpacked, then multiplied."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.state_dict()["weight"]  # [O, I], also of a packed layer
        grid = grid_of(weight, 8)
        self.weight, self.scale = constant(round_to(weight, grid, 8)), constant(grid.scale)
        self.bias = linear.bias

    def dense(self):
        """The weight as it is read, float32 [O, I]."""
        return dequantize(self.weight, Grid(self.scale, None))

    def forward(self, x):
        return F.linear(x, self.dense().to(x.dtype), self.bias)  # [..., I] -> [..., O]


class LinearInt4(LinearInt8):
    """nn.Linear with two codes in a byte [O, n, group / 2], scale and zero of each group [O, n]."""

    def __init__(self, linear, group=64):
        nn.Module.__init__(self)
        weight, self.group, self.bias = linear.state_dict()["weight"], group, linear.bias  # [O, I]
        grid = grid_of(weight, 4, group, symmetric=False)
        codes = round_to(weight, grid, 4)  # [O, I]
        self.weight = constant(pack_int4(codes.unflatten(1, (-1, group))))  # [O, n, group / 2]
        self.scale, self.zero = map(constant, grid)

    def codes(self):
        return torch.cat(unpack_int4(self.weight), dim=-1)[..., : self.group].flatten(1)  # [O, I]

    def dense(self):
        return dequantize(self.codes(), Grid(self.scale, self.zero))


QUANTIZED = (LinearInt8, LinearInt4)


def quantize_model(model, n_bits, group=64):
    """A copy of a model whose linear layers have 8 or 4 bits, the head 8, all of them in the naive form."""
    head = LinearInt8(model.fc_out)
    model = replace_linears(model, LinearInt8 if n_bits == 8 else partial(LinearInt4, group=group))
    model.fc_out = head
    return model


def use_fast_forms(model, n_rows):
    """A copy of a quantised model whose layers are fast for so many rows."""
    return replace_linears(model, partial(fast_form, n_rows=n_rows), QUANTIZED)


def bits_per_weight(model):
    """What a weight of a quantised model's layers takes, its share of scales and zeros counted."""
    layers = [module for module in model.modules() if isinstance(module, QUANTIZED)]
    n_bytes = sum(p.nbytes for layer in layers for name, p in layer.named_parameters() if name != "bias")
    return 8 * n_bytes / sum(layer.dense().numel() for layer in layers)


if __name__ == "__main__":
    import inference_agreement as study
    import inference_report as harness
    import inference_words as words
    from gptlite_compiled import CompiledStep
    from gptlite_kvcache import GPTlite_StaticKVCache, StaticKVCache
    from inference_report import Method
    from inference_utils import TOLERANCE, Timer, first_of, parameters_of, weight_bytes
    from main_kvcache import generate_static

    sizes = {"batch_size": 8, "prompt_len": 72, "n_tokens": 56}  # one view of the cache, so one graph each
    quick = {"batch_size": 2, "prompt_len": 16, "n_tokens": 6}
    parser = harness.options(__doc__, 3, dtype=False, quick=quick, **sizes)
    columns = {"weights_mb": ("weights MB", "{:.1f}"), "bits": ("bits", "{:.2f}"), **study.COLUMNS}
    columns |= {"compile_s": ("compile s", "{:.0f}")}
    with harness.script(parser) as args:
        text = harness.load_text(args)
        (static,) = harness.load_models(args, GPTlite_StaticKVCache)
        (ordinary,) = harness.load_models(args, GPTlite_StaticKVCache, packed=False)
        hide = ["ttft_ms", "tpot_p99_ms", "tokens_per_s", "peak_memory_mb"]
        hide += ["kv_bytes_per_token", "forward_tokens", "n_parameters"]
        report = harness.Report(args, "quantised weights", static, columns, hide, text)
        p, B, backend = parameters_of(static), args.batch_size, None if args.quick else "inductor"
        tokens = text.prompts(1 if args.quick else 16, p.seqlen)  # [N, T], for the divergence
        naive = {"int8": quantize_model(ordinary, 8)}
        groups = [n for n in (32, 64, 128) if p.d_model % n == 0]
        naive |= {f"int4 g{n}": quantize_model(ordinary, 4, n) for n in groups}
        fast = {"int8, compiled": dict.fromkeys((1, B), use_fast_forms(naive["int8"], 1))}
        fast["int4 g64, compiled"] = {n: use_fast_forms(naive["int4 g64"], n) for n in (1, B)}

        def figures(name, model):
            found = {"weights_mb": weight_bytes(model) / 1e6, "bits": bits_per_weight(naive[name])}
            return found | study.agreement(model, static, tokens)

        def compiled(name, model, n, **more):
            step, buffers = CompiledStep(model, n, backend=backend), StaticKVCache(static, n)
            run = static if model is ordinary else model  # reads the prompt
            with Timer(args.device) as timer:
                generate_static(run, text.prompts(n, args.prompt_len), args.n_tokens, buffers, step)
            more |= {"exact": model is ordinary, "steps": [run, step], "compile_s": timer.seconds}
            return Method(name, generate_static, run, buffers, step, **more)

        tables, whole_mb = {}, weight_bytes(ordinary) / 1e6
        for n in sorted({1, B}):
            cache = StaticKVCache(static, n)
            methods = [Method("float32", generate_static, static, cache, weights_mb=whole_mb)]
            methods.append(compiled("float32, compiled", ordinary, n, weights_mb=whole_mb))
            for name in ("int8", "int4 g64"):
                found, label, how = figures(name, naive[name]), f"{name}, naive", {"exact": False}
                methods.append(Method(label, generate_static, naive[name], cache, loss=False, **how, **found))
            for name, models in fast.items():
                found = figures(name.partition(",")[0], models[n])
                methods.append(compiled(name, models[n], n, **found))
            tables[n] = report.compare(text.prompts(n, args.prompt_len), args.n_tokens, *methods)
        rows = {64: tables[1]["int4 g64, compiled"]}
        for n in groups[::2]:
            name, model = f"int4 g{n}", naive[f"int4 g{n}"]
            found = report.loss_figures(model, static) | figures(name, model)
            rows[n] = report.row(name, same_output="approximate", **found)
        n_layers = sum(isinstance(module, nn.Linear) for module in ordinary.modules())
        found = [sum(isinstance(m, QUANTIZED) for m in model.modules()) for model in naive.values()]
        report.check(f"all {n_layers} linear layers hold integers", {*found} == {n_layers})
        for (name, models), twin in zip(fast.items(), (naive["int8"], naive["int4 g64"]), strict=True):
            expected = first_of(twin(tokens[:1]))  # [1, T, V]
            for n, model in models.items():  # as far as the 16-bit inputs of torch's kernels allow
                logits, gap = first_of(model(tokens[:1])), TOLERANCE[torch.bfloat16]
                report.check_close(f"{name}, batch {n}: as naive", logits, expected, gap)
        one, many = tables[1], tables[B]
        cost = harness.forward_cost(p, 96, 1, 1, args.prompt_len + args.n_tokens // 2, args.dtype)
        saved = {k: cost.n_bytes + 1e6 * (r["weights_mb"] - whole_mb) for k, r in one.items()}
        timed = ("float32", "float32, compiled", *fast)
        report.why_step({k: harness.Cost(cost.flops, saved[k]) for k in timed}, one)
        small, smaller = fast
        for table in (one, many):
            against = words.compare(table[small], table["float32, compiled"])
            report.why(against + words.compare(table[smaller], table[small]))
        report.why(words.loss(rows[64]) + study.closer(rows[64], rows[32]))
        points = {k: (r["weights_mb"], r["tpot_ms"]) for k, r in one.items()}
        report.plot_points(points, "weights (MB)", "TPOT, batch 1 (ms)")
        report.finish()
