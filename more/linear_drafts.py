"""Drafts for hybrids: what a rejected draft did to a state cannot be cut off, so there must be a way back.

A pass reads several tokens that were only guessed; behind those that the model would not have chosen itself,
the text must go on as if they had never been read. Keys and values are cut by their number. A state is not:
from the one in front of the draft, which is still there, the accepted tokens are read again; or the linear
layers alone repeat their work, from inputs that were kept; or a snapshot was taken behind every token.

Exact: the tokens are those of plain decoding. Wins passes where a text repeats itself, as every draft does.
Loses against keys and values, whose way back is free: a second pass behind a rejected draft, or some work in
the linear layers, or bytes, as each snapshot is as large as a whole state. A pass over a draft takes more
time than one over a token, so drafts that are seldom right lose.

Run: python more/linear_drafts.py            (--n-draft 8 for longer drafts)

Source: Wang et al., The Mamba in the Llama, 2024 (repeated work); Saxena, Prompt Lookup Decoding, 2023 (the
drafts); Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023.
"""

import contextlib
from functools import partial

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_linear import TextState, linear_layers


@contextlib.contextmanager
def inputs_of_linear_layers(model):
    """Inside, the dictionary that it gives holds what the linear layers read last: {block: [1, T, E]}."""
    seen, hooks = {}, []
    for i in linear_layers(model):
        note = partial(lambda i, _mha, inputs: seen.__setitem__(i, inputs[0]), i)
        hooks.append(model.blocks[i].mha.register_forward_pre_hook(note))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


class Again:
    """The model reads the accepted tokens again: nothing is kept but the state in front of them."""

    def keep(self, model, state, inputs):
        return {}

    def back(self, model, state, tokens, after, kept):
        """The TextState behind tokens [1, S], the accepted ones; state: in front; after: behind all."""
        return model(tokens, state)[1]


class Repeat(Again):
    """The linear layers alone do their work on the accepted tokens again, from inputs that were kept."""

    def keep(self, model, state, inputs):
        return dict(inputs)

    def layer(self, model, state, i, n, kept):
        """The cache of linear block i behind n tokens."""
        return model.blocks[i].mha(kept[i][:, :n], state.layers[i])[1]

    def back(self, model, state, tokens, after, kept):
        n, total = tokens.shape[1], state.n_tokens + tokens.shape[1]
        layers = [
            self.layer(model, state, i, n, kept) if i in kept else tuple(t[..., :total, :] for t in layer)
            for i, layer in enumerate(after.layers)
        ]
        return TextState(total, tuple(layers))


class Snapshots(Repeat):
    """A snapshot behind every token of a draft, made before it is known which of them are needed."""

    def keep(self, model, state, inputs):
        kept = {i: [state.layers[i]] for i in inputs}
        for i, x in inputs.items():
            for one in x.split(1, dim=1):  # [1, 1, E]
                kept[i].append(model.blocks[i].mha(one, kept[i][-1])[1])
        return kept

    def layer(self, model, state, i, n, kept):
        return kept[i][n]


def flat(state):
    """All numbers of a TextState, one behind the other."""
    return torch.cat([t.flatten().float() for layer in state.layers for t in layer if t is not None])


def kept_bytes(kept):
    """Bytes of what a way back keeps beside the state in front of a draft."""
    parts = [part[1:] if isinstance(part, list) else [(part,)] for part in kept.values()]
    return sum(t.nbytes for caches in parts for cache in caches for t in cache if t is not None)


@torch.no_grad()
def read_draft(model, state, tokens, way):
    """Reads a pending token and a draft behind it, and goes back to where the model would go on otherwise.

    Args: state: TextState in front of tokens [1, 1 + n].
    Returns: what follows the pending token (accepted tokens, then the model's own), a list; the TextState
        behind all of them but the last.
    """
    with inputs_of_linear_layers(model) as inputs:
        logits, after = model(tokens, state)
    kept = way.keep(model, state, inputs)
    chosen = logits[0].argmax(dim=-1)  # [1 + n]
    n = (chosen[:-1] == tokens[0, 1:]).cumprod(dim=0).sum().item()  # accepted
    if n + 1 < tokens.shape[1]:
        after = way.back(model, state, tokens[:, : n + 1], after, kept)
    return chosen[: n + 1].tolist(), after


WAYS = {"again": Again(), "repeat": Repeat(), "snapshots": Snapshots()}


def look_up(ids, n_draft, n_match=3):
    """A draft: the up to n_draft tokens that followed the last n_match where they last stood before."""
    for start in range(len(ids) - n_match - 1, -1, -1):
        if ids[start : start + n_match] == ids[-n_match:]:
            return ids[start + n_match :][:n_draft]
    return []


@torch.no_grad()
def generate_drafted(model, prompt, n_tokens, seqlen, way, n_draft=4):
    """Greedy decoding with drafts that are looked up in the text itself.

    Args: model: GPTlite_Linear; prompt: token ids [1, T]. Returns: [1, T + n_tokens].
    Raises ValueError for several prompts, and past the context, where keys can no longer be cut.
    """
    if len(prompt) != 1 or prompt.shape[1] + n_tokens > seqlen + 1:
        raise ValueError(f"one prompt that with its answer fits {seqlen} tokens, not {list(prompt.shape)}")
    (logits, state), ids = model(prompt), prompt[0].tolist()
    end = len(ids) + n_tokens
    ids += logits[0, -1:].argmax(dim=-1).tolist()
    while len(ids) < end:
        draft = look_up(ids, min(n_draft, end - len(ids) - 1))
        new, state = read_draft(model, state, torch.tensor([ids[-1:] + draft], device=prompt.device), way)
        ids += new
    return torch.tensor([ids[:end]], device=prompt.device)


if __name__ == "__main__":
    import inference_linear as study
    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache
    from gptlite_linear import GatedDelta, GPTlite_Linear
    from inference_report import Method
    from main_kvcache import generate_kvcache
    from main_linear_hybrid import hybrid_layout

    quick = {"n_tokens": 16, "uptrain_steps": 1}
    parser = harness.options(__doc__, 3, quick=quick, prompt_len=128, n_tokens=96)
    add = parser.add_argument
    add("--n-draft", type=harness.positive_int, default=4, help="tokens of a draft at most")
    add("--uptrain-steps", type=harness.count, default=12, help="steps of 8 x 256 tokens of the hybrid")
    with harness.script(parser) as args:
        text, (mha,) = harness.load_text(args), harness.load_models(args, GPTlite_KVCache)
        L, W, n = len(mha.blocks), mha.seqlen, args.n_draft
        prompts, T = text.prompts(1, args.prompt_len), args.prompt_len  # [1, T]
        if T + max(args.n_tokens, 2 * n + 2) > W:
            raise ValueError(f"--prompt-len {T} with --n-tokens, or two drafts, is more than {W} tokens")
        (soft,) = harness.load_models(args, partial(GPTlite_Linear, full_layers=range(L)))
        model = study.converted(args, text, GatedDelta, hybrid_layout(L, 2))
        columns = {"n_steps": ("passes", "{}"), "kept_bytes": ("kept bytes", "{:,}")}
        hide = ("tpot_ms", "tpot_p99_ms", "kv_bytes_per_token", "n_parameters")
        report = harness.Report(args, "drafts for hybrids", soft, columns, hide, text)
        model = study.trained_on(args, text, model, "2:1")

        # A draft that is rejected at its first token, at its second, and so on, and one that is not
        with torch.no_grad():
            own, before = generate_kvcache(model, prompts, 2 * n + 2, W)[0], model(prompts)[1]  # [T + 2n + 2]
        for way, how in WAYS.items():
            right, behind, state = True, [], before
            for j in range(n + 1):
                draft = own[T : T + n + 1].clone()  # the pending token, and n that the model would choose
                draft[j + 1 :] = (draft[j + 1 :] + 1) % text.vocab_size
                new, after = read_draft(model, before, draft[None], how)
                right &= new == own[T + 1 : T + j + 2].tolist()
                state = model(own[None, T + j : T + j + 1], state)[1]  # token by token
                behind += [(flat(after).detach(), flat(state).detach())]
            report.check(f"{way}: what is accepted, for a draft rejected at any token", right)
            pair = (torch.cat(side) for side in zip(*behind, strict=True))
            report.check_close(f"{way}: states are those of the accepted text alone", *pair)

        def kept(how, m):  # bytes beside the state in front of a draft of m tokens
            with torch.no_grad(), inputs_of_linear_layers(model) as inputs:
                model(own[None, T : T + m + 1], before)
                return kept_bytes(how.keep(model, before, inputs))

        table = [{"tokens": m} | {way: kept(how, m) for way, how in WAYS.items()} for m in (1, n, 2 * n)]
        report.sweep("Bytes kept for the way back over a draft, beside the state in front of it", table)

        # The same tokens, whichever way leads back
        rows = {}
        for name, one, ways in (("softmax", soft, {"cut": Repeat()}), ("2:1", model, WAYS)):
            methods = [Method(name, generate_kvcache, one)]
            for way, how in ways.items():
                figures = {"kept_bytes": 0 if one is soft else kept(how, n), "loss": False}
                methods.append(Method(f"{name}, {way}", generate_drafted, one, W, how, n, **figures))
            rows |= report.compare(prompts, args.n_tokens, *methods, label="")
        pairs = ("softmax, cut", "softmax"), ("2:1, repeat", "2:1"), ("2:1, repeat", "2:1, again")
        cut, repeat, again = (words.compare(rows[a], rows[b], "tokens_per_s") for a, b in pairs)
        report.why(cut + repeat)
        report.why(again + words.compare(rows["2:1, repeat"], rows["2:1, again"], "forward_tokens"))
        passes = [rows[name] | {"passes": rows[name]["n_steps"]} for name in ("2:1, repeat", "2:1")]
        report.why(words.compare(*passes, "passes"))
        report.why(words.at_size(table[1], "tokens", "repeat", "snapshots", "kept bytes"))
        points = {name: (row["forward_tokens"], row["tokens_per_s"]) for name, row in rows.items()}
        report.plot_points(points, "tokens that went through the model", "tokens/s")
        report.finish()
