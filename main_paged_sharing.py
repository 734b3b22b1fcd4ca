"""Sharing of KV blocks: samples and beams of one prompt keep it once, and copy a block only to write into it.

Several answers to one prompt begin alike. With block tables (gptlite_paged.py) a fork is a copy of the table
and a count for each block; who then writes into a block that others use too gets a copy of that one block.
Beams fork and end at every step, and no text moves. Exact: every sample and beam gets the tokens and the
score that it gets in a cache of its own.

Run: python main_paged_sharing.py            (--n-answers 8 for more beams, --prompt-len 16 shares little)

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
Left out: preempting all answers of a request together (in main_paged_attention.py, whose scheduler runs
forks too, each is a sequence of its own, and computing it anew ends its sharing).
"""

import torch
import torch.nn.functional as F

from gptlite_paged import BlockPool, Sequence, choose_tokens


class SharingPool(BlockPool):
    """A BlockPool in which sequences share blocks, and a shared block is copied before it is written.

    Only a text's last block can be partly filled, so a fork costs one copy at most, made by whoever writes
    first. What needs room for a sequence asks n_missing() and calls grow(), so nothing else has to know.
    """

    def __init__(self, model, n_blocks, block_size=16):
        super().__init__(model, n_blocks, block_size)
        self.n_copied = 0  # blocks

    def fork(self, sequence, request):
        """A second continuation of the same text, under another request number; it shares all blocks."""
        self.share(sequence.table)
        ids, table = list(sequence.ids), list(sequence.table)
        return Sequence(request, ids, sequence.end, sequence.n_prompt, sequence.done, table)

    def shared_places(self, sequence, n):
        """Places in the table whose blocks the next n tokens are written into although others use them."""
        table, first = sequence.table, sequence.done // self.block_size
        stop = min(self.blocks_for(sequence.done + n), len(table))
        return [place for place in range(first, stop) if self.ref[table[place]] > 1]

    def n_missing(self, sequence, n):
        """How many free blocks grow(sequence, n) takes."""
        return super().n_missing(sequence, n) + len(self.shared_places(sequence, n))

    def grow(self, sequence, n):
        """Room for n more tokens in blocks of its own: copy on write, then new blocks.

        Raises ValueError, before any change, if too few are free.
        """
        places, blocks = self.shared_places(sequence, n), self.allocate(self.n_missing(sequence, n))
        for place, block in zip(places, blocks, strict=False):
            self.kv[:, block] = self.kv[:, sequence.table[place]]  # [L, block_size, 2, H, D]
            self.release([sequence.table[place]])
            sequence.table[place] = block
        sequence.table += blocks[len(places) :]
        self.n_copied += len(places)


def parallel_samples(model, pool, sequence, requests, temperature=1.0, seed=0):
    """Several answers to one prompt, which is computed and kept once.

    Args: model: GPTlite_Paged; pool: SharingPool; sequence: a new one; requests: a number for each further
        answer, which its noise depends on.
    Returns: the sequences; they still hold their blocks (pool.drop gives them back).
    """
    pool.grow(sequence, sequence.pending)
    _, logits = model.step(pool, [(sequence, sequence.pending)])  # [1, V]
    samples = [sequence, *(pool.fork(sequence, request) for request in requests)]
    logits = logits.expand(len(samples), -1)  # [k, V]
    while not sequence.finished:
        for sample, token in zip(samples, choose_tokens(logits, samples, temperature, seed), strict=True):
            sample.ids.append(token)
        if not sequence.finished:
            for sample in samples:
                pool.grow(sample, 1)
            _, logits = model.step(pool, [(sample, 1) for sample in samples])  # [k, V]
    return samples


def best_continuations(scores, logits, n_beams):
    """The best of all k * V continuations: (parents, tokens, scores), each a tensor [n_beams].

    Args: scores: log probabilities of the texts so far [k]; logits of their next tokens [k, V].
    """
    total = scores[:, None] + F.log_softmax(logits.cpu().double(), dim=-1)  # [k, V]
    best = total.flatten().topk(n_beams)
    return best.indices // total.shape[1], best.indices % total.shape[1], best.values


def beam_search(model, pool, sequence, n_beams):
    """The most probable continuations that a search over n_beams texts finds; it forks, and no text moves.

    Args: model: GPTlite_Paged; pool: SharingPool; sequence: a new one; n_beams: 1 to the vocabulary's size.
    Returns: (beams, scores [n_beams]), the best first; the beams still hold their blocks.
    """
    beams, scores = [sequence], torch.zeros(1, dtype=torch.float64)
    while not beams[0].finished:
        for beam in beams:
            pool.grow(beam, beam.pending)
        _, logits = model.step(pool, [(beam, beam.pending) for beam in beams])  # [k, V]
        parents, tokens, scores = best_continuations(scores, logits, n_beams)
        children = [pool.fork(beams[parent], sequence.request) for parent in parents.tolist()]
        for beam in beams:  # those without children give their blocks back
            pool.drop(beam)
        for child, token in zip(children, tokens.tolist(), strict=True):
            child.ids.append(token)
        beams = children
    return beams, scores


@torch.no_grad()
def beam_search_contiguous(model, cache, prompt, n_tokens):
    """The baseline: each beam has a row of a StaticKVCache, and takes over all of its parent's at each step.

    Args: model: GPTlite_StaticKVCache; prompt [1, T].
    Returns: (token ids [n_beams, T + n_tokens], scores [n_beams], tokens whose keys and values were copied).
    """
    cache.reset()
    n_beams, n_copied = cache.k.shape[1], 0
    tokens = new = prompt.expand(n_beams, -1)  # [n_beams, T]
    scores = torch.full((n_beams,), float("-inf"), dtype=torch.float64)
    scores[0] = 0.0  # the first step has one text
    for _ in range(n_tokens):
        logits, _ = model(new, cache)  # [n_beams, S, V]
        parents, chosen, scores = best_continuations(scores, logits[:, -1], n_beams)
        new = chosen[:, None].to(prompt.device)  # [n_beams, 1]
        tokens = torch.cat([tokens[parents], new], dim=1)  # [n_beams, S + 1]
        for rows in (cache.k[..., : cache.length, :], cache.v[..., : cache.length, :]):
            rows.copy_(rows[:, parents])  # [L, n_beams, H, S, D]
        n_copied += n_beams * cache.length
    return tokens, scores, n_copied


if __name__ == "__main__":
    from copy import deepcopy
    from functools import partial

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import GPTlite_StaticKVCache, StaticKVCache
    from gptlite_paged import GPTlite_Paged
    from inference_serving import PagedScheduler, serve

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument("--n-answers", type=rep.positive_int, default=4, help="beams, and samples")
    parser.add_argument("--block-size", type=rep.positive_int, default=16, help="tokens of a block")
    parser.add_argument("--prompt-len", type=rep.positive_int, help="tokens of the prompt (default: 131)")
    parser.add_argument("--n-tokens", type=rep.positive_int, help="new tokens of an answer (default: 64)")
    with rep.script(parser) as args:
        p, dev, k, size = get_gptlite_model_parameters(), args.device, args.n_answers, args.block_size
        T, n = args.prompt_len or (27 if args.quick else 131), args.n_tokens or (12 if args.quick else 64)
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        if T + n > p.seqlen:
            raise ValueError(f"--prompt-len {T} and --n-tokens {n}: at most {p.seqlen} together, the context")
        if n < 2:
            raise ValueError(f"--n-tokens {n}: at least 2, as the first is chosen before anything forks")
        if not 2 <= k <= vocab_size:
            raise ValueError(f"--n-answers {k}: 2 to {vocab_size}, the characters of the first step")
        static, paged = (
            utils.load_model(c, vocab_size, args.checkpoint).to(dev, args.dtype)
            for c in (GPTlite_StaticKVCache, GPTlite_Paged)
        )
        prompt = utils.sample_prompts(valid_data, 1, T).to(dev)  # [1, T]
        full, most = T // size, -(-(T + n - 1) // size)  # blocks that all share, blocks of an answer
        columns = {"n_blocks": ("blocks held", "{}"), "n_unshared": ("without sharing", "{}")}
        columns |= {"n_copied": ("copies", "{}"), "copied_mb_per_step": ("copied MB/step", "{:.2f}")}
        config = {"batch_size": k, "block_size": size, "prompt_len": T, "n_tokens": n}
        report = rep.Report(args, "sharing of KV blocks", paged, columns, **config)
        token_bytes, clean = BlockPool(paged, 1, 1).kv.nbytes, []

        # Ways to get k answers; each returns their tokens, the scores of beams, and figures

        def beams_in_rows(m):
            cache = StaticKVCache(m, k, T + n)
            tokens, scores, n_moved = beam_search_contiguous(m, cache, prompt.to(cache.k.device), n)
            return tokens.tolist(), scores, {"copied_mb_per_step": n_moved * token_bytes / n / 1e6}

        def shared(search, m):
            pool = SharingPool(m, full + k * (most - full), size)  # no room for the prompt k times
            sequences, scores = search(m, pool, Sequence(0, prompt[0].tolist(), T + n))
            figures = {"n_blocks": pool.n_blocks - len(pool.free), "n_copied": pool.n_copied}
            figures["n_unshared"] = sum(len(sequence.table) for sequence in sequences)
            figures["copied_mb_per_step"] = pool.n_copied * size * token_bytes / n / 1e6
            for sequence in sequences:
                pool.drop(sequence)
            clean.append(len(pool.free) == pool.n_blocks and not any(pool.ref))
            return [sequence.ids for sequence in sequences], scores, figures

        def samples_apart(m):
            scheduler = PagedScheduler(m, BlockPool(m, k * most, size), watermark=0, temperature=1.0)
            outputs = serve(scheduler, [(prompt[0], n)] * k)
            return [output.tolist() for output in outputs], None, {"n_blocks": k * most}

        def search_samples(*how):
            return parallel_samples(*how, range(1, k)), None

        ways = {"beams in rows": (beams_in_rows, static)}
        ways |= {"beams in blocks": (partial(shared, partial(beam_search, n_beams=k)), paged)}
        ways |= {"samples apart": (samples_apart, paged)}
        ways |= {"samples in blocks": (partial(shared, search_samples), paged)}
        exact = {m: deepcopy(m).to("cpu", torch.float64) for m in (static, paged)}
        (tokens, scores, _), beams, (samples, *_), forks = (way(exact[m]) for way, m in ways.values())
        same_scores = torch.allclose(beams[1], scores, rtol=0, atol=1e-9)
        same = {"beams in blocks": beams[0] == tokens and same_scores}
        same["samples in blocks"] = forks[0] == samples
        report.check("float64: the same beams and scores in blocks as in rows", same["beams in blocks"])
        report.check(f"float64: {k} samples are what each is apart", same["samples in blocks"])

        methods = [utils.Method(name, partial(way, m), [m]) for name, (way, m) in ways.items()]
        results, figures = utils.measure(methods, k * n, args.repeats), {}
        for name, method in zip(ways, methods, strict=True):
            figures[name] = results[name].output[2] | {"kv_bytes_per_token": token_bytes}
            figures[name]["peak_memory_mb"] = utils.peak_memory_mb(method.run, *method.models)
            figures[name]["same_output"] = same.get(name, True)
            report.row(name, results[name], baseline=name not in same, **figures[name])
        in_rows, of_beams, apart, of_samples = figures.values()
        name = f"{k} samples hold {full} blocks together and {most - full} each"
        report.check(name, of_samples["n_blocks"] == full + k * (most - full))
        few = of_beams["n_copied"] <= (k - 1) * (n - 1)
        report.check(f"a step of {k} beams copies {k - 1} blocks at most", few)
        report.check("at the end all blocks are free and all reference counts zero", all(clean))

        rows, blocks, alone, together = results.values()
        limits, moved = rep.measure_ceilings(dev, args.dtype), in_rows["copied_mb_per_step"]
        bound = rep.lower_bound_ms(rep.forward_cost(p, vocab_size, k, 1, T + n // 2, args.dtype), limits)
        report.why(
            f"Beams in rows copy whole texts, {moved:.2f} MB a step, of {rows.tpot_ms:.1f} ms at least "
            f"{2e9 * moved / limits.bytes_per_s:.1f} to read and write; in blocks only a last block that two "
            f"texts continue, {of_beams['copied_mb_per_step']:.2f} MB. A step in blocks takes "
            f"{blocks.tpot_ms:.1f} ms ({bound:.1f} at least, {rep.share_of(bound, blocks.tpot_ms)} "
            "reached): here attention gathers the texts first, which a kernel that reads blocks does not. "
            f"Rows copy less only while a text is shorter than {size * (k - 1) / k:.0f} tokens."
        )
        saved = 1 - of_samples["n_blocks"] / apart["n_blocks"]
        report.why(
            f"The prompt's {full} full blocks are kept once: {k} samples hold {of_samples['n_blocks']} "
            f"blocks instead of {apart['n_blocks']} ({saved:.0%} less), beams {of_beams['n_blocks']}, which "
            "share what was generated before they parted, too. Samples save nothing where a prompt is "
            f"shorter than {size} tokens, and little where answers are much longer than the prompt."
        )
        speedup = together.tokens_per_s / alone.tokens_per_s
        report.why(
            f"Samples that share a prompt compute {together.forward_tokens} tokens instead of "
            f"{alone.forward_tokens}, and the first comes after {together.ttft_ms:.0f} ms instead of "
            f"{alone.ttft_ms:.0f}. All later steps compute the same: {speedup:.2f} times the tokens/s in "
            f"all. Where a step of {k * T} tokens costs what one of {T} does (GPUs), memory alone is saved."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            held = {name: row["n_blocks"] for name, row in figures.items() if "n_blocks" in row}
            axes.bar(list(held), list(held.values()))
            axes.set(ylabel=f"blocks of {size} tokens", title=f"{k} answers of {n} tokens to a prompt of {T}")
            rep.save_figure(figure, args.plot)
        report.finish()
