"""Products of a decode step: plain, packed and compiled linear layers, from one row to a whole prompt.

Idea: all linear layers of GPTlite multiply 1 row (one sequence), a few (a batch) or many (a prompt). With few
rows a product takes as long as reading the weights, so what counts is how they lie in memory: row by row as
nn.Linear keeps them, in the blocked order of the CPU's matrix kernels (linear_packed.py), or read once by a
compiled sum over products, which needs no order at all but reads the weights again for each further row.

Exact up to rounding. The sum wins with one row and loses from a few on; the blocked order wins between, and
where rows are many every form is bound by computing, so that they come together. Each wins only on CPUs.

Run: python more/linear_packed_study.py

Source: Intel, oneDNN: memory format propagation, 2020; Williams et al., Roofline, 2009 (the bound).
"""

import copy

import torch
from torch import nn

import _root  # noqa: F401 (the files above become importable)
from gptlite_compiled import LinearAsSum
from linear_packed import can_pack, pack_linears


def linear_layers(model):
    """All linear layers of a model, in its order."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def inputs_of(layers, n_rows, seed=0):
    """Random rows for each layer: [n_rows, E_in] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n_rows, layer.in_features, generator=generator) for layer in layers]


@torch.no_grad()
def multiply(layers, inputs):
    """The product of each layer with its rows: a list of [n_rows, E_out]."""
    return [layer(x) for layer, x in zip(layers, inputs, strict=True)]


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite

    quick = {"rows": [1, 8]}
    parser = harness.options(__doc__, dtype=False, data=False, quick=quick)
    parser.add_argument(
        "--rows",
        type=harness.positive_int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64, 128, 256],
        help="numbers of rows to multiply",
    )
    with harness.script(parser) as args, torch.no_grad():
        (model,) = harness.load_models(args, GPTlite, packed=False)
        plain = linear_layers(model)
        if not can_pack(plain[0].weight):
            raise ValueError("this PyTorch or device cannot pack a weight: use --device cpu on x86")
        packed = linear_layers(pack_linears(copy.deepcopy(model)))
        sums = [LinearAsSum(layer) for layer in plain]
        # one graph for all layers; --quick only traces it, since compiling takes longer than the run
        backend = "aot_eager" if args.quick else "inductor"
        compiled = torch.compile(multiply, dynamic=False, fullgraph=True, backend=backend)
        torch._dynamo.config.recompile_limit = 64
        report = harness.Report(args, "products of a decode step", model)
        n_weights = sum(layer.weight.numel() for layer in plain)

        def forms(n):
            x = inputs_of(plain, n)
            found = {"plain": lambda: multiply(plain, x), "packed": lambda: multiply(packed, x)}
            if n <= 8:  # beyond, the weights are read too often
                found["compiled sum"] = lambda: compiled(sums, x)
            return found

        worst = {}
        for n in args.rows:
            for name, function in forms(n).items():
                pairs = zip(function(), multiply(plain, inputs_of(plain, n)), strict=True)
                gap = max((a - b).abs().max().item() for a, b in pairs)
                worst[name] = max(worst.get(name, 0.0), gap)
        for name in ("packed", "compiled sum"):
            report.check(
                f"{name} equals plain (differ by {worst.get(name, 0.0):.0e})", worst.get(name, 0.0) < 1e-3
            )
        title = f"All {len(plain)} products ({n_weights / 1e6:.1f} million weights), ms"
        rows = report.time_sweep(title, "rows", args.rows, forms)
        costs = {n: harness.Cost(2 * n * n_weights, 4 * n_weights) for n in args.rows}
        for row in rows:
            row.setdefault("compiled sum", None)
            row["at least"] = harness.lower_bound_ms(costs[row["rows"]], report.ceilings())
        first, last = rows[0], rows[-1]
        report.why(words.crossover(rows, "rows", "packed", "plain"))
        report.why(words.crossover(rows, "rows", "compiled sum", "packed"))
        for row in (first, last) if len(rows) > 1 else (first,):
            measured = {n: row[n] for n in ("plain", "packed", "compiled sum") if row[n]}
            report.why(words.bounds(measured, dict.fromkeys(measured, costs[row["rows"]]), report.ceilings()))
        report.plot_sweep(title)
        report.finish()
