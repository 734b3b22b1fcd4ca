"""Sparsity and time: why scattered zeros save none, from where on they do, and what 2:4 is for.

A matrix product multiplies zeros like other numbers: a weight has to be read to know that it is zero, and
looking costs more than multiplying. To skip zeros they must not be stored. Compressed rows (CSR) keep a
column number beside each weight, and gather one input a weight instead of streaming through all; 2:4 keeps
two of every four, so that two bits tell which, and the tensor cores of an NVIDIA GPU skip the others.

Exact: all forms of one matrix give the same outputs (the zeros themselves are approximate: main_sparsity.py).
CSR wins memory from half zeros on (4 + 4 bytes a kept float32), and time only where nearly all are zero, for
many tokens earlier than for one; below that it loses. 2:4 packs weights to little more than half anywhere,
and saves time on a GPU alone.

Run: python more/sparsity_speed.py        (2:4 products need CUDA and --dtype float16 or bfloat16)

Source: Mishra et al., Accelerating Sparse Deep Neural Networks, 2021 (2:4); Gale et al., Sparse GPU Kernels
for Deep Learning, 2020 (where unstructured sparsity pays).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import _root  # noqa: F401 (the files above become importable)
from inference_calibration import linear_layers
from main_sparsity import prune_magnitude


class CSRLinear(nn.Module):
    """A linear layer that stores and multiplies only the weights that are not zero, as compressed rows."""

    def __init__(self, linear):
        super().__init__()
        csr = linear.weight.detach().to_sparse_csr()
        self.out_features, self.in_features = csr.shape
        # 32-bit numbers: half of the bytes of torch's default
        self.register_buffer("row_starts", csr.crow_indices().int())  # [out + 1]
        self.register_buffer("columns", csr.col_indices().int())  # [n_kept]
        self.values = nn.Parameter(csr.values(), requires_grad=False)  # [n_kept]
        bias = linear.bias
        self.bias = (
            None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        )  # [out]

    def forward(self, x):
        """[..., in] -> [..., out]"""
        shape = (*x.shape[:-1], self.out_features)
        if x.numel() == 0:  # the product with nothing is refused
            return x.new_zeros(shape)
        size = (self.out_features, self.in_features)
        weight = torch.sparse_csr_tensor(self.row_starts, self.columns, self.values, size)
        out = (weight @ x.reshape(-1, self.in_features).T).T  # [N, out]
        return (out if self.bias is None else out + self.bias).reshape(shape)


def check_2_4(weight):
    """Raises ValueError unless every four neighbours of weight [out, in] along the inputs hold two zeros."""
    if weight.shape[1] % 4:
        raise ValueError(f"2:4 takes inputs by fours, which {weight.shape[1]} are not")
    if ((weight.reshape(-1, 4) != 0).sum(dim=1) > 2).any():
        raise ValueError("this matrix was never pruned to 2:4: compressing it would lose weights")


def compress_2_4(weight):
    """A 2:4 matrix [out, in] as its kept numbers [out, in / 2] and their places, two bits each.

    Returns: values and places, uint8 [out * in / 8, rounded up]. Raises ValueError as check_2_4 does.
    """
    check_2_4(weight)
    n_out, n_in = weight.shape
    fours = weight.reshape(-1, 4)  # [R, 4]
    # the numbers that are not zero first, then the others, each in their order
    places = (fours == 0).byte().argsort(dim=1, stable=True)[:, :2].sort(dim=1).values  # [R, 2]
    values = fours.gather(1, places).view(n_out, n_in // 2)  # [out, in / 2]
    places = F.pad(places.flatten(), (0, -places.numel() % 4)).view(-1, 4)  # four of them fill a byte
    shifts = torch.tensor([1, 4, 16, 64], device=weight.device)  # [4]
    return values, (places * shifts).sum(dim=1).to(torch.uint8)


def decompress_2_4(values, places):
    """The matrix [out, in] that compress_2_4 was given, bit for bit (a -0.0 among the zeros becomes 0.0)."""
    shifts = torch.tensor([0, 2, 4, 6], device=values.device)  # [4]
    places = (places[:, None].long() >> shifts & 3).flatten()[: values.numel()].view(-1, 2)  # [R, 2]
    fours = values.new_zeros(len(places), 4).scatter_(1, places, values.reshape(-1, 2))  # [R, 4]
    return fours.view(len(values), 2 * values.shape[1])  # [out, in]


class SemiStructuredLinear(nn.Module):
    """A linear layer with 2:4 weights, multiplied by the sparse tensor cores of an NVIDIA GPU.

    Raises ValueError as check_2_4 does, and RuntimeError from torch where there is no such product.
    """

    def __init__(self, linear):
        super().__init__()
        check_2_4(linear.weight)
        self.out_features, self.in_features = linear.weight.shape
        self.weight = torch.sparse.to_sparse_semi_structured(linear.weight.detach().contiguous())
        self.register_buffer("packed", self.weight.packed)  # the same memory, so that it is counted
        self.register_buffer("meta", self.weight.meta)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())  # [out]

    def forward(self, x):
        """[..., in] -> [..., out]"""
        shape = (*x.shape[:-1], self.out_features)
        if x.numel() == 0:  # the kernels want at least one token, in one piece
            return x.new_zeros(shape)
        return F.linear(x.reshape(-1, self.in_features).contiguous(), self.weight, self.bias).view(shape)


def replace_linears(model, make):
    """Puts make(layer) in the place of every linear layer of the blocks; returns the model."""
    for name, layer in linear_layers(model.blocks).items():
        model.blocks.set_submodule(name, make(layer))
    return model


def prune(module, sparsity):
    """Zeros of the smallest weights in every row of the module's linear layers, in place; returns it."""
    for layer in linear_layers(module).values():
        layer.weight.data.copy_(prune_magnitude(layer.weight.data, None, sparsity, "row"))
    return module


def refusal(make, layer, x):
    """Why torch has no product of make(layer) with x here, in its own words; "" where it has one."""
    try:
        make(layer)(x)
    except RuntimeError as error:
        return " ".join(str(error).split())[:160]
    return ""


FORMS = {  # of a model: its zeros, and what is put in the place of every layer
    "50% zeros": (0.5, CSRLinear),
    "95% zeros": (0.95, CSRLinear),
    "2:4": ("2:4", SemiStructuredLinear),
}


if __name__ == "__main__":
    import copy
    import warnings

    import inference_report as harness
    import inference_utils as utils
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache
    from inference_report import Method
    from linear_packed import pack_linears
    from main_kvcache import generate_kvcache

    warnings.filterwarnings("ignore", message="Sparse|The PyTorch API of SparseSemiStructuredTensor")
    quick, shares = {"n_tokens": 8, "sparsities": [0.5, 0.99]}, [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99]
    parser = harness.options(__doc__, 3, quick=quick, prompt_len=64, n_tokens=128)
    parser.add_argument("--sparsities", type=harness.share, nargs="+", default=shares, help="shares of zeros")
    columns = {"weights_mb": ("weights MB", "{:.1f}")}
    with harness.script(parser) as args, torch.no_grad():
        text, (plain,) = harness.load_text(args), harness.load_models(args, GPTlite_KVCache, packed=False)
        prompt = text.prompts(1, args.prompt_len)  # [1, T]
        report = harness.Report(args, "sparsity and time", plain, columns, ["n_parameters"], text)
        originals = [block.ffwd.net[0] for block in plain.blocks]  # in turn, as in a model
        n_out, n_in = originals[0].weight.shape
        inputs = {"1 token": torch.randn(1, n_in), "64 tokens": torch.randn(64, n_in)}  # [N, in]
        inputs = {name: x.to(args.device, args.dtype) for name, x in inputs.items()}
        one = prune(copy.deepcopy(originals[0]), "2:4")
        refused = {make: refusal(make, one, inputs["1 token"]) for make in (CSRLinear, SemiStructuredLinear)}

        def products(percent):
            pruned = [prune(copy.deepcopy(layer), percent / 100) for layer in originals]
            forms = {} if refused[CSRLinear] else {"CSR": [CSRLinear(layer) for layer in pruned]}
            forms["dense"] = [pack_linears(layer) for layer in pruned]
            timed = {}
            for name, layers in forms.items():
                for n, x in inputs.items():
                    timed[f"{name}, {n}"] = lambda x=x, layers=layers: [layer(x) for layer in layers]
            return timed

        title = f"Time of {len(originals)} products with matrices {n_out} x {n_in} (ms)"
        table = report.time_sweep(title, "zeros (%)", [round(100 * s, 2) for s in args.sparsities], products)
        size_mb = utils.model_size_mb
        packed = pack_linears(copy.deepcopy(plain))
        methods = [Method("dense", generate_kvcache, packed, weights_mb=size_mb(packed))]
        for name, (sparsity, make) in FORMS.items():
            pruned, new = copy.deepcopy(plain), f"{name}, {'packed' if name == '2:4' else 'CSR'}"
            prune(pruned.blocks, sparsity)
            model = pack_linears(copy.deepcopy(pruned))
            methods.append(Method(name, generate_kvcache, model, exact=False, weights_mb=size_mb(model)))
            if not refused[make]:
                model = pack_linears(replace_linears(copy.deepcopy(pruned), make))
                report.check_close(f"{new}: same logits as dense", model(prompt)[0], pruned(prompt)[0])
                figures = {"exact": False, "loss": False, "weights_mb": size_mb(model)}  # the loss above
                methods.append(Method(new, generate_kvcache, model, **figures))
        rows = report.compare(prompt, args.n_tokens, *methods, label="")
        weights = [layer.weight.data for layer in linear_layers(pruned.blocks).values()]  # 2:4
        pairs = [(compress_2_4(weight), weight) for weight in weights]
        whole = all(torch.equal(decompress_2_4(*kept), weight) for kept, weight in pairs)
        report.check("2:4: decompressing returns every matrix bit for bit", whole)
        share = sum(part.nbytes for kept, _ in pairs for part in kept) / sum(w.nbytes for w in weights)
        half = 0.5 + 1 / (8 * args.dtype.itemsize)  # two of four numbers, and two bits for each
        report.check(f"2:4: packed to {share:.4f} of the bytes", abs(share - half) < 1e-3)
        for n in inputs:
            report.why(words.crossover(table, "zeros (%)", f"CSR, {n}", f"dense, {n}"))
        sparse = [rows.get(name, {"method": name}) for name in ("50% zeros, CSR", "95% zeros, CSR")]
        report.why(words.compare(sparse[0], rows["dense"]) + words.compare(sparse[1], rows["dense"]))
        no_2_4 = refused[SemiStructuredLinear]
        packed_here = f"2:4 is multiplied as it is packed here, in {share:.4f} of the bytes."
        report.why(words.choose(len(no_2_4), (1, f"2:4 is multiplied dense here: {no_2_4}"), packed_here))
        report.plot_sweep(title)
        report.finish()
