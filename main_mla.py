"""Multi-head latent attention (MLA): the cache holds one short latent a token instead of keys and values.

Keys and values of all heads are linear in one latent vector of d_latent numbers, so the latent is what is
stored. A decode step need not rebuild them: the up-projection of the keys moves to the query, that of the
values behind the attention (absorption), which then works on the latents as one shared head. Trained
weights are converted by a truncated singular value decomposition (SVD) and trained on for a few steps.

Exact: absorbed against explicit, and a latent as wide as the model, which halves the cache. Approximate
below that. Wins memory of the cache, at far less loss than averaged heads (GQA) for the same bytes, and time
where a step reads more cache than weights. Loses time where computing is the limit: absorbed scores are
d_latent long instead of d_head, and a prompt is dearer absorbed unless a latent is no longer than a head.
When to absorb: more/mla_absorption.py. Conversions that lose less: more/mla_conversion.py.

Run: python main_mla.py            (--d-latent 96 --uptrain-steps 0 for one latent, not trained on)

Source: DeepSeek-AI, DeepSeek-V2, 2024 (MLA, absorption); Ji et al., MHA2MLA, 2025 (conversion by SVD).
GPTlite's positions are learned and added to the input, so no separate rotary part is needed.
"""

import functools
import math

import torch
import torch.nn as nn

from gptlite import MultiHeadAttention
from gptlite_gqa import grouped_weights
from gptlite_kvcache import (
    Block_KVCache,
    GPTlite_KVCache,
    scaled_dot_product_attention_kv_cache,
    window_mask,
)


class MultiHeadAttention_MLA(MultiHeadAttention):
    """Multi-head attention over cached latents [B, 1, S, C], C = d_latent numbers a token for all heads.

    absorb: True attends to the latents themselves, False recomputes keys and values. The result is the
    same. Raises ValueError for a latent wider than the model.
    """

    absorb = True
    absorb_by_cost = False  # True: absorbs only the passes that this makes cheaper

    def __init__(self, d_model, n_heads, d_head, dropout_p, d_latent):
        check_latent(d_model, d_latent)
        super().__init__(d_model, n_heads, d_head, dropout_p)
        del self.key_proj, self.value_proj
        self.d_latent = d_latent
        self.kv_down_proj = nn.Linear(d_model, d_latent, bias=False)
        self.key_up_proj = UpProjection(d_latent, n_heads * d_head)
        self.value_up_proj = UpProjection(d_latent, n_heads * d_head)

    def forward(self, x, kv_cache=None, causal_mask=True, max_seqlen=None):
        """[B, Sq, E] and a cache (latents [B, 1, S, C],) -> [B, Sq, E] and the longer cache."""
        Q = self.split_heads(self.query_proj(x))  # [B, H, Sq, D]
        latents = self.kv_down_proj(x).unsqueeze(1)  # [B, 1, Sq, C]
        if kv_cache is not None:
            latents = torch.cat([kv_cache[0], latents], dim=-2)  # [B, 1, Sk, C]
        Sq, Sk = Q.shape[-2], latents.shape[-2]
        beyond = max_seqlen is not None and Sk > max_seqlen
        if beyond and Sq > 1 and causal_mask is True:
            causal_mask = window_mask(Sq, Sk, max_seqlen, x.device)  # [Sq, Sk]
        elif beyond and Sq == 1:
            latents = latents[..., -max_seqlen:, :]  # [B, 1, max_seqlen, C]
        absorbs = self.absorb and (not self.absorb_by_cost or self.is_cheaper(Sq, latents.shape[-2]))
        attention = self.absorbed_attention if absorbs else self.explicit_attention
        out = attention(Q, latents, causal_mask)  # [B, H, Sq, D]
        out = self.dropout(self.out_proj(self.merge_heads(out)))  # [B, Sq, E]
        if beyond:
            latents = latents[..., -max_seqlen:, :]  # [B, 1, max_seqlen, C]
        return out, (latents,)

    def explicit_attention(self, Q, latents, causal_mask=True):
        """Q [B, H, Sq, D], latents [B, 1, Sk, C] -> [B, H, Sq, D], by keys and values of every head."""
        K = self.split_heads(self.key_up_proj(latents[:, 0]))  # [B, H, Sk, D]
        V = self.split_heads(self.value_up_proj(latents[:, 0]))  # [B, H, Sk, D]
        return scaled_dot_product_attention_kv_cache(Q, K, V, causal_mask, self.dropout)

    def absorbed_attention(self, Q, latents, causal_mask=True):
        """The same without keys and values: q.(W c) = (W'q).c, and a sum of p W c is W times that of p c."""
        B, H, Sq, D = Q.shape
        W_k, W_v = (
            self.key_up_proj.weight.view(H, D, -1),
            self.value_up_proj.weight.view(H, D, -1),
        )  # [H, D, C]
        wide = torch.promote_types(Q.dtype, torch.float32)  # products of 16 bits may overflow
        # the keys' bias is left out: it adds the same to every score of a row, which softmax does not see
        Q = Q.to(wide) @ W_k.to(wide)  # [B, H, Sq, C]
        # the scores are those of heads of size D, whatever the length of the vectors they come from
        weights = grouped_weights(Q, latents, causal_mask, scale=1 / math.sqrt(D))  # [B, H, Sq, Sk]
        weights = self.dropout(weights)
        # all heads share the latents: their rows are one matrix, and nothing is copied
        out = weights.to(latents.dtype).reshape(B, 1, H * Sq, -1) @ latents  # [B, 1, H*Sq, C]
        out = out.view(B, H, Sq, -1) @ W_v.mT  # [B, H, Sq, D]
        total = weights.sum(dim=-1, keepdim=True).to(out.dtype)  # [B, H, Sq, 1]: 1, or 0 without any key
        return out + total * self.value_up_proj.bias.view(H, 1, D)

    def is_cheaper(self, Sq, Sk):
        """Whether absorbing Sq queries over Sk keys needs no more multiply-adds than keys and values do."""
        absorbed = self.d_latent * Sq * (Sk + self.d_head)  # at length C; queries turned in, results back
        explicit = self.d_head * Sk * (Sq + self.d_latent)  # at length D; every key rebuilt from its latent
        return absorbed <= explicit


def convert_mha_to_mla(state_dict, n_heads, d_head, d_latent):
    """Weights of GPTlite -> weights of GPTlite_MLA, by SVD of keys' and values' projections stacked.

    Args: state_dict: names to tensors, of the model or of its attention alone; it is not modified.
    Returns: a state dictionary, for d_latent = d_model of an equal model. Raises ValueError for a d_latent
        that the projections have no rank for, or no projections to n_heads heads of d_head.
    """
    state = dict(state_dict)
    prefixes = [name.removesuffix("key_proj.weight") for name in state if name.endswith("key_proj.weight")]
    if not prefixes:
        raise ValueError("no key_proj: these are not weights of multi-head attention")
    for prefix in prefixes:
        weights = [state[f"{prefix}{name}_proj.weight"] for name in ("key", "value")]  # [H*D, E] each
        if weights[0].shape[0] != n_heads * d_head:
            raise ValueError(f"{prefix}key_proj does not project to {n_heads} heads of {d_head}")
        up, down = low_rank(torch.cat(weights).double(), d_latent)  # [2*H*D, C], [C, E]
        replace_projections(state, prefix, up, down)
    return state


def low_rank(M, rank):
    """The two factors [m, rank] and [rank, n] whose product is nearest to M [m, n], by truncated SVD."""
    if not 1 <= rank <= min(M.shape):
        raise ValueError(f"a matrix {list(M.shape)} has no approximation of rank {rank}")
    U, S, Vh = torch.linalg.svd(M, full_matrices=False)
    root = S[:rank].sqrt()  # [rank], half to each side
    return U[:, :rank] * root, root[:, None] * Vh[:rank]


def replace_projections(state, prefix, up, down):
    """Puts factors in the place of the key and value projections of one layer, in the dictionary itself.

    Args: up [2*H*D, C], keys' rows first; down [C, E]. The up-projections take the biases.
    """
    key, value = (state.pop(f"{prefix}{name}_proj.weight") for name in ("key", "value"))
    for name, old, weight in zip(("key", "value"), (key, value), up.chunk(2), strict=True):
        state[f"{prefix}{name}_up_proj.weight"] = weight.to(old).contiguous()  # [H*D, C]
        state[f"{prefix}{name}_up_proj.bias"] = state.pop(f"{prefix}{name}_proj.bias")  # [H*D]
    state[f"{prefix}kv_down_proj.weight"] = down.to(key).contiguous()  # [C, E]


def check_latent(d_model, d_latent):
    """Raises ValueError for a latent that is empty, or wider than what it is made from."""
    if not 1 <= d_latent <= d_model:
        raise ValueError(f"d_latent is {d_latent}: 1 to {d_model}, the width of the model, make sense")


# ---- The model ----


class UpProjection(nn.Linear):
    """nn.Linear of its own class, which pack_linears leaves as it is: absorbing reads the weight itself."""


class Block_MLA(Block_KVCache):
    def __init__(self, d_model, n_heads, d_head, dropout_p, d_latent):
        self.mha_class = functools.partial(MultiHeadAttention_MLA, d_latent=d_latent)
        super().__init__(d_model, n_heads, d_head, dropout_p)


class GPTlite_MLA(GPTlite_KVCache):
    """GPTlite_KVCache with latent attention: same calls, a cache of one tensor [B, 1, S, C] a layer."""

    def __init__(self, vocab_size, d_model, n_heads, d_head, n_layers, dropout_p, seqlen, d_latent):
        self.block_class = functools.partial(Block_MLA, d_latent=d_latent)
        super().__init__(vocab_size, d_model, n_heads, d_head, n_layers, dropout_p, seqlen)


if __name__ == "__main__":
    import copy

    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa
    from inference_training import UPTRAIN_LR, UPTRAINED_COLUMNS, uptrained, uptrained_figures
    from inference_utils import load_checkpoint, loss_difference, parameters_of
    from linear_packed import pack_linears
    from main_kvcache import generate_kvcache

    quick = {"batch_size": 2, "prompt_len": 64, "n_tokens": 8, "uptrain_steps": 1, "d_latent": [192, 24]}
    parser = harness.options(__doc__, 3, quick=quick, batch_size=8, prompt_len=128, n_tokens=32)
    parser.add_argument(
        "--d-latent", type=int, nargs="+", help="latent widths (default: 1 to 1/8 of d_model)"
    )
    parser.add_argument("--uptrain-steps", type=harness.count, default=40, help="steps of 8 x 256 tokens")
    with harness.script(parser) as args:
        text, state = harness.load_text(args), load_checkpoint(args.checkpoint)
        (mha,) = harness.load_models(args, GPTlite_KVCache)
        L, E, H, D, *_ = p = parameters_of(mha)
        for r in (latents := sorted(set(args.d_latent or [E // n for n in (1, 2, 4, 8)]), reverse=True)):
            check_latent(E, r)
        prompts = text.prompts(args.batch_size, args.prompt_len)  # [B, T]
        hide = ("tpot_p99_ms", "speedup", "forward_tokens", "n_parameters", "same_output")
        report = harness.Report(args, "MLA", mha, UPTRAINED_COLUMNS, hide, text)
        training = text.train, args.uptrain_steps, UPTRAIN_LR, 8, p.seqlen
        control = pack_linears(uptrained(*harness.load_models(args, GPTlite, packed=False), *training))
        methods = [harness.Method("MHA", generate_kvcache, mha)]

        def add(name, forms, weights, model_class, **kwargs):  # a method for each form of a conversion
            model = harness.build(args, weights, model_class, packed=False, **kwargs)
            figures = uptrained_figures(report, pack_linears(uptrained(model, *training)), control)
            for form in forms:
                one, exact = pack_linears(copy.deepcopy(model)), kwargs.get("d_latent") == E
                for block in one.blocks:
                    block.mha.absorb, block.mha.absorb_by_cost = form != "explicit", form == "by cost"
                methods.append(
                    harness.Method(f"{name}, {form}", generate_kvcache, one, exact=exact, **figures)
                )
                figures = {}

        for r in latents:
            forms = ["absorbed", "explicit"] + ["by cost"] * (r == latents[0])
            add(f"MLA {r}", forms, convert_mha_to_mla(state, H, D, r), GPTlite_MLA, d_latent=r)
        for G in (G for G in range(H - 1, 0, -1) if H % G == 0):
            add(f"GQA {G}", ["mean"], convert_mha_to_gqa(state, H, D, G), GPTlite_GQA, n_groups=G)
        rows = report.compare(prompts, args.n_tokens, *methods, label="")
        after = report.row("MHA, trained on", **report.loss_figures(control, mha))
        models = {method.name: method.model for method in methods}
        for r in latents:
            with torch.no_grad():
                logits = [models[f"MLA {r}, {form}"](prompts)[0] for form in ("absorbed", "explicit")]
            report.check_close(f"d_latent {r}: absorbed equals explicit", *logits)
            n_bytes = rows[f"MLA {r}, absorbed"]["kv_bytes_per_token"]
            report.check(f"d_latent {r}: a token takes {r} numbers", n_bytes == L * r * args.dtype.itemsize)

        absorbed, explicit, by_cost = (
            rows[f"MLA {latents[0]}, {form}"] for form in ("absorbed", "explicit", "by cost")
        )
        report.why(words.compare(absorbed, explicit) + words.compare(by_cost, absorbed, "ttft_ms"))
        report.why(
            words.compare(by_cost, rows["MHA"]) + words.compare(by_cost, rows["MHA"], "peak_memory_mb")
        )
        narrow, grouped = f"MLA {latents[-1]}, absorbed", methods[-1].name
        pair = (report.loss_of(models[name]) for name in (narrow, grouped))
        report.why(
            words.loss_between(narrow, grouped, *loss_difference(*pair))
            + words.recovery(rows[narrow], args.uptrain_steps)
            + words.loss(after)
        )
        points = {name: (row["kv_bytes_per_token"], row["valid_loss"]) for name, row in rows.items()}
        report.plot_points(points, "KV bytes per token", "validation loss (nats)", "Before training on")
        report.finish()
