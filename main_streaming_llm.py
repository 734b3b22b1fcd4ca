"""StreamingLLM: text without end over a cache that never grows, the first tokens and the last ones.

A model that was trained on a context of W tokens reads on with a cache of a few first tokens ("sinks", which
many models give much attention to) and a window of the last ones. Positions are places in the cache: with
rotary positions keys are stored unrotated and rotated anew at each step, so that no position is ever new.

Learned positions, as GPTlite has them, are added before the first layer and cannot be moved. What is left is
to encode the last tokens anew whenever the cache is full: work for a few tokens a token, at almost the loss
of encoding everything anew for each token. New tokens at the last position, or at positions that begin again
from 0 (cyclic), cost one token a token and lose much. Sinks help only a model that has them, so the attention
on the first tokens is measured. A model that is trained on with a sink token: more/streaming_sinks.py.
Approximate against encoding anew, exact below the context.

Run: python main_streaming_llm.py            (--n-texts 8 for fewer texts)

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2024.
"""

import torch
import torch.nn.functional as F

from gptlite_bounded import GPTlite_Bounded, RollingCache
from gptlite_gqa import grouped_attention, grouped_weights

# ---- The paper's form: relative positions, counted in the cache ----


def rotate(x, place):
    """Rotary positions: turns pairs of channels by place [S] times their frequency. x [..., S, D]."""
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=wide) / half)  # [D/2]
    angle = place[:, None] * frequency  # [S, D/2]
    a, b = x[..., :half], x[..., half:]
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class RotarySinkCache(RollingCache):
    """Sinks and a window [B, G, n_global + window, D]; queries and keys come unrotated, one token at a time.

    A key's position is its place among the keys that are held, so there is no gap between sinks and window.
    """

    def places(self):
        """The place of each row that holds a token, oldest first: 0, 1, 2, ... [n]"""
        n = min(self.n_read, self.n_global + self.window)
        return self.token_of[:n].argsort().argsort()

    def attend(self, Q, K, V):
        tokens = zip(*(x.split(1, dim=-2) for x in (Q, K, V)), strict=True)
        return torch.cat([RollingCache.attend(self, *token) for token in tokens], dim=-2)  # [B, H, Sq, D]

    def read(self, q, k, v):
        place = self.places()  # [n]
        return grouped_attention(rotate(q, place.max()[None]), rotate(k, place), v)  # [B, H, 1, D]


# ---- Learned positions: three ways on past the context ----


class GPTlite_Stream(GPTlite_Bounded):
    """GPTlite_Bounded whose tokens past the context get the last position, or begin again from 0 (cyclic)."""

    def __init__(self, *args, cyclic=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.cyclic = cyclic

    def position_of(self, t):
        return t % self.seqlen if self.cyclic else t.clamp(max=self.seqlen - 1)  # [Sq]


def kept_part(tokens, n_kept, n_sinks):
    """The n_sinks first tokens and the last others, n_kept in all: [B, T] -> [B, n_kept]."""
    if not 0 <= n_sinks < n_kept:
        raise ValueError(f"{n_sinks} first tokens of {n_kept} that are kept: the newest must be among them")
    return torch.cat([tokens[:, :n_sinks], tokens[:, tokens.shape[1] - n_kept + n_sinks :]], dim=1)


@torch.no_grad()
def generate_reencode(model, prompt, n_tokens, seqlen, n_kept, n_sinks=0):
    """Greedy decoding with a cache that, when it is full, is emptied and filled with n_kept tokens anew.

    Args: model: GPTlite_KVCache; prompt [B, T], cut to the last seqlen; n_kept: tokens that are encoded again
        at positions 0, 1, ..., n_sinks of them from the text's beginning.
    Returns: prompt and generated tokens [B, T + n_tokens]. Raises ValueError for an empty prompt, or for
        n_kept that leaves no room for a new token.
    """
    if prompt.shape[1] == 0 or n_kept >= seqlen:
        raise ValueError(
            f"a prompt of {prompt.shape[1]} tokens, {n_kept} of {seqlen} kept: no room, or no text"
        )
    tokens, new_tokens, kv_cache = prompt, prompt[:, -seqlen:], None
    for _ in range(n_tokens):
        if kv_cache is not None and kv_cache[0][0].shape[-2] == seqlen:
            new_tokens, kv_cache = kept_part(tokens, n_kept, n_sinks), None  # [B, n_kept]
        logits, kv_cache = model(new_tokens, kv_cache)  # [B, S, V]
        new_tokens = logits[:, -1].argmax(dim=-1, keepdim=True)  # [B, 1]
        tokens = torch.cat([tokens, new_tokens], dim=1)  # [B, T + 1]
    return tokens


@torch.no_grad()
def reencoded_logits(model, texts, n_kept, n_sinks=0):
    """Logits of a text as generate_reencode computes them, a whole filling of the cache at a time.

    Args: model: GPTlite; texts [B, N]. Returns: logits [B, N, V], and how many tokens were encoded.
    """
    pieces, done, n_encoded, (_, N) = [], 0, 0, texts.shape
    filling = texts[:, : model.seqlen]  # [B, S]
    while True:
        logits = model(filling)  # [B, S, V]
        n_new = filling.shape[1] if done == 0 else filling.shape[1] - n_kept + 1  # the newest kept one is new
        pieces.append(logits[:, logits.shape[1] - n_new :])
        done, n_encoded = done + n_new, n_encoded + filling.shape[1]
        if done == N:
            return torch.cat(pieces, dim=1), n_encoded
        following = texts[:, done + 1 : done + 1 + model.seqlen - n_kept]
        filling = torch.cat([kept_part(texts[:, : done + 1], n_kept, n_sinks), following], dim=1)


@torch.no_grad()
def recomputed_logits(model, texts, places):
    """The standard: the logits at these places [n] of texts [B, N], the last seqlen tokens read for each."""
    last = [model(texts[:, max(t + 1 - model.seqlen, 0) : t + 1])[:, -1] for t in places.tolist()]
    return torch.stack(last, dim=1)  # [B, n, V]


# ---- Sinks: how much attention the first tokens get ----


class WatchingCache:
    """Keeps all keys; notes what the second half of the queries gives to the first and to their last keys.

    first, last: shares of the attention; even: the first keys' share if every visible key got the same.
    """

    def __init__(self, n_first=4, n_last=16):
        self.n_first, self.n_last, self.k, self.v, self.keys_total = n_first, n_last, None, None, 0

    def attend(self, Q, K, V):
        weights = grouped_weights(Q, K)  # [B, H, T, T]
        visible = torch.arange(1, K.shape[-2] + 1, device=K.device)  # [T]
        later = slice(K.shape[-2] // 2, None)
        self.first = weights[..., later, : self.n_first].sum(dim=-1).mean().item()
        self.last = 1 - weights.tril(-self.n_last)[..., later, :].sum(dim=-1).mean().item()
        self.even = (self.n_first / visible[later]).mean().item()
        self.k, self.v = K, V
        return grouped_attention(Q, K, V)


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_kvcache import GPTlite_KVCache
    from inference_report import Method
    from inference_utils import loss_difference
    from main_kvcache import generate, generate_kvcache

    quick = {"n_tokens": 20, "n_texts": 2}
    parser = harness.options(__doc__, repeats=2, quick=quick, n_tokens=96)
    parser.add_argument("--n-texts", type=harness.positive_int, default=32, help="streams of 768 tokens")
    columns = {"stream_loss": ("stream loss", "{:.4f}"), "stream_difference": ("difference", "{:+.4f}")}
    columns |= {"stream_se": ("+-", "{:.4f}"), "encoded": ("encoded a token", "{:.2f}")}
    hide = ("kv_bytes_per_token", "tpot_p99_ms", "n_parameters", "valid_loss", "same_output")
    with harness.script(parser) as args:
        text, (plain, cached) = harness.load_text(args), harness.load_models(args, GPTlite, GPTlite_KVCache)
        W, methods, losses = plain.seqlen, [], {}
        # every 16th token of the second half of each text is judged
        texts, places = text.prompts(args.n_texts, 3 * W), torch.arange(3 * W // 2, 3 * W - 1, 16)  # [n, N]
        report = harness.Report(args, "StreamingLLM", plain, columns, hide, text, prompt_len=W - 16)
        first = torch.cat([plain(one).detach() for one in texts[:, :W].split(8)])  # [n, W, V]

        def add(name, function, model, logits, encoded, *more):
            """Adds a method with its logits [n, N, V], or at the places only, and tokens encoded a token."""
            if logits.shape[1] > len(places):
                report.check_close(f"{name}: unchanged within the context", logits[:, :W], first)
                logits = logits[:, places]  # [n, len(places), V]
            judged = F.cross_entropy(logits.float().mT, texts[:, places + 1], reduction="none")
            losses[name] = judged.mean(dim=1).cpu().double()  # [n]
            difference, se = loss_difference(losses[name], losses["recomputed"])
            figures = {"stream_loss": losses[name].mean().item(), "stream_difference": difference}
            figures |= {"stream_se": se, "encoded": encoded, "loss": function is generate}
            methods.append(Method(name, function, model, *more, exact=False, **figures))

        add("recomputed", generate, plain, recomputed_logits(plain, texts, places), W)
        forms = {"last position": (W, 0), "last position, 4 sinks": (W - 4, 4), "cyclic": (W, 0)}
        for name, sizes in forms.items():
            make = partial(GPTlite_Stream, make_cache=partial(RollingCache, *sizes), cyclic=name == "cyclic")
            (model,) = harness.load_models(args, make)
            logits = torch.cat([model(one)[0] for one in texts[:, :-1].split(4)])  # [n, N - 1, V]
            add(name, generate_kvcache, model, logits, 1.0)
        for sizes in ((64, 0), (128, 0), (128, 4)):
            logits, n_encoded = reencoded_logits(plain, texts[:, :-1], *sizes)
            name = f"re-encode {sizes[0]}" + (f", {sizes[1]} sinks" if sizes[1] else "")
            add(name, generate_reencode, cached, logits, n_encoded / logits.shape[1], W, *sizes)
        rows = report.compare(text.prompts(1, W - 16), args.n_tokens, *methods, label="")

        make = partial(GPTlite_Bounded, make_cache=WatchingCache)
        layers = harness.load_models(args, make)[0](texts[:, :W])[1].layers
        mass = [{"layer": i, "first 4": c.first, "if even": c.even} for i, c in enumerate(layers)]
        mass = [row | {"last 16": c.last} for row, c in zip(mass, layers, strict=True)]
        report.sweep("Attention that the second half of a context gives to its keys (shares)", mass)

        def between(one, other):
            return words.loss_between(one, other, *loss_difference(losses[one], losses[other]))

        report.why(between("re-encode 64", "recomputed") + between("last position", "re-encode 64"))
        report.why(
            between("last position, 4 sinks", "last position")
            + between("re-encode 128, 4 sinks", "re-encode 128")
        )
        keys = "tokens_per_s", "forward_tokens"
        one, other = (words.compare(rows["re-encode 64"], rows["recomputed"], key) for key in keys)
        report.why(one + other)
        ratio = max(row["first 4"] / row["if even"] for row in mass)
        told = f"the first 4 tokens get at most {ratio:.2g} times their even share of attention in any layer."
        report.why(
            words.choose(ratio, (4, f"The model has sinks: {told}"), f"The model has no sinks: {told}")
        )
        points = {name: (row["encoded"], row["stream_loss"]) for name, row in rows.items()}
        report.plot_points(points, "tokens encoded for each token", "loss past the context (nats)")
        report.plot_steps(["recomputed", "last position", "re-encode 64"])
        report.finish()
