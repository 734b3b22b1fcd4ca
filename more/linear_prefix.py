"""Prefix hits of hybrids: a state can be taken up only exactly where a snapshot of it was kept.

Keys and values of a token stay right whatever follows, so a cache of them can be cut to any beginning that
two texts share. A state of a linear layer holds all that was read, and cannot be cut. So the cache keeps
snapshots of the states at ends of blocks, and a hit goes as far as the longest shared beginning with one.

Exact: a hit gives what computing the text by the same blocks gives, bit for bit. Wins what every prefix cache
wins: prompt tokens that are not computed. Loses against keys and values alone: the tokens between the last
snapshot and the end of what is shared are computed again, and each snapshot is as large as a whole state, in
GPTlite as keys and values of 36 tokens of its layer. Small blocks find more and store more.

Run: python more/linear_prefix.py            (--block-size 64 finds less and stores less)

Source: Zheng et al., SGLang, 2024, and Kwon et al., vLLM, 2023, whose prefix caches serve hybrids as well.
Left out: evicting, and choosing the places of snapshots by where texts have parted before.
"""

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_blocks import block_keys
from gptlite_linear import TextState, linear_layers


class SnapshotCache:
    """What was read of texts, found by their beginnings: keys and values of blocks, states at ends of blocks.

    Keys and values of a block are stored once, however many snapshots there are; states are stored whole, at
    the end of every block whose number `every` divides. Nothing that is stored is ever written to.
    """

    def __init__(self, model, block_size=16, every=1):
        self.model, self.block_size, self.every = model, block_size, every
        self.linear = linear_layers(model)
        self.kv, self.states = {}, {}  # key of a text up to the end of a block: parts of its layers

    def match(self, ids):
        """The longest beginning of ids with a snapshot: its TextState, None where there is none.

        At least one token is left over: its logits have to be computed, they are not stored.
        """
        keys, n = [], 0
        for key in block_keys(ids[:-1], self.block_size):
            if key not in self.kv:
                break
            keys.append(key)
            n = len(keys) if key in self.states else n
        if n == 0:
            return None
        layers = dict(zip(self.linear, self.states[keys[n - 1]], strict=True))
        kv = zip(*(self.kv[key] for key in keys[:n]), strict=True)  # of each full layer the pieces (k, v)
        full = [i for i in range(len(self.model.blocks)) if i not in layers]
        for i, pieces in zip(full, kv, strict=True):
            layers[i] = tuple(torch.cat(parts, dim=-2) for parts in zip(*pieces, strict=True))  # [1, H, S, D]
        return TextState(n * self.block_size, tuple(layers[i] for i in sorted(layers)))

    def copy(self):
        """Another cache that has stored the same so far."""
        other = SnapshotCache(self.model, self.block_size, self.every)
        other.kv, other.states = dict(self.kv), dict(self.states)
        return other

    @torch.no_grad()
    def read(self, ids):
        """Reads a text behind the longest hit and keeps its blocks.

        Args: ids: list of token ids, at least one. Returns: logits of the last piece [1, S, V], the TextState
            behind the text, how many tokens were found. Pieces end with blocks, also in a text that nothing
            is found of, so that what is computed does not depend on what was found. Raises ValueError for no
            tokens, or more than the context has room for, past which keys lose their places.
        """
        n, W = len(ids), self.model.seqlen
        if not 1 <= n <= W:
            raise ValueError(f"a text of {n} tokens does not fit the context of 1 to {W}")
        found = state = self.match(ids)
        start, size = 0 if found is None else found.n_tokens, self.block_size
        tokens = torch.tensor([ids], device=next(self.model.parameters()).device)  # [1, T]
        keys = list(block_keys(ids, size))
        for begin in range(start, len(ids), size):
            logits, state = self.model(tokens[:, begin : begin + size], state)
            if begin // size < len(keys):
                self.keep(keys[begin // size], state)
        return logits, state, start

    def keep(self, key, state):
        """Stores the newest block of a text, whose end it is, and the states if it is their turn."""
        full = [layer for i, layer in enumerate(state.layers) if i not in self.linear]
        self.kv[key] = [tuple(t[..., -self.block_size :, :].clone() for t in kv) for kv in full]
        if state.n_tokens // self.block_size % self.every == 0:
            self.states[key] = [state.layers[i] for i in self.linear]

    def stored(self):
        """Bytes of keys and values, and of snapshots."""
        return [
            sum(t.nbytes for layers in part.values() for layer in layers for t in layer if t is not None)
            for part in (self.kv, self.states)
        ]


if __name__ == "__main__":
    from functools import partial

    import inference_linear as study
    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache
    from gptlite_linear import GatedDelta, GPTlite_Linear
    from main_linear_hybrid import hybrid_layout

    quick = {"n_texts": 3, "prompt_len": 64, "uptrain_steps": 1}
    parser = harness.options(__doc__, 3, quick=quick, prompt_len=200)
    add, number = parser.add_argument, harness.positive_int
    add("--block-size", type=number, default=16, help="tokens between two snapshots")
    add("--n-texts", type=number, default=24, help="texts that share a beginning with one that is stored")
    add("--uptrain-steps", type=harness.count, default=12, help="steps of 8 x 256 tokens of the hybrid")
    with harness.script(parser) as args:
        text, (mha,) = harness.load_text(args), harness.load_models(args, GPTlite_KVCache)
        L, T, size = len(mha.blocks), args.prompt_len, args.block_size
        if not 2 * size <= T <= mha.seqlen:
            raise ValueError(f"--prompt-len {T}: two blocks of {size} up to {mha.seqlen} tokens")
        report = harness.Report(args, "prefix hits of hybrids", mha, text=text)
        model = study.converted(args, text, GatedDelta, hybrid_layout(L, 2))
        model = study.trained_on(args, text, model, "2:1")
        (soft,) = harness.load_models(args, partial(GPTlite_Linear, full_layers=range(L)))

        # What is found: texts that share their first n tokens with a stored one
        stored, *others = text.prompts(args.n_texts + 1, T).tolist()
        shared = [(i + 1) * (T - 1) // args.n_texts for i in range(args.n_texts)]
        asked = [stored[:n] + other[n:] for n, other in zip(shared, others, strict=True)]
        sizes, table, stores = sorted({8, 16, 32, 64, size}), [], {}
        for name, one, each in [("softmax", soft, 1), *(("2:1", model, n) for n in sizes)]:
            cache = stores[name, each] = SnapshotCache(one, each)
            cache.read(stored)
            found = [(state.n_tokens if (state := cache.match(ids)) else 0) for ids in asked]
            exact = all(n == min(m, T - 1) // each * each for n, m in zip(found, shared, strict=True))
            report.check(f"{name}, blocks of {each}: hits end at the last snapshot in what is shared", exact)
            row = {"model": name, "block": each, "found of shared": sum(found) / sum(shared)}
            kv, snapshots = (n_bytes / 1e3 for n_bytes in cache.stored())
            table.append(row | {"kB of keys and values": kv, "kB of snapshots": snapshots})
        report.sweep(f"One text of {T} tokens stored, {args.n_texts} asked for", table)

        cache = stores["2:1", size]  # copied before it is asked: it keeps what it reads
        for ids in (asked[0], asked[-1]):
            hit, state, n = cache.copy().read(ids)
            cold, expected, _ = SnapshotCache(model, size).read(ids)
            pairs = [(hit, cold), *zip(sum(state.layers, ()), sum(expected.layers, ()), strict=True)]
            same = all(torch.equal(a, b) for a, b in pairs)
            report.check(f"found {n} tokens: logits and states to the bit as computed", same)
            whole = model(torch.tensor([ids], device=args.device))[0][:, -hit.shape[1] :].detach()
            report.check_close(f"found {n} tokens: as in one pass", hit, whole)

        # Time to the first token over what is found
        title, steps = f"A prompt of {T} tokens (ms)", [*range(0, T - 1, size)]

        def ways(n):
            ids = stored[: n + 1] + others[0][n + 1 :] if n else others[0]
            empty = SnapshotCache(model, size)
            return {"computed": lambda: empty.copy().read(ids), "found": lambda: cache.copy().read(ids)}

        times = report.time_sweep(title, "tokens found", steps[:: max(len(steps) // 5, 1)], ways)
        lines = {line["block"]: line for line in table if line["model"] == "2:1"}
        share, whole = (line["found of shared"] for line in (lines[size], table[0]))
        figures = f"{share:.0%} of what texts share, keys and values alone {whole:.0%}"
        most, less = (f"Snapshots every {size} tokens find {word}: {figures}." for word in ("most", "little"))
        report.why(words.choose(share, (0.5, most), less))
        ratio = lines[size]["kB of snapshots"] / lines[size]["kB of keys and values"]
        figures = f"{words.number(ratio)} times the bytes of the softmax layers' keys and values"
        more, less = (f"The snapshots take {word}: {figures}." for word in ("more", "less"))
        report.why(words.choose(ratio, (1, more), less))
        report.why(words.crossover(times, "tokens found", "found", "computed"))
        points = {n: (line["kB of snapshots"], line["found of shared"]) for n, line in lines.items()}
        points = {f"blocks of {n}": point for n, point in points.items()} | {"softmax": (0, whole)}
        report.plot_points(points, f"kB of snapshots of {T} tokens", "found, of what is shared")
        report.plot_sweep(title, log="")
        report.finish()
