"""Attention sinks within the context: what a window loses without the first tokens, and a token made for it.

A query must give its attention to something. Large models give what they do not need to their first tokens,
so a window that has lost those loses far more than their content was worth. GPTlite was trained on texts cut
anywhere. Here it is trained on with a learned vector in front of every text, without a position: a key that
is always there and says nothing. Within the context no position is out of place, so what is lost is lost by
the missing keys alone.

Approximate: a window against all keys, of the same weights. Wins where much attention lies on the first keys,
which the report measures by layer; loses a slot of the cache to each sink where it does not.

Run: python more/streaming_sinks.py            (--uptrain-steps 200 for more training)

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2024 (section 3.3: a learnable
sink token in training).
"""

import torch
import torch.nn as nn

import _root  # noqa: F401 (the files above become importable)
from gptlite import GPTlite
from gptlite_bounded import GPTlite_Bounded


class GPTlite_Sink(GPTlite):
    """GPTlite with a learned vector in front of every text, without a position and without a prediction."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sink = nn.Parameter(0.02 * torch.randn(self.token_embedding.weight.shape[1]))  # [E]

    def forward(self, x):
        T = x.shape[1]
        if not 1 <= T <= self.seqlen:
            raise ValueError(f"a sequence of {T} tokens does not fit the context of 1 to {self.seqlen}")
        tokens = self.token_embedding(x) + self.position_embedding.weight[:T]  # [B, T, E]
        x = torch.cat([self.sink.expand(len(x), 1, -1), tokens], dim=1)  # [B, 1 + T, E]
        for block in self.blocks:
            x = block(x)  # [B, 1 + T, E]
        return self.fc_out(self.ln(x[:, 1:]))  # [B, T, V]


class GPTlite_SinkStream(GPTlite_Bounded):
    """The same over caches: the sink is their token 0, which RollingCache keeps with n_global = 1."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sink = nn.Parameter(torch.zeros(self.token_embedding.weight.shape[1]))  # [E]

    def embed(self, x, t):
        tokens = super().embed(x, t)  # [B, Sq, E]
        return tokens if t[0] > 0 else torch.cat([self.sink.expand(len(x), 1, -1), tokens], dim=1)


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from gptlite_bounded import RollingCache
    from inference_training import UPTRAIN_LR, uptrained, use_training_attention
    from inference_utils import cached_logits, load_checkpoint, loss_difference
    from main_streaming_llm import WatchingCache

    parser = harness.options(__doc__, repeats=None, quick={"uptrain_steps": 1, "n_keys": 32})
    add = parser.add_argument
    add("--n-keys", type=harness.positive_int, default=64, help="keys of a query, sinks among them")
    add("--uptrain-steps", type=harness.positive_int, default=60, help="steps of 8 x 256 tokens")
    with harness.script(parser) as args:
        text, state, n = harness.load_text(args), load_checkpoint(args.checkpoint), args.n_keys
        plain = harness.build(args, state, GPTlite, packed=False)
        report, W = harness.Report(args, "attention sinks", plain, text=text), plain.seqlen
        if not 5 <= n <= W:
            raise ValueError(f"--n-keys is 5 to {W}, the context")
        training, steps = (text.train, args.uptrain_steps, UPTRAIN_LR, 8, W), f"{args.uptrain_steps} steps"
        control = uptrained(use_training_attention(plain), *training)
        start = state | {"sink": 0.02 * torch.randn(state["ln.weight"].shape)}
        sink = uptrained(
            use_training_attention(harness.build(args, start, GPTlite_Sink, packed=False)), *training
        )

        # (class over caches, weights, tokens that are kept in front)
        kinds = {"as trained": (GPTlite_Bounded, state, 4)}
        kinds[f"{steps} on"] = GPTlite_Bounded, control.state_dict(), 4
        kinds[with_sink := f"{steps} with a sink token"] = GPTlite_SinkStream, sink.state_dict(), 1
        models, mass, tokens = {}, [], text.prompts(4, W)  # [4, W]
        for kind, (model_class, weights, n_first) in kinds.items():
            sizes = {"all": (W, n_first), "window": (n, 0), "first and window": (n - n_first, n_first)}
            for keys, size in sizes.items():
                make = partial(RollingCache, *size)
                models[kind, keys] = harness.build(args, weights, model_class, make_cache=make)
                figures = report.loss_figures(models[kind, keys], models[kind, "all"])
                report.row(f"{kind}: {keys}", baseline=keys == "all", **figures)
            logits = cached_logits(models[kind, "first and window"], tokens, W // 2)[0]
            report.check_close(
                f"{kind}: token by token equals one pass", logits, models[kind, "first and window"](tokens)[0]
            )
            make = partial(WatchingCache, n_first)
            watched = harness.build(args, weights, model_class, make_cache=make)(tokens)[1].layers
            for i, layer in enumerate(watched):
                row = {"weights": kind, "layer": i, "first": layer.first, "if even": layer.even}
                mass.append(row | {"last 16": layer.last})
        whole = models[with_sink, "all"](tokens)[0]
        report.check_close(
            "with a sink, all keys: the cache equals the trained model", whole, sink(tokens).detach()
        )
        report.sweep("Attention to the first 4 tokens, or to the sink token (shares)", mass)

        def between(kind, one, other, second=None):
            pair = [report.loss_of(models[key]) for key in ((kind, one), (second or kind, other))]
            names = (f"{kind}, {one}" for kind, one in ((kind, one), (second or kind, other)))
            return words.loss_between(*names, *loss_difference(*pair))

        report.why(between("as trained", "window", "first and window"))
        report.why(between(with_sink, "window", "first and window"))
        report.why(between(with_sink, "all", "all", f"{steps} on"))
        most = max((row for row in mass if row["weights"] == with_sink), key=lambda row: row["first"])
        told = f"{100 * most['first']:.2g}% of the attention in layer {most['layer']}, the most in any layer."
        cases = (
            (0.05, f"The sink token works as a sink: it gets {told}"),
            f"The sink token is hardly used: {told}",
        )
        report.why(words.choose(most["first"], *cases))
        lines = {
            kind: (
                [row["layer"] for row in mass if row["weights"] == kind],
                [row["first"] for row in mass if row["weights"] == kind],
            )
            for kind in kinds
        }
        report.plot_lines(lines, "layer", "share of attention", "Attention to the first tokens")
        report.finish()
