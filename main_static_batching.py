"""Static batching: several requests go through the model together, and leave it together.

A decode step reads all weights whether it serves one sequence or eight, so requests are grouped and padded
to one shape. A group ends with its longest answer: until then the slots of shorter ones compute tokens that
nobody receives, and a request waits for its group.

Exact: a causal model's row is not changed by padding on its right, nor by the rows beside it, so every
request gets the tokens it would get alone. Wins where a step of one sequence leaves the machine idle, which
is most of the time on a GPU and, with a KV cache, on a CPU as well. Loses where answers differ in length
(E[length] / E[longest of the group] of the work is useful), and where whole texts are computed anew in every
step: then one sequence alone may keep the machine busy, and padding is added work.
main_continuous_batching.py refills a slot as soon as it is free, and adds the KV cache.

Run: python main_static_batching.py            (--longest 128 for longer requests)

Source: Pope et al., Efficiently Scaling Transformer Inference, 2022 (its cost); Yu et al., Orca, 2022 (its
waste).
"""

import torch
from torch.nn.utils.rnn import pad_sequence

from inference_serving import refusals


@torch.no_grad()
def next_tokens(model, sequences, seqlen, pad_id=0):
    """The next token of several sequences of any lengths, by one forward.

    Rows are padded on the right, and each is read at its own last position. No mask is needed: a causal
    model sees nothing to the right of a position, so what the padding holds cannot matter.

    Args: model: token ids [B, T] -> logits [B, T, V]; sequences: list of B tensors of token ids [T_i], none
        empty, cut to their last seqlen tokens; pad_id: any token id.
    Returns: token ids [B], the lowest id where several logits are the largest. Raises ValueError for a
        seqlen below 1.
    """
    if seqlen < 1:  # sequence[-0:] would be all tokens, not none
        raise ValueError(f"seqlen is {seqlen}; the model reads at least 1 token")
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
    outputs, n_steps = refusals(requests, batch_size, model=model), 0
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


if __name__ == "__main__":
    import math
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from inference_queue import COLUMNS, Way, compare_queue, draw_requests, expected_longest
    from inference_utils import alternating_ms, parameters_of
    from main_kvcache import generate

    sizes = {"batch_size": 8, "n_requests": 32, "longest": 48}
    parser = harness.options(__doc__, repeats=2, quick={"n_requests": 8, "longest": 16}, **sizes)
    columns = {"predicted_useful": ("predicted", "{:.0%}"), "predicted_per_s": ("predicted 1/s", "{:.0f}")}
    with harness.script(parser) as args:
        text = harness.load_text(args)
        (model,) = harness.load_models(args, GPTlite)
        requests, seqlen = draw_requests(args, text, model.seqlen), model.seqlen
        lengths, prompts = [n for _, n in requests], [prompt for prompt, _ in requests]
        report = harness.Report(args, "static batching", model, COLUMNS | columns, text=text)

        def one_at_a_time(model, requests, _batch_size, seqlen):
            return [generate(model, prompt[None], n, seqlen)[0] for prompt, n in requests], sum(lengths)

        def step_shapes(batch_size):
            """(rows, tokens in the longest row) of every step, known before it runs."""
            shapes = []
            for start in range(0, len(requests), batch_size):
                group = requests[start : start + batch_size]
                width = max(len(prompt) for prompt, _ in group)
                shapes += [(len(group), width + i) for i in range(max(n for _, n in group))]
            return shapes

        batch_sizes = sorted({1, args.batch_size, *((4,) if args.quick else (2, 4, 8, 16, 32))})
        ways = [Way("one at a time", one_at_a_time, model, 1)]
        ways += [Way(f"batch {B}", static_batching, model, B, refill=False) for B in batch_sizes[1:]]
        measured = compare_queue(report, model, requests, ways)
        rows = dict(zip(batch_sizes, measured.values(), strict=True))

        # The prediction: two forwards are timed, the smallest and the largest of all; the rest is counting
        shapes = {B: step_shapes(B) for B in batch_sizes}
        ends = [pick((s for steps in shapes.values() for s in steps), key=math.prod) for pick in (min, max)]
        texts = {math.prod(shape): list(prompts[0].new_zeros(shape)) for shape in ends}
        forwards = {n: partial(next_tokens, model, rows, seqlen) for n, rows in texts.items()}
        (least, least_ms), *_, (most, most_ms) = alternating_ms(forwards, args.repeats, args.device).items()
        slope = max(most_ms - least_ms, 0) / max(most - least, 1)
        fixed = max(least_ms - slope * least, 0)  # ms: a step of n tokens takes fixed + slope * n
        for B, row in rows.items():
            n_forward, counted = sum(map(math.prod, shapes[B])), row["forward_tokens"]
            report.check(f"{row['method']}: {n_forward} forward tokens, as counted", counted == n_forward)
            row["predicted_useful"] = sum(lengths) / len(lengths) / expected_longest(lengths, B)
            row["predicted_per_s"] = 1000 * sum(lengths) / (len(shapes[B]) * fixed + n_forward * slope)
        choices = [next_tokens(model, prompts, seqlen, pad_id) for pad_id in (0, text.vocab_size - 1)]
        report.check("the padding's token id does not matter", torch.equal(*choices))

        single, batch, name = rows[1], rows[args.batch_size], rows[args.batch_size]["method"]
        report.why(words.compare(batch, single, "tokens_per_s") + words.compare(batch, single, "ttft_ms"))
        useful = f"{batch['slot_utilisation']:.0%} of the slots' work is useful in {name}"
        useful += f" ({batch['predicted_useful']:.0%} predicted, E[length] / E[longest of a group]): "
        equal, waits = "its answers are about equally long.", "the rest waits for the longest of a group."
        report.why(words.choose(batch["slot_utilisation"], (0.9, useful + equal), useful + waits))
        alone, knee = sum(map(math.prod, shapes[1])) / len(shapes[1]), fixed / slope if slope else math.inf
        figures = f"({alone:.0f} tokens; {knee:.0f} take as long as the part that every step costs)"
        free = f"A step of one text is short {figures}: further rows ride along."
        dear = f"A step of one text is long {figures}: without a cache further rows save little."
        report.why(words.choose(knee / alone, (1.0, free), dear))
        p, shape = parameters_of(model), shapes[args.batch_size][len(shapes[args.batch_size]) // 2]
        report.why_step({name: harness.forward_cost(p, text.vocab_size, *shape, 0, args.dtype)}, measured)
        speeds = {key: [row[key] for row in rows.values()] for key in ("tokens_per_s", "predicted_per_s")}
        lines = {key: (batch_sizes, values) for key, values in speeds.items()}
        report.plot_lines(lines, "batch size", "tokens/s", "Static batching", "x")
        report.finish()
