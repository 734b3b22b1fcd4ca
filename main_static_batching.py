"""Static batching: several requests go through the model together, and leave it together.

A decode step reads all weights whether it serves one sequence or eight, so requests are grouped and padded
to one shape. A group ends with its longest answer: until then the slots of shorter ones compute tokens that
nobody receives, and a request waits for its group. Exact: a causal model's row is not changed by padding on
its right, nor by the rows beside it, so every request gets the tokens it would get alone.

Run: python main_static_batching.py            (--longest 128 for longer requests)

Source: Pope et al., Efficiently Scaling Transformer Inference, 2022 (its cost); Yu et al., Orca, 2022 (its
waste). main_continuous_batching.py refills a slot as soon as it is free, and adds the KV cache.
"""

import torch
from torch.nn.utils.rnn import pad_sequence

from inference_serving import refusals


def make_requests(data, n_requests, seqlen, generator=None):
    """Draws requests that fit seqlen tokens: prompts cut from data, answers of very different lengths.

    Args: data: token ids [N]; seqlen: tokens of the longest request, prompt and answer; generator: a
        torch.Generator on the CPU, to repeat the draw.
    Returns: a list of (prompt [T], n_tokens): T uniform in seqlen / 16 to seqlen / 4, n_tokens uniform in
        seqlen / 16 to 3/4 seqlen (16 to 192 for a context of 256). Raises ValueError for too short a text,
        and for a seqlen below 2.
    """
    if seqlen < 2:
        raise ValueError(f"requests of {seqlen} tokens: a prompt and an answer need at least 2 together")
    shortest, longest = max(seqlen // 16, 1), max(seqlen // 4, 1)
    if len(data) < longest:
        raise ValueError(f"the text has {len(data)} tokens: too short for prompts of {longest}")
    requests = []
    for _ in range(n_requests):
        T = torch.randint(shortest, longest + 1, (), generator=generator).item()
        start = torch.randint(len(data) - T + 1, (), generator=generator).item()
        n_tokens = torch.randint(shortest, seqlen - longest + 1, (), generator=generator).item()
        requests.append((data[start : start + T], n_tokens))
    return requests


@torch.no_grad()
def next_tokens(model, sequences, seqlen, pad_id=0):
    """The next token of several sequences of any lengths, by one forward.

    Rows are padded on the right, and each is read at its own last position. No mask is needed: a causal
    model sees nothing to the right of a position, so what the padding holds cannot matter.

    Args: model: token ids [B, T] -> logits [B, T, V]; sequences: list of B tensors of token ids [T_i], none
        empty, cut to their last seqlen tokens; pad_id: any token id.
    Returns: token ids [B], the lowest id where several logits are the largest.
    """
    windows = [sequence[-seqlen:] for sequence in sequences]
    lengths = torch.tensor([len(window) for window in windows])  # [B]
    logits = model(pad_sequence(windows, batch_first=True, padding_value=pad_id))  # [B, T, V]
    return logits[torch.arange(len(windows)), lengths - 1].argmax(dim=-1)  # [B]


@torch.no_grad()
def static_batching(model, requests, batch_size, seqlen):
    """Serves requests in groups of batch_size, in order; a group ends with its longest answer.

    Args: model: token ids [B, T] -> logits [B, T, V]; requests: list of (prompt [T], n_tokens).
    Returns: (outputs, n_steps): for each request its prompt and answer [T + n_tokens], or a ValueError that
        says why it was refused; and the number of forwards. Raises ValueError for batch_size below 1.
    """
    outputs, n_steps = refusals(requests, batch_size), 0
    accepted = [i for i, refusal in enumerate(outputs) if refusal is None]
    for start in range(0, len(accepted), batch_size):
        group = accepted[start : start + batch_size]
        sequences = [requests[i][0] for i in group]
        for _ in range(max(requests[i][1] for i in group)):
            tokens = next_tokens(model, sequences, seqlen)  # [B]
            sequences = [torch.cat(pair) for pair in zip(sequences, tokens.split(1), strict=True)]
            n_steps += 1
        for i, sequence in zip(group, sequences, strict=True):
            prompt, n_tokens = requests[i]
            outputs[i] = sequence[: len(prompt) + n_tokens]  # what came later was computed for nobody
    return outputs, n_steps


def step_shapes(requests, batch_size):
    """(rows, tokens in the longest row) of every step of static_batching, known before it runs."""
    shapes = []
    for start in range(0, len(requests), batch_size):
        group = requests[start : start + batch_size]
        width = max(len(prompt) for prompt, _ in group)
        shapes += [(len(group), width + i) for i in range(max(n_tokens for _, n_tokens in group))]
    return shapes


def latencies(requests, batch_size, step_times):
    """When each request has its whole answer, from the first step's begin, in the unit of step_times."""
    done, n_steps = [], 0
    for start in range(0, len(requests), batch_size):
        group = requests[start : start + batch_size]
        n_steps += max(n_tokens for _, n_tokens in group)
        done += [sum(step_times[:n_steps])] * len(group)
    return done


def expected_longest(lengths, n_drawn):
    """Mean of the largest of n_drawn of these lengths, drawn without replacement; exact, no sampling."""
    ordered, none_above, mean = sorted(lengths), 1.0, 0.0
    n_drawn = min(n_drawn, len(ordered))
    for rank in range(len(ordered), n_drawn - 1, -1):  # from the longest down
        chosen = n_drawn / rank  # chance that this one is drawn, given that none above it is
        mean += none_above * chosen * ordered[rank - 1]
        none_above *= 1 - chosen
    return mean


if __name__ == "__main__":
    import math
    from itertools import chain

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from main_kvcache import generate

    parser = rep.options(__doc__, repeats=2)
    parser.add_argument("--batch-size", type=rep.positive_int, default=8, help="slots of the batch")
    parser.add_argument("--n-requests", type=rep.positive_int, help="requests (default: 32)")
    parser.add_argument("--longest", type=rep.positive_int, help="most tokens of a request (default: 48)")
    with rep.script(parser) as args:
        p, dev, quick, B = get_gptlite_model_parameters(), args.device, args.quick, args.batch_size
        W, tolerance = p.seqlen, utils.TOLERANCE[args.dtype]
        n_requests, longest = args.n_requests or (8 if quick else 32), args.longest or (16 if quick else 48)
        if longest > W:
            raise ValueError(f"--longest {longest}: the context holds {W} tokens")
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite, vocab_size, args.checkpoint).to(dev, args.dtype)
        generator = torch.Generator().manual_seed(args.seed)
        requests = make_requests(valid_data.to(dev), n_requests, longest, generator)
        lengths = [n_tokens for _, n_tokens in requests]
        total = sum(lengths)
        columns = {"n_steps": ("steps", "{}"), "slot_utilisation": ("useful", "{:.0%}")}
        config = {"batch_size": B, "n_requests": n_requests, "longest_request": longest}
        report = rep.Report(args, "static batching", model, columns, **config)

        def one_at_a_time():
            return [generate(model, prompt[None], n, W)[0] for prompt, n in requests], total

        methods = {1: utils.Method("one at a time", one_at_a_time, [model])}
        for b in sorted({B, *((4,) if quick else (2, 4, 8, 16, 32))} - {1}):
            run = lambda b=b: static_batching(model, requests, b, W)  # noqa: E731
            methods[b] = utils.Method(f"static, batch {b}", run, [model])
        results = utils.measure(methods.values(), total, args.repeats)

        # The prediction: two forwards are timed, the smallest and the largest of all; the rest is counting
        def forward(rows, width):
            return next_tokens(model, [requests[0][0].new_zeros(width)] * rows, W)

        shapes_of = {b: step_shapes(requests, b) for b in methods}
        least, most = (f(chain(*shapes_of.values()), key=math.prod) for f in (min, max))
        least_ms, most_ms = (utils.median_ms(lambda s=s: forward(*s), device=dev) for s in (least, most))
        token_ms = max(most_ms - least_ms, 0) / max(math.prod(most) - math.prod(least), 1)
        step_ms = max(least_ms - token_ms * math.prod(least), 0)

        rows = {}
        for b, method in methods.items():
            measured, shapes = results[method.name], shapes_of[b]
            outputs, n_steps = measured.output
            same = utils.served_as_alone(model, outputs, requests, max(1e-3, 2 * tolerance))
            report.check(f"{method.name}: each request gets the tokens it gets alone", same)
            work = sum(map(math.prod, shapes))
            counted = (n_steps, measured.forward_tokens) == (len(shapes), work)
            report.check(f"{method.name}: {len(shapes)} steps and {work} forward tokens, as counted", counted)
            waits = latencies(requests, b, [ms / 1000 for ms in measured.steps_ms])  # s
            predicted = [(step_ms + token_ms * math.prod(shape)) / 1000 for shape in shapes]  # s
            rows[b] = {
                "batch size": b,
                "tokens/s": measured.tokens_per_s,
                "predicted tokens/s": total / sum(predicted),
                "useful": total / sum(n_rows for n_rows, _ in shapes),
                "predicted useful": total / n_requests / expected_longest(lengths, b),
                "p50 s": utils.percentile(waits, 50),
                "predicted p50 s": utils.percentile(latencies(requests, b, predicted), 50),
                "p99 s": utils.percentile(waits, 99),
            }
            report.row(
                method.name,
                measured,
                baseline=b == 1,
                peak_memory_mb=utils.peak_memory_mb(lambda s=shapes: forward(*max(s, key=math.prod)), model),
                same_output=same,
                slot_utilisation=rows[b]["useful"],
                latency_p50_ms=1000 * rows[b]["p50 s"],
                latency_p99_ms=1000 * rows[b]["p99 s"],
            )
        report.sweep(
            "All requests wait from the start; latency: until the answer's group ends", list(rows.values())
        )
        choices = [next_tokens(model, outputs, W, pad_id) for pad_id in (0, vocab_size - 1)]
        report.check("the padding's token id does not matter", torch.equal(*choices))

        single, batch, best = rows[1], rows[B], max(rows.values(), key=lambda row: row["tokens/s"])
        report.why(
            f"An answer has {total / n_requests:.1f} tokens on average, the longest of {B} has "
            f"{expected_longest(lengths, B):.1f}: {batch['predicted useful']:.0%} of the slots' work is "
            f"useful (measured {batch['useful']:.0%}), the rest is waiting for the longest of the group."
        )
        knee = f"{step_ms / token_ms:.0f}" if token_ms else f"{math.prod(most)} or more"
        one_step = sum(map(math.prod, shapes_of[1])) / len(shapes_of[1])
        report.why(
            f"A forward takes {step_ms:.1f} ms, which its rows share, and {1000 * token_ms:.0f} us a token: "
            f"more rows are almost free up to about {knee} tokens. Without a KV cache a step of one sequence "
            f"already has {one_step:.0f} tokens; with one it has 1 (main_continuous_batching.py)."
        )
        gain, predicted_gain = (batch[key] / single[key] for key in ("tokens/s", "predicted tokens/s"))
        report.why(
            f"Batches of {B} {'gain' if gain > 1 else 'lose'}: {gain:.2f} times the tokens/s of one by one "
            f"({predicted_gain:.2f} predicted). The fastest is batch {best['batch size']}, "
            f"{best['tokens/s'] / single['tokens/s']:.2f} times: what rows share, less padding and waiting."
        )
        limits, shape = rep.measure_ceilings(dev, args.dtype), shapes_of[B][len(shapes_of[B]) // 2]
        bound = rep.lower_bound_ms(rep.forward_cost(p, vocab_size, *shape, 0, args.dtype), limits)
        took = step_ms + token_ms * math.prod(shape)
        report.why(
            f"{shape[0]} rows of {shape[1]} tokens need at least {bound:.1f} ms at this machine's "
            f"{limits.flops_per_s / 1e9:.0f} GFLOP/s, and take {took:.1f} ms ({rep.share_of(bound, took)})."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for axis, key, colour in ((axes, "tokens/s", "C0"), (axes.twinx(), "p50 s", "C1")):
                axis.plot(list(rows), [row[key] for row in rows.values()], "o-", color=colour)
                axis.plot(list(rows), [row[f"predicted {key}"] for row in rows.values()], "--", color=colour)
                axis.set_ylim(bottom=0)
                axis.set_ylabel(key.replace("p50 s", "median latency (s)"), color=colour)
            axes.set(xlabel="batch size (dashed: predicted)", xscale="log")
            axes.set_xticks(list(rows), [str(b) for b in rows], minor=False)
            axes.minorticks_off()
            axes.set_title(f"Static batching, {report.data['config']['device_name']}")
            rep.save_figure(figure, args.plot)
        report.finish()
