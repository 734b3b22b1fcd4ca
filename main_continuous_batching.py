"""Continuous batching: a sequence that is finished leaves at once, and the next request takes its slot.

Static batching waits for the longest answer of a group. Here the batch is put together anew at every step,
so all slots generate useful tokens as long as requests wait. The second function is the form that serving
engines have: each slot holds the KV cache of its sequence, and one forward computes the prompts of newcomers
and one token of all the others.

Exact: every request gets the tokens it would get alone. Wins E[longest of a group] / E[length] of static
batching's steps on a long queue (1.7 times for answers of 16 to 192 tokens in 8 slots), and time to the first
token, since nobody waits for a group. Gains nothing with one slot, equal lengths, or a queue that is shorter
than the slots; loses at the end of a queue, where slots stay empty, and a step that computes a newcomer's
prompt takes longer for all others (main_chunked_prefill.py). A slot holds a whole context, used or not
(main_paged_attention.py). In more/serving.py the requests arrive over time.

Run: python main_continuous_batching.py            (--peers adds transformers' generate on padded batches)

Source: Yu et al., Orca: A Distributed Serving System for Transformer-Based Generative Models, 2022
(iteration-level scheduling, selective batching; as there, a prompt is computed in one piece).
"""

from collections import deque

import torch

from gptlite_paged import Sequence
from gptlite_slots import SlotBatch
from inference_serving import refusals
from main_static_batching import next_tokens


@torch.no_grad()
def continuous_batching(model, requests, batch_size, seqlen):
    """Serves requests in order, batch_size at a time; a slot is refilled right after its last token.

    Args: model: token ids [B, T] -> logits [B, T, V]; requests: list of (prompt [T], n_tokens).
    Returns: (outputs, n_steps): for each request its prompt and answer [T + n_tokens], or a ValueError that
        says why it was refused; and the number of forwards. Raises ValueError for batch_size below 1.
    """
    refused = refusals(requests, batch_size, model=model)
    outputs = [refusal or prompt for refusal, (prompt, _) in zip(refused, requests, strict=True)]
    waiting = deque(i for i, (_, n_tokens) in enumerate(requests) if refused[i] is None and n_tokens > 0)
    running, n_steps = [], 0
    while waiting or running:
        while waiting and len(running) < batch_size:
            running.append(waiting.popleft())
        tokens = next_tokens(model, [outputs[i] for i in running], seqlen)  # [B]
        for i, token in zip(running, tokens.split(1), strict=True):
            outputs[i] = torch.cat([outputs[i], token])  # [T + 1]
        running = [i for i in running if len(outputs[i]) < len(requests[i][0]) + requests[i][1]]
        n_steps += 1
    return outputs, n_steps


def continuous_batching_kvcache(model, requests, batch_size, seqlen, refill=True):
    """continuous_batching with a KV cache: the same outputs and steps, one computed token for each new one.

    Args: model: GPTlite_Slots; refill: False is static batching, its slots refilled when all are finished.
    Returns: as continuous_batching. The cache cannot slide, so prompt and answer must fit: a request of more
        than seqlen + 1 tokens (the last is never read) is refused alone.
    """
    refused = refusals(requests, batch_size, seqlen + 1, model)
    outputs = [refusal or prompt for refusal, (prompt, _) in zip(refused, requests, strict=True)]
    waiting = deque(
        Sequence(i, prompt.tolist(), len(prompt) + n_tokens)
        for i, (prompt, n_tokens) in enumerate(requests)
        if refused[i] is None and n_tokens > 0
    )
    batch, n_steps = SlotBatch(model, batch_size, seqlen, refill), 0
    while waiting or batch.running:
        newcomers = [waiting.popleft() for _ in range(min(batch.n_free(), len(waiting)))]
        for sequence in batch.step(newcomers):
            outputs[sequence.request] = outputs[sequence.request].new_tensor(sequence.ids)  # [T + n]
        n_steps += 1
    return outputs, n_steps


if __name__ == "__main__":
    from functools import partial

    import inference_queue as queueing
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_slots import GPTlite_Slots
    from inference_queue import Way
    from inference_utils import parameters_of
    from linear_packed import pack_linears
    from main_kvcache import generate

    sizes = {"batch_size": 8, "n_requests": 64, "longest": 64}
    parser = harness.options(__doc__, repeats=2, quick={"n_requests": 12, "longest": 16}, **sizes)
    parser.add_argument("--peers", action="store_true", help="add a row of transformers' generate")
    with harness.script(parser) as args:
        text, B = harness.load_text(args), args.batch_size
        plain, slots = harness.load_models(args, GPTlite, GPTlite_Slots)
        requests = queueing.draw_requests(args, text, plain.seqlen)
        lengths = [n for _, n in requests]
        report = harness.Report(args, "continuous batching", plain, queueing.COLUMNS, text=text)

        def one_at_a_time(model, requests, _batch_size, seqlen):
            return [generate(model, prompt[None], n, seqlen)[0] for prompt, n in requests], sum(lengths)

        cache, serve = SlotBatch(slots, B, plain.seqlen), continuous_batching_kvcache
        ways = [
            Way("one at a time", one_at_a_time, plain, 1),
            Way("continuous", continuous_batching, plain, B),
            Way("one at a time, KV cache", serve, slots, 1, buffers=cache),
            Way("static, KV cache", partial(serve, refill=False), slots, B, False, cache),
            Way("continuous, KV cache", serve, slots, B, True, cache),
        ]
        if args.peers:
            from gptlite_opt import generate_opt_padded, opt_from_gptlite

            opt = pack_linears(opt_from_gptlite(harness.load_models(args, GPTlite, packed=False)[0]))
            ways.append(Way("transformers, padded", generate_opt_padded, opt, B, False))
        rows = queueing.compare_queue(report, plain, requests, ways)
        _, _, alone, static, ours = (rows[way.name] for way in ways[:5])

        # Steps do not depend on the model: here they are counted on a queue whose end does not matter
        drawn = torch.Generator().manual_seed(args.seed)
        queue = [n for _, n in queueing.make_requests(text.valid, 60 * B, 64, drawn)]
        counted, here = queueing.step_ratio(queue, B), static["n_steps"] / ours["n_steps"]
        predicted = queueing.expected_longest(queue, B) * len(queue) / sum(queue)
        name = f"static batching takes {counted:.2f} times the steps on {len(queue)} requests"
        report.check(f"{name} ({predicted:.2f} predicted)", abs(counted / predicted - 1) <= 0.1)

        report.why(words.compare(ours, static, "tokens_per_s") + words.compare(ours, static, "ttft_ms"))
        figures = f"static batching takes {here:.2f} times the steps ({counted:.2f} on a long queue)"
        useful, idle = f"Refilled slots stay useful: {figures}.", f"Refilling saves no step here: {figures}."
        report.why(words.choose(here, (1.001, useful), idle))
        report.why(words.compare(ours, alone, "tokens_per_s") + words.compare(ours, static, "tpot_ms"))
        n_past = int(sum(len(prompt) + n / 2 for prompt, n in requests) / len(requests))
        cost = harness.forward_cost(parameters_of(plain), text.vocab_size, B, 1, n_past, args.dtype)
        report.why_step({ours["method"]: cost}, rows)
        steps = {way.name: queueing.slot_steps(lengths, B, way.refill) for way in ways[3:5]}
        in_use = {name: queueing.slots_in_use(runs) for name, runs in steps.items()}
        lines = {name: (range(len(used)), used) for name, used in in_use.items()}
        title = f"{len(requests)} requests, {B} slots"
        report.plot_lines(lines, "step", "slots that generate useful tokens", title)
        report.finish()
