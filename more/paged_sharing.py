"""Sharing of KV blocks: samples and beams of one prompt keep it once, and copy a block only to write into it.

Several answers to one prompt begin alike. With block tables (gptlite_paged.py) a fork is a copy of the table
and a count for each block; who then writes into a block that others use too gets a copy of that one block.
Beams fork and end at every step, and no text moves. Exact: every sample and beam gets the tokens and the
score that it gets in a cache of its own.

Wins memory by as much of the prompt as full blocks hold, and the copies of whole texts that beams in rows of
their own make at every step. Loses nothing but the books; saves nothing where a prompt is shorter than a
block, and rows copy less while a text is shorter than about one block. Samples that share a prompt compute it
once: on a GPU, where a step of several prompts costs what one does, memory alone is saved.

Run: python more/paged_sharing.py            (--n-answers 8 for more beams, --prompt-len 16 shares little)

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
Left out: preempting all answers of a request together (PagedScheduler runs forks too, but each is a sequence
of its own, and computing it anew ends its sharing).
"""

import torch
import torch.nn.functional as F

import _root  # noqa: F401 (the files above become importable)
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

    Args: scores: log probabilities of the texts so far [k]; logits of their next tokens [k, V]. Where there
    are fewer continuations than beams (six beams, a vocabulary of five), all of them are the best.
    """
    total = scores[:, None] + F.log_softmax(logits.cpu().double(), dim=-1)  # [k, V]
    best = total.flatten().topk(min(n_beams, total.numel()))
    return best.indices // total.shape[1], best.indices % total.shape[1], best.values


def beam_search(model, pool, sequence, n_beams):
    """The most probable continuations that a search over n_beams texts finds; it forks, and no text moves.

    Args: model: GPTlite_Paged; pool: SharingPool; sequence: a new one; n_beams: at least 1.
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
    from functools import partial

    import inference_report as harness
    import inference_utils as utils
    import inference_words as words
    from gptlite_kvcache import GPTlite_StaticKVCache, StaticKVCache
    from gptlite_paged import GPTlite_Paged
    from inference_serving import PagedScheduler, all_free, serve

    quick = {"prompt_len": 27, "n_tokens": 12}
    parser = harness.options(__doc__, repeats=3, quick=quick, prompt_len=131, n_tokens=64)
    parser.add_argument("--n-answers", type=harness.positive_int, default=4, help="beams, and samples")
    parser.add_argument("--block-size", type=harness.positive_int, default=16, help="tokens of a block")
    with harness.script(parser) as args:
        k, size, T, n = args.n_answers, args.block_size, args.prompt_len, args.n_tokens
        text, classes = harness.load_text(args), (GPTlite_StaticKVCache, GPTlite_Paged)
        static, paged = harness.load_models(args, *classes)
        if T + n > paged.seqlen:
            raise ValueError(f"--prompt-len {T} and --n-tokens {n}: at most {paged.seqlen} together")
        if n < 2 or k < 2:
            raise ValueError(f"--n-tokens {n}, --n-answers {k}: at least 2, or nothing is forked and shared")
        prompt = text.prompts(1, T)  # [1, T]
        full, most = T // size, -(-(T + n - 1) // size)  # blocks that all share, blocks of an answer
        columns = {"n_blocks": ("blocks held", "{}"), "n_unshared": ("without sharing", "{}")}
        columns |= {"n_copied": ("copies", "{}"), "copied_mb_per_step": ("copied MB/step", "{:.2f}")}
        report = harness.Report(args, "sharing of KV blocks", paged, columns, n_answers=k, block_size=size)
        token_bytes, clean = BlockPool(paged, 1, 1).kv.nbytes, []  # of all layers

        def beams_in_rows(model):
            cache = StaticKVCache(model, k, T + n)
            tokens, scores, n_moved = beam_search_contiguous(model, cache, prompt.to(cache.k.device), n)
            return tokens.tolist(), scores, {"copied_mb_per_step": n_moved * token_bytes / n / 1e6}

        def samples_apart(model):
            scheduler = PagedScheduler(model, BlockPool(model, k * most, size), watermark=0, temperature=1.0)
            outputs = serve(scheduler, [(prompt[0], n)] * k)
            return [output.tolist() for output in outputs], torch.zeros(k), {"n_blocks": k * most}

        def in_blocks(search, model):
            pool = SharingPool(model, full + k * (most - full), size)  # no room for the prompt k times
            sequences, scores = search(model, pool, Sequence(0, prompt[0].tolist(), T + n))
            held, unshared = pool.n_blocks - len(pool.free), sum(len(one.table) for one in sequences)
            figures = {"n_blocks": held, "n_unshared": unshared, "n_copied": pool.n_copied}
            figures["copied_mb_per_step"] = pool.n_copied * size * token_bytes / n / 1e6
            for one in sequences:
                pool.drop(one)
            clean.append(all_free(pool))
            return [one.ids for one in sequences], scores, figures

        def samples(model, pool, sequence):
            return parallel_samples(model, pool, sequence, range(1, k)), torch.zeros(k)

        ways = {"beams in rows": (beams_in_rows, static), "samples apart": (samples_apart, paged)}
        ways["beams in blocks"] = partial(in_blocks, partial(beam_search, n_beams=k)), paged
        ways["samples in blocks"] = partial(in_blocks, samples), paged
        double = [model.cpu().double() for model in harness.load_models(args, *classes, packed=False)]
        exact = {name: way(double[m is paged]) for name, (way, m) in ways.items()}
        runs = {name: utils.TimedMethod(name, partial(way, m), [m]) for name, (way, m) in ways.items()}
        results, rows = utils.measure(list(runs.values()), k * n, args.repeats), {}
        for one, other in (("beams in rows", "beams in blocks"), ("samples apart", "samples in blocks")):
            (ids, scores, _), (same_ids, same_scores, _) = exact[one], exact[other]
            same = ids == same_ids and torch.allclose(scores, same_scores, rtol=0, atol=1e-9)
            report.check(f"float64: {other} are the {one}", same)
            for name in (one, other):
                figures = results[name].output[2] | {"kv_bytes_per_token": token_bytes, "same_output": same}
                figures["peak_memory_mb"] = utils.peak_memory_mb(runs[name].run, *runs[name].models)
                rows[name] = report.row(name, results[name], baseline=name == one, **figures)
        in_rows, of_beams, apart, of_samples = rows.values()
        together = of_samples["n_blocks"] == full + k * (most - full)
        report.check(f"{k} samples hold {full} blocks together and {most - full} each", together)
        report.check(f"a step copies {k - 1} blocks at most", of_beams["n_copied"] <= (k - 1) * (n - 1))
        report.check("at the end all blocks are free and all reference counts zero", all(clean))
        report.why(words.compare(of_beams, in_rows) + words.compare(of_beams, in_rows, "peak_memory_mb"))
        report.why(words.compare(of_samples, apart, "ttft_ms"))
        blocks = ({**row, "Blocks held": row["n_blocks"]} for row in (of_samples, apart))
        report.why(words.compare(*blocks, "Blocks held"))
        held = {name: row["n_blocks"] for name, row in rows.items() if "n_blocks" in row}
        report.plot_lines({"": (list(held), list(held.values()))}, "", f"blocks of {size} tokens held")
        report.finish()
