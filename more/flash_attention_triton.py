"""FlashAttention and flash decoding as kernels of Triton: the same algorithm, one program for each tile.

Idea: main_flash_attention.py writes the loops in Python, so that each product and each maximum is a call that
goes through memory. A kernel keeps a tile of queries, its running maximum, sum and output in registers from
the first key to the last. Triton's programs work on whole tiles: this one handles a tile of queries of a head
and walks over the keys; for a decode step one handles a split of the keys instead, and the parts are joined.

Exact up to rounding; sums are in 32 bits whatever the inputs are. Wins on a GPU, where the scores never leave
the multiprocessor, over everything that writes them to memory. Loses to kernels that overlap loading and
computing by hand for one generation of GPUs, and cannot run on a CPU: there Triton's interpreter runs a
kernel's programs one after the other in NumPy, which shows that it is right, and no times.

Run: python more/flash_attention_triton.py            (needs Triton: python -m pip install triton)

Source: Dao, FlashAttention-2, 2023; Tillet et al., Triton: An Intermediate Language and Compiler for Tiled
Neural Network Computations, 2019; Dao et al., Flash-Decoding, 2023.
"""

import math
import os

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_merging import merge_parts

if not torch.cuda.is_available():  # read when Triton is imported and when a kernel is made
    os.environ.setdefault("TRITON_INTERPRET", "1")
try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # the file can be read and asked for its options all the same
    triton = tl = constexpr = None

LOG2_E = 1.4426950408889634  # GPUs have a unit for powers of 2: exp(x) is exp2(x * LOG2_E)


def kernel(function):
    """What Triton makes of a function, on a GPU or interpreted; without Triton the function itself."""
    return function if triton is None else triton.jit(function)


def check_triton():
    """Raises ModuleNotFoundError where there is no Triton that runs kernels here."""
    interprets = triton is not None and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
    if triton is None or not interprets and not torch.cuda.is_available():
        raise ModuleNotFoundError("this needs Triton, on a CPU 3.7 or later: python -m pip install triton")


@kernel
def flash_kernel(
    Q, K, V, out, lse, scale, Sq, Sk, offset, D, WIDTH: constexpr, TILE_Q: constexpr, TILE_K: constexpr
):
    """One tile of queries of one head: Q, out [B*H, Sq, D], K, V [B*H, Sk, D], lse [B*H, Sq], contiguous.

    scale: of the scores, with LOG2_E in it; offset: query i sees the keys up to i + offset; WIDTH: D or more,
    a power of 2.
    """
    head = tl.program_id(1).to(tl.int64)  # positions of long texts exceed 32 bits
    rows = tl.program_id(0) * TILE_Q + tl.arange(0, TILE_Q)
    channels = tl.arange(0, WIDTH)
    inside = (rows < Sq)[:, None] & (channels < D)[None, :]
    at = (head * Sq + rows)[:, None] * D + channels[None, :]  # [TILE_Q, WIDTH]
    q = tl.load(Q + at, mask=inside, other=0.0)
    row_max = tl.full([TILE_Q], float("-inf"), tl.float32)
    row_sum = tl.full([TILE_Q], 0.0, tl.float32)  # of exp2(score - row_max)
    acc = tl.full([TILE_Q, WIDTH], 0.0, tl.float32)  # output before division by row_sum
    last = (tl.program_id(0) + 1) * TILE_Q + offset  # behind the last key that the tile's last query sees
    n_seen = tl.minimum(Sk, last)
    for start in range(0, n_seen, TILE_K):
        keys = start + tl.arange(0, TILE_K)
        there = (keys < Sk)[:, None] & (channels < D)[None, :]
        at_key = (head * Sk + keys)[:, None] * D + channels[None, :]  # [TILE_K, WIDTH]
        k = tl.load(K + at_key, mask=there, other=0.0)
        v = tl.load(V + at_key, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [TILE_Q, TILE_K], in 32 bits
        seen = (keys < Sk)[None, :] & (keys[None, :] <= rows[:, None] + offset)
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # before its first visible key a query's maximum is -inf, and -inf - -inf would be NaN
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)  # what the earlier tiles count under the new maximum
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_max = new_max
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a query without keys: zeros, and -inf
    tl.store(out + at, (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=inside)
    natural = (row_max + tl.log2(row_sum)) / 1.4426950408889634
    tl.store(lse + head * Sq + rows, natural, mask=rows < Sq)


@kernel
def decode_kernel(Q, K, V, out, lse, scale, Sk, size, D, WIDTH: constexpr, TILE_K: constexpr):
    """One split, `size` keys of a head: Q [B*H, D], K, V [B*H, Sk, D], out [B*H, n, D], lse [B*H, n]."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, WIDTH)
    q = tl.load(Q + head * D + channels, mask=channels < D, other=0.0).to(tl.float32)  # [WIDTH]
    largest, total = tl.full([1], float("-inf"), tl.float32), tl.full([1], 0.0, tl.float32)
    acc = tl.full([WIDTH], 0.0, tl.float32)
    end = tl.minimum((split + 1) * size, Sk)
    for start in range(split * size, end, TILE_K):
        keys = start + tl.arange(0, TILE_K)
        there = (keys < end)[:, None] & (channels < D)[None, :]
        at = (head * Sk + keys)[:, None] * D + channels[None, :]  # [TILE_K, WIDTH]
        k = tl.load(K + at, mask=there, other=0.0).to(tl.float32)
        v = tl.load(V + at, mask=there, other=0.0).to(tl.float32)
        scores = tl.sum(q[None, :] * k, 1) * scale  # one query is no tile for a matrix unit
        scores = tl.where(keys < end, scores, float("-inf"))  # [TILE_K], one of them is a number
        new_max = tl.maximum(largest, tl.max(scores, 0))  # [1]
        weights, rescale = tl.exp2(scores - new_max), tl.exp2(largest - new_max)
        total = total * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * v, 0)
        largest = new_max
    total = tl.where(total == 0.0, 1.0, total)  # a split without keys: zeros, and -inf
    row = head * tl.num_programs(0) + split
    tl.store(out + row * D + channels, acc / total, mask=channels < D)
    tl.store(lse + row + tl.arange(0, 1), (largest + tl.log2(total)) / 1.4426950408889634)


def check_inputs(Q, K, V):
    """Raises ValueError for tensors that do not fit together, or of a type that a GPU's units do not have."""
    if K.shape != V.shape or Q.shape[:2] != K.shape[:2] or Q.shape[-1] != K.shape[-1]:
        shapes = ", ".join(str(list(t.shape)) for t in (Q, K, V))
        raise ValueError(f"Q, K, V must be [B, H, Sq, D], [B, H, Sk, D], [B, H, Sk, D], not {shapes}")
    if not Q.dtype == K.dtype == V.dtype or Q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"Q, K, V of one type, 16 or 32 bits, not {Q.dtype}, {K.dtype}, {V.dtype}")
    if Q.dtype == torch.bfloat16 and Q.device.type == "cpu":  # its products would be those of the bits
        raise ValueError("Triton's interpreter has no bfloat16: take float16 or float32 on a CPU")


def flash_attention_triton(Q, K, V, causal=True, tile_q=64, tile_k=64):
    """FlashAttention's forward pass in one kernel.

    Args: Q [B, H, Sq, D]; K, V [B, H, Sk, D]; causal: the last query belongs to the last key, False hides
        nothing; tile_q, tile_k: powers of 2 from 16 up.
    Returns: the output [B, H, Sq, D] and the natural log of each query's sum of exp(scores), float32
        [B, H, Sq]; zeros and -inf for a query without keys. Raises ValueError as check_inputs does,
        ModuleNotFoundError without Triton.
    """
    check_triton()
    check_inputs(Q, K, V)
    (B, H, Sq, D), Sk = Q.shape, K.shape[-2]
    q, k, v = (t.reshape(B * H, -1, D).contiguous() for t in (Q, K, V))
    out, lse = torch.empty_like(q), q.new_empty(B * H, Sq, dtype=torch.float32)
    width = max(triton.next_power_of_2(D), 16)
    sizes = {"WIDTH": width, "TILE_Q": tile_q, "TILE_K": tile_k}
    grid, offset = (triton.cdiv(Sq, tile_q), B * H), Sk - Sq if causal else Sk
    flash_kernel[grid](q, k, v, out, lse, LOG2_E / math.sqrt(D), Sq, Sk, offset, D, **sizes)
    return out.view(Q.shape), lse.view(B, H, Sq)


def flash_decoding_triton(q, K, V, n_splits=8, tile_k=64):
    """Attention of one query per sequence, each split of its keys a program of its own.

    Args: q [B, H, 1, D]; K, V [B, H, Sk, D]; n_splits: at most; tile_k: a power of 2.
    Returns: [B, H, 1, D], zeros without keys. Raises ValueError for more queries, no split, or as
        check_inputs does.
    """
    check_triton()
    check_inputs(q, K, V)
    (B, H, Sq, D), Sk = q.shape, K.shape[-2]
    if Sq != 1 or n_splits < 1:
        raise ValueError(f"flash decoding takes one query per sequence and some splits, not {Sq}, {n_splits}")
    size = max(triton.cdiv(Sk, n_splits), 1)  # keys of a split
    n_splits = max(triton.cdiv(Sk, size), 1)  # those that have keys
    query, k, v = (t.reshape(B * H, -1, D).contiguous() for t in (q, K, V))
    out = query.new_empty(B * H, n_splits, D, dtype=torch.float32)
    lse = query.new_empty(B * H, n_splits, dtype=torch.float32)
    sizes = {"WIDTH": triton.next_power_of_2(D), "TILE_K": tile_k}
    decode_kernel[n_splits, B * H](query, k, v, out, lse, LOG2_E / math.sqrt(D), Sk, size, D, **sizes)
    return merge_parts(out, lse)[0].view(B, H, 1, D).to(q.dtype)


if __name__ == "__main__":
    from functools import partial

    import torch.nn.functional as F

    import inference_report as harness
    import inference_sparse as study
    import inference_words as words
    from gptlite import GPTlite, scaled_dot_product_attention
    from gptlite_gqa import grouped_attention
    from inference_utils import parameters_of
    from main_flash_attention import flash_attention, tile_scores
    from main_flash_decoding import flash_decoding

    quick = {"n_tokens": 70, "max_tokens": 1024}
    parser = harness.options(__doc__, repeats=5, quick=quick, data=False, plot=False)
    add, lengths = parser.add_argument, [1024 * 2**i for i in range(5)]
    add("--n-tokens", type=harness.positive_int, default=200, help="tokens of the text that errors are of")
    add("--max-tokens", type=int, choices=lengths, default=lengths[-1], help="longest that is timed, on CUDA")
    with harness.script(parser) as args:
        (model,) = harness.load_models(args, GPTlite)  # only its shape matters here
        (_, _, H, D, *_), n, device = parameters_of(model), args.n_tokens, args.device
        check_triton()
        if device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
            raise ValueError("--device cpu: Triton compiles for the GPU here; TRITON_INTERPRET=1 interprets")
        columns = {"error": ("largest error", "{:.1e}")}
        report = harness.Report(args, "FlashAttention in Triton", model, columns, n_tokens=n)

        def prompt(n):
            """{form: a call of it}: causal attention over n tokens."""
            QKV = torch.randn(3, 1, H, n, D, device=device).to(args.dtype)
            runs = {"textbook": partial(scaled_dot_product_attention, *QKV)}
            runs["from scratch"] = lambda: flash_attention(*QKV)[0]
            runs["SDPA"] = partial(F.scaled_dot_product_attention, *QKV, is_causal=True)
            return runs | {"Triton": lambda: flash_attention_triton(*QKV)[0]}, QKV

        def step(n):
            """The same for one query to n keys."""
            q, K, V = study.decode_step(args, H, D, n)
            runs = {"textbook": partial(grouped_attention, q, K, V)}
            runs["split, fused"] = partial(flash_decoding, q, K, V, 8)
            runs["SDPA"] = partial(F.scaled_dot_product_attention, q, K, V)
            return runs | {"Triton, split": partial(flash_decoding_triton, q, K, V)}, (q, K, V)

        rows, close = {}, max(1e-5, 4 * torch.finfo(args.dtype).eps)  # the rounding of values up to 4
        for what, forms in (("prompt", prompt), ("step", step)):
            runs, QKV = forms(n)
            exact = grouped_attention(*(t.double().cpu() for t in QKV))  # [1, H, Sq, D]
            for name, run in runs.items():
                out = run().double().cpu()
                report.check_close(f"{what}: {name}, and float64", out, exact, close)
                rows[what, name] = report.row(
                    f"{what}: {name}", baseline=name == "textbook", error=(out - exact).abs().max().item()
                )
        computed = 100 * tile_scores(n, n, True, 64, 64) / n**2
        report.sweep(f"{n} tokens", [{"tile": 64, "scores computed (%)": computed}])
        for what, name in (("prompt", "Triton"), ("step", "Triton, split")):
            report.why(words.compare(rows[what, name], rows[what, "SDPA"], "error"))
        if device.type == "cuda":  # the interpreter's times would be NumPy's
            lengths = [n for n in lengths if n <= args.max_tokens]
            for what, name, forms in (("prompt", "Triton", prompt), ("step", "Triton, split", step)):
                title, timed = f"Attention of a {what} (ms)", lambda n, forms=forms: forms(n)[0]
                times = report.time_sweep(title, "tokens", lengths, timed)
                one, other = (words.crossover(times, "tokens", name, than) for than in ("textbook", "SDPA"))
                report.why(words.about(what, one + other))
        report.finish()
