"""Sparsity and time: why scattered zeros save none, from where on they do, and what 2:4 is for.

A matrix product multiplies zeros like other numbers. To skip them they must not be stored: compressed rows
(CSR) keep a column number beside each weight, and gather one input a weight instead of streaming through
all; 2:4 keeps two of every four, so that two bits tell which, and tensor cores skip the others. Exact: all
forms of one matrix give the same outputs. Measured: the sparsity from which CSR is faster, and the model.

Run: python main_sparsity_speed.py        (2:4 products need CUDA and --dtype float16 or bfloat16)

Source: Mishra et al., Accelerating Sparse Deep Neural Networks, 2021 (2:4); Gale et al., Sparse GPU Kernels
for Deep Learning, 2020 (where unstructured sparsity pays).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from main_sparsity import linear_layers


class CSRLinear(nn.Module):
    """A linear layer that stores and multiplies only the weights that are not zero, as compressed rows."""

    def __init__(self, linear):
        super().__init__()
        csr = linear.weight.detach().to_sparse_csr()
        self.shape = csr.shape
        # 32-bit numbers: half of the bytes of torch's default
        self.register_buffer("row_starts", csr.crow_indices().int())  # [out + 1]
        self.register_buffer("columns", csr.col_indices().int())  # [n_kept]
        self.register_buffer("values", csr.values())  # [n_kept]
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())  # [out]

    def forward(self, x):
        W = torch.sparse_csr_tensor(self.row_starts, self.columns, self.values, self.shape)
        out = (W @ x.flatten(0, -2).T).T  # [N, out]
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], -1)


def check_2_4(W):
    """Raises ValueError unless every four neighbours of W [out, in] along the inputs hold two zeros."""
    if W.shape[1] % 4:
        raise ValueError(f"2:4 takes inputs by fours, which {W.shape[1]} are not")
    if ((W.reshape(-1, 4) != 0).sum(dim=1) > 2).any():
        raise ValueError("this matrix was never pruned to 2:4: compressing it would lose weights")


def compress_2_4(W):
    """A 2:4 matrix [out, in] as its kept weights [out, in / 2] and their places, two bits each.

    Returns: values and places, uint8 [out * in / 8, rounded up]. Raises ValueError as check_2_4 does.
    """
    check_2_4(W)
    fours = W.reshape(-1, 4)  # [R, 4]
    # the weights that are not zero first, then the others, each in their order
    places = (fours == 0).byte().argsort(dim=1, stable=True)[:, :2].sort(dim=1).values  # [R, 2]
    values = fours.gather(1, places).view(len(W), -1)  # [out, in / 2]
    places = F.pad(places.flatten(), (0, -places.numel() % 4)).view(-1, 4)  # four of them fill a byte
    weights = torch.tensor([1, 4, 16, 64], device=W.device)  # [4]
    return values, (places * weights).sum(dim=1).to(torch.uint8)


def decompress_2_4(values, places):
    """The matrix [out, in] that compress_2_4 was given, bit for bit (a -0.0 among the zeros becomes 0.0)."""
    shifts = torch.tensor([0, 2, 4, 6], device=values.device)  # [4]
    places = (places[:, None].long() >> shifts & 3).flatten()[: values.numel()].view(-1, 2)  # [R, 2]
    fours = values.new_zeros(len(places), 4).scatter_(1, places, values.reshape(-1, 2))  # [R, 4]
    return fours.view(len(values), -1)  # [out, in]


class SemiStructuredLinear(nn.Module):
    """A linear layer with 2:4 weights, multiplied by the sparse tensor cores of an NVIDIA GPU.

    Raises ValueError as check_2_4 does, and RuntimeError from torch where there is no such product.
    """

    def __init__(self, linear):
        super().__init__()
        check_2_4(linear.weight)
        self.weight = torch.sparse.to_sparse_semi_structured(linear.weight.detach().contiguous())
        self.register_buffer("packed", self.weight.packed)  # the same memory, so that it is counted
        self.register_buffer("meta", self.weight.meta)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())  # [out]

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def replace_linears(model, make):
    """Puts make(layer) in the place of every linear layer of the blocks; returns the model."""
    for name, layer in linear_layers(model.blocks).items():
        model.blocks.set_submodule(name, make(layer))
    return model


def break_even(sparsities, ratios):
    """The sparsity where times over dense times fall below 1 for good, between the measured ones; or None."""
    if ratios[-1] >= 1:
        return None
    last = max((i for i, ratio in enumerate(ratios) if ratio >= 1), default=None)
    if last is None:
        return sparsities[0]
    share = (ratios[last] - 1) / (ratios[last] - ratios[last + 1])
    return sparsities[last] + share * (sparsities[last + 1] - sparsities[last])


if __name__ == "__main__":
    import copy
    import warnings

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import GPTlite_KVCache
    from main_kvcache import generate_kvcache
    from main_sparsity import prune_magnitude

    warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    warnings.filterwarnings("ignore", message="The PyTorch API of SparseSemiStructuredTensor")
    parser = rep.options(__doc__, repeats=3)
    parser.add_argument("--prompt-len", type=rep.positive_int, default=64, help="tokens of the prompt")
    parser.add_argument("--n-tokens", type=rep.positive_int, help="new tokens (default 128, quick 8)")
    with rep.script(parser) as args, torch.no_grad():
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        n_tokens, calls = args.n_tokens or (8 if quick else 128), 8 if quick else 20
        sparsities = [0.5, 0.9, 0.99] if quick else [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99]
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        prompt = utils.sample_prompts(valid_data, 1, args.prompt_len).to(dev)  # [1, T]
        dense = utils.load_model(GPTlite_KVCache, vocab_size, args.checkpoint).to(dev, args.dtype)
        sizes = {"batch_size": 1, "prompt_len": args.prompt_len, "n_tokens": n_tokens}
        columns = {"weights_mb": ("weights MB", "{:.1f}"), "same_as": ("same logits as", "{}")}
        report = rep.Report(args, "sparsity and time", dense, columns, **sizes)
        report.columns.pop("same_output")
        tolerance, reasons = utils.TOLERANCE[args.dtype], {}

        def prune(module, sparsity):
            for layer in linear_layers(module).values():
                layer.weight.copy_(prune_magnitude(layer.weight, None, sparsity, "row"))
            return module

        def attempt(name, function, *inputs):
            """function(*inputs), or None, with the reason kept, where torch has no such product."""
            try:
                return function(*inputs)
            except RuntimeError as error:  # also where torch has no kernel for it
                reasons[name] = " ".join(str(error).split())[:160]

        # One matrix: the first layer of every MLP in turn, as in a model
        def products(layers, x):
            return [layer(x) for layer in layers]

        def csr_products(linears, x):
            layers = [CSRLinear(layer) for layer in linears]
            return layers, products(layers, x)

        def time_of(layers, x):
            """Microseconds of one product."""
            ms = utils.median_ms(lambda: [products(layers, x) for _ in range(calls)], 5, dev)
            return 1000 * ms / (calls * len(layers))

        originals = [block.ffwd.net[0] for block in dense.blocks]
        n_out, n_in = originals[0].weight.shape
        table, ratios, largest = [], {1: [], 64: []}, 0.0
        inputs = {N: torch.randn(N, n_in, device=dev).to(args.dtype) for N in ratios}  # [N, in]
        time_of(originals, inputs[1])  # the first products are slow
        for sparsity, (N, x) in ((s, pair) for s in sparsities for pair in inputs.items()):
            linears = [prune(copy.deepcopy(layer), sparsity) for layer in originals]
            sparse, found = attempt("CSR", csr_products, linears, x) or (None, None)
            if sparse is None:
                break
            pairs = zip(found, products(linears, x), strict=True)
            largest = max(largest, *(utils.largest_difference(*pair) for pair in pairs))
            row = {"zeros": f"{sparsity:.0%}", "tokens": N}
            row |= {"dense us": time_of(linears, x), "CSR us": time_of(sparse, x)}
            row |= {"CSR / dense": row["CSR us"] / row["dense us"]}
            row |= {"dense MB": utils.model_size_mb(linears[0]), "CSR MB": utils.model_size_mb(sparse[0])}
            ratios[N].append(row["CSR / dense"])
            table.append(row)
        if table:
            report.sweep(f"A product with a matrix {n_out} x {n_in}", table)
            report.check(f"CSR: same outputs as dense (differ by {largest:.0e})", largest <= tolerance)

        # The model
        def replaced(model, make):
            model = replace_linears(copy.deepcopy(model), make)
            model(prompt)
            return model

        models = {"dense": (dense, None)}  # (model, the one whose logits it must give)
        forms = {"50% zeros": (0.5, "CSR", CSRLinear), "95% zeros": (0.95, "CSR", CSRLinear)}
        forms["2:4"] = ("2:4", "packed", SemiStructuredLinear)
        for name, (sparsity, form, make) in forms.items():
            model = copy.deepcopy(dense)
            prune(model.blocks, sparsity)
            models[name] = (model, None)
            other = attempt(form, replaced, model, make)
            if other is not None:
                models[f"{name}, {form}"] = (other, name)
        methods = [
            utils.Method(name, lambda m=m: generate_kvcache(m, prompt, n_tokens, p.seqlen), [m])
            for name, (m, _) in models.items()
        ]
        results = utils.measure(methods, n_tokens, args.repeats)
        for name, run, (model,), _ in methods:
            same_as, peak = models[name][1], utils.peak_memory_mb(run, model, inputs=[prompt])
            figures = {"peak_memory_mb": peak, "weights_mb": utils.model_size_mb(model), "same_as": same_as}
            figures["same_output"] = None if model is dense else "approximate"
            report.row(name, results[name], baseline=model is dense, **figures)
            if same_as:
                off = utils.largest_difference(model(prompt)[0], models[same_as][0](prompt)[0])
                report.check(f"{name}: same logits as {same_as} (differ by {off:.0e})", off <= tolerance)

        weights = [layer.weight.data for layer in linear_layers(models["2:4"][0].blocks).values()]
        packed = [compress_2_4(W) for W in weights]
        whole = all(torch.equal(decompress_2_4(*pair), W) for pair, W in zip(packed, weights, strict=True))
        report.check("2:4: decompressing returns every matrix bit for bit", whole)
        n_dense = sum(W.nbytes for W in weights)
        n_packed = sum(part.nbytes for pair in packed for part in pair)

        limits = rep.measure_ceilings(dev, args.dtype)
        step = rep.forward_cost(p, vocab_size, 1, 1, args.prompt_len, args.dtype)
        least, tpot = rep.lower_bound_ms(step, limits), results["dense"].tpot_ms or 0
        report.why(
            f"A step reads {step.n_bytes / 1e6:.0f} MB and computes {step.flops / 1e6:.0f} MFLOP, zeros or "
            f"not: at least {least:.2f} ms here ({rep.share_of(least, tpot)} reached). A weight has to be "
            "read to know that it is zero, and looking would cost more than multiplying."
        )
        if table:
            places = {N: break_even(sparsities, r) for N, r in ratios.items()}
            found = ", ".join(
                f"{place:.0%} zeros with {N} token{'s'[: N > 1]}" if place else f"never with {N} tokens"
                for N, place in places.items()
            )
            size, speed = args.dtype.itemsize, {name: results[name].tokens_per_s for name in models}
            at_90 = next(row for row in table if row["tokens"] == 1 and row["zeros"] == "90%")
            report.why(
                f"CSR takes {size} + 4 bytes a kept weight against {size}, which is smaller from "
                f"{4 / (size + 4):.0%} zeros on, and is as fast at {found}. At 90% and one token it stores "
                f"{at_90['CSR MB'] / at_90['dense MB']:.2f} of the bytes and takes "
                f"{at_90['CSR / dense']:.2f} of the time: each weight looks up its own input, where a dense "
                "row multiplies many neighbours at once."
            )
            half, most = (speed[f"{zeros} zeros, CSR"] / speed["dense"] for zeros in ("50%", "95%"))
            report.why(
                f"In the model CSR gives {half:.2f} times the tokens/s of dense at 50% zeros and {most:.2f} "
                "times at 95%; what so many zeros cost in loss, see main_sparsity.py."
            )
        missing = f" Multiplied dense here: {reasons['packed']}" if "packed" in reasons else ""
        report.why(
            f"2:4 packs the blocks' weights to {n_packed / n_dense:.4f} of their bytes ({n_dense / 1e6:.1f} "
            f"to {n_packed / 1e6:.1f} MB): two values of four, two bits each to place them.{missing}"
        )
        if "CSR" in reasons:
            report.why(f"No CSR product for {report.data['config']['dtype']} here: {reasons['CSR']}")
        if args.plot and table:
            figure, axes = rep.new_figure()
            for N, values in ratios.items():
                axes.plot([100 * s for s in sparsities], values, marker="o", label=f"tokens: {N}")
            axes.axhline(1, color="0.5", linewidth=1, label="dense")
            axes.set(xlabel="zeros (%)", ylabel="time of CSR over dense", yscale="log")
            axes.set_title(f"A matrix {n_out} x {n_in}, {report.data['config']['device_name']}")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
