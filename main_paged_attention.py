"""PagedAttention: KV memory is taken block by block as a text grows, not reserved for the longest text.

A contiguous cache reserves room for the longest text that a request may become; most of it never holds a
token. With blocks a request is admitted when its prompt fits; if the pool is full later, the newest sequence
makes room, and is computed anew or copied back afterwards. Exact: every request gets the tokens it would get
alone. Attention over blocks is in gptlite_paged.py (its naive form first), the pool in gptlite_blocks.py,
admission and preemption in inference_scheduling.py.

Wins memory: as many times more texts fit as the reserved room is longer than a text and half a block, so
requests wait less for their first token. More texts pay in tokens/s as far as they share a step's fixed cost:
on a CPU that ends soon, on a GPU a step costs the same for hundreds of them. Loses at an equal number of
texts: here blocks are gathered before attention, one more copy of all keys and values a step, which a kernel
that reads them in place saves. Over a link of 25 GB/s copying a preempted text back loses to computing it
anew from some 15 TFLOP/s on.

Run: python main_paged_attention.py            (--block-size 1 wastes nothing, --block-size 64 more)

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
The paper's other half, samples and beams that share blocks: more/paged_sharing.py.
"""

import torch

from gptlite_paged import Sequence


@torch.no_grad()
def generate_paged(model, prompt, n_tokens, pool):
    """Greedy decoding over blocks, each taken when its first token is about to be written.

    Args: model: GPTlite_Paged; prompt: token ids [B, T]; pool: BlockPool, which gets all blocks back.
    Returns: prompt and generated tokens [B, T + n_tokens]. Raises ValueError for an empty prompt, and where
        pool or context are too small.
    """
    sequences = [Sequence(i, ids, len(ids) + n_tokens) for i, ids in enumerate(prompt.tolist())]
    try:
        for _ in range(n_tokens):
            for sequence in sequences:
                pool.grow(sequence, sequence.pending)
            _, logits = model.step(pool, [(sequence, sequence.pending) for sequence in sequences])  # [B, V]
            for sequence, token in zip(sequences, logits.argmax(dim=-1).tolist(), strict=True):
                sequence.ids.append(token)
    finally:
        for sequence in sequences:
            pool.drop(sequence)
    return prompt.new_tensor([sequence.ids for sequence in sequences])  # [B, T + n_tokens]


def reservations(longest):
    """Ways to reserve room at admission, {name: function sequence -> n_tokens}; None takes it as needed."""

    def power_of_2(sequence):
        answer = 2 ** (sequence.end - sequence.n_prompt - 1).bit_length()
        return min(sequence.n_prompt + answer, longest)

    return {
        "reserve the longest": lambda sequence: longest,
        "reserve a power of 2": power_of_2,
        "reserve the exact length": lambda sequence: sequence.end - 1,  # known to an oracle only
        "paged": None,
    }


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_serving as serving
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_paged import BlockPool, GPTlite_Paged
    from gptlite_slots import GPTlite_Slots
    from inference_queue import draw_requests

    sizes, quick = {"batch_size": 8, "n_requests": 36, "longest": 256}, {"n_requests": 16, "longest": 40}
    parser = harness.options(__doc__, repeats=2, quick=quick, **sizes)
    parser.add_argument("--block-size", type=harness.positive_int, default=16, help="tokens of a block")
    with harness.script(parser) as args:
        B, size, longest, text = args.batch_size, args.block_size, args.longest, harness.load_text(args)
        if longest < 16:
            raise ValueError(f"--longest {longest}: at least 16 tokens")
        plain, slots, paged = harness.load_models(args, GPTlite, GPTlite_Slots, GPTlite_Paged)
        requests, n_blocks = draw_requests(args, text, plain.seqlen), B * -(-longest // size)
        columns = {"n_steps": ("steps", "{}"), "held_share": ("holds tokens", "{:.0%}")}
        columns |= {"at_a_time": ("at a time", "{:.1f}"), "n_preempted": ("preempted", "{}")}
        report = harness.Report(args, "paged attention", paged, columns, block_size=size, n_blocks=n_blocks)

        def over_blocks(n_blocks, **options):
            return serving.PagedScheduler(paged, BlockPool(paged, n_blocks, size), **options)

        # One amount of memory, and ways to give it away
        makers = {"contiguous slots": lambda: serving.SlotScheduler(slots, B, longest)}
        for name, reserve in reservations(longest).items():
            makers[name] = partial(over_blocks, n_blocks, reserve=reserve)
        rows, shares = {}, {}
        for name, (figures, _, usage) in serving.serve_queue(report, plain, makers, requests).items():
            rows[name] = report.row(name, baseline=name == "contiguous slots", **figures)
            if name != "contiguous slots":
                shares[name] = range(len(usage)), [held / n_blocks / size for held, *_ in usage]
        in_slots, reserved, *_, blocks = rows.values()
        same = in_slots["n_steps"] == reserved["n_steps"]
        report.check("slots and blocks that are reserved take as many steps", same)

        # A pool that is too small for those who run
        fewer, small = requests[: -(-len(requests) // 3)], max(n_blocks // 4, n_blocks // B)
        makers = {
            "computed anew": partial(over_blocks, small),
            "swapped": partial(over_blocks, small, swap=True),
        }
        preempted = serving.serve_queue(report, plain, makers, fewer)
        needed, table = sum(len(prompt) + n - 1 for prompt, n in fewer), []  # tokens, each computed once
        for way, (figures, scheduler, _) in preempted.items():
            line = {"the newest is": way, "preempted": figures["n_preempted"], "steps": figures["n_steps"]}
            line["tokens computed again"] = figures["forward_tokens"] - needed
            line["MB swapped out"] = scheduler.n_bytes_swapped / 1e6
            table.append(line | {"tokens/s": figures["tokens_per_s"]})
        report.sweep(f"Preemption: {len(fewer)} requests in a pool of {small} blocks", table)

        length = blocks["mean_length"]
        expected = length / (length + (size - 1) / 2)
        figures = f"{blocks['at_a_time']:.1f} texts at a time instead of {reserved['at_a_time']:.1f}"
        shares_held = (
            f"{blocks['held_share']:.0%} of the room that is taken holds tokens ({expected:.0%} expected"
        )
        shares_held += f", half a block is lost a text), of reserved room {reserved['held_share']:.0%}"
        report.why(
            words.choose(
                blocks["at_a_time"] / reserved["at_a_time"],
                (1.05, f"Blocks fit more texts, {figures}: {shares_held}."),
                f"Blocks fit no more texts here, {figures}: {shares_held}.",
            )
        )
        report.why(
            words.compare(blocks, in_slots, "ttft_ms") + words.compare(blocks, in_slots, "tokens_per_s")
        )
        report.why(words.compare(reserved, in_slots))
        anew, swapped = ({"method": f"texts {way}", **one[0]} for way, one in preempted.items())
        report.why(words.compare(swapped, anew, "tokens_per_s"))
        report.plot_lines(shares, "step", "share of the memory that holds tokens")
        report.finish()
