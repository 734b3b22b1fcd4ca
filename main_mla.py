"""Multi-head latent attention (MLA): the cache holds one short latent a token instead of keys and values.

Keys and values of all heads are linear in one latent vector of d_latent numbers, so the latent is what is
stored. A decode step need not rebuild them: the up-projection of the keys moves to the query, that of the
values behind the attention (absorption), which then works on the latents as one shared head. Exact:
absorbed against explicit, and a latent as wide as the model, which halves the cache. Approximate below
that: the trained projections are cut to d_latent by a singular value decomposition (SVD); what it loses,
what training on brings back, and GQA at the same bytes stand side by side.

Run: python main_mla.py            (--plot mla.png; losses in float32 whatever --dtype says)

Source: DeepSeek-AI, DeepSeek-V2, 2024 (MLA, absorption); Ji et al., MHA2MLA, 2025 (conversion by SVD).
GPTlite's positions are learned and added to the input, so no separate rotary part is needed.
"""

import functools
import math

import torch
import torch.nn as nn

from gptlite import MultiHeadAttention
from gptlite_gqa import grouped_attention
from gptlite_kvcache import (
    Block_KVCache,
    GPTlite_KVCache,
    scaled_dot_product_attention_kv_cache,
    window_mask,
)


def check_latent(d_model, d_latent):
    """Raises ValueError for a latent that is empty, or wider than what it is made from."""
    if not 1 <= d_latent <= d_model:
        raise ValueError(f"d_latent is {d_latent}: 1 to {d_model}, the width of the model, make sense")


class MultiHeadAttention_MLA(MultiHeadAttention):
    """Multi-head attention over cached latents [B, S, C], C = d_latent numbers a token for all heads.

    absorb: True attends to the latents themselves, False rebuilds keys and values first, None takes what
    computes less. The result is the same. Raises ValueError for a latent wider than the model.
    """

    def __init__(self, d_model, n_heads, d_head, dropout_p, d_latent):
        check_latent(d_model, d_latent)
        super().__init__(d_model, n_heads, d_head, dropout_p)
        del self.key_proj, self.value_proj
        self.d_latent = d_latent
        self.absorb = None
        # no biases: one in the keys is invisible to softmax, one in the values moves to out_proj
        self.kv_down_proj = nn.Linear(d_model, d_latent, bias=False)
        self.key_up_proj = nn.Linear(d_latent, n_heads * d_head, bias=False)
        self.value_up_proj = nn.Linear(d_latent, n_heads * d_head, bias=False)

    def absorbs(self, Sq):
        """Whether a pass over Sq new tokens works on the latents."""
        if self.absorb is not None:
            return self.absorb
        # a key costs Sq products of length C if absorbed, else C to rebuild it and Sq to use it, of length D
        return Sq * self.d_latent <= self.d_head * (self.d_latent + Sq)

    def explicit_attention(self, Q, C, causal_mask=True):
        """Q [B, H, Sq, D], latents C [B, Sk, C] -> [B, H, Sq, D], through keys and values of every head."""
        K = self.split_heads(self.key_up_proj(C))  # [B, H, Sk, D]
        V = self.split_heads(self.value_up_proj(C))  # [B, H, Sk, D]
        return scaled_dot_product_attention_kv_cache(Q, K, V, causal_mask, self.dropout)

    def absorbed_attention(self, Q, C, causal_mask=True):
        """The same without keys and values: q.(W c) = (W'q).c, and a sum of p W c is W times that of p c."""
        key_up = self.key_up_proj.weight.view(self.n_heads, self.d_head, -1)  # [H, D, C]
        value_up = self.value_up_proj.weight.view(self.n_heads, self.d_head, -1)  # [H, D, C]
        Q, C = Q @ key_up, C.unsqueeze(1)  # [B, H, Sq, C], [B, 1, Sk, C]: all heads share one group
        # the scores are those of heads of size D, whatever the length of the vectors they come from
        scale = 1 / math.sqrt(self.d_head)
        out = grouped_attention(Q, C, C, causal_mask, self.dropout, scale)  # [B, H, Sq, C]
        return out @ value_up.mT  # [B, H, Sq, D]

    def forward(self, x, kv_cache=None, causal_mask=True, max_seqlen=None):
        """[B, Sq, E] and a cache (latents [B, S, C],) -> [B, Sq, E] and the longer cache."""
        Q = self.split_heads(self.query_proj(x))  # [B, H, Sq, D]
        C = self.kv_down_proj(x)  # [B, Sq, C]
        if kv_cache is not None:
            C = torch.cat([kv_cache[0], C], dim=-2)  # [B, Sk, C]
        Sq, Sk = Q.shape[-2], C.shape[-2]
        beyond = max_seqlen is not None and Sk > max_seqlen
        if beyond and Sq > 1 and causal_mask is True:
            causal_mask = window_mask(Sq, Sk, max_seqlen, x.device)  # [Sq, Sk]
        elif beyond and Sq == 1:
            C = C[:, -max_seqlen:]  # [B, max_seqlen, C]
        attention = self.absorbed_attention if self.absorbs(Sq) else self.explicit_attention
        out = attention(Q, C, causal_mask)  # [B, H, Sq, D]
        out = self.dropout(self.out_proj(self.merge_heads(out)))  # [B, Sq, E]
        if beyond:
            C = C[:, -max_seqlen:]  # [B, max_seqlen, C]
        return out, (C,)


class Block_MLA(Block_KVCache):
    def __init__(self, d_model, n_heads, d_head, dropout_p, d_latent):
        self.mha_class = functools.partial(MultiHeadAttention_MLA, d_latent=d_latent)
        super().__init__(d_model, n_heads, d_head, dropout_p)


class GPTlite_MLA(GPTlite_KVCache):
    """GPTlite_KVCache with latent attention: same calls, a cache of one tensor [B, S, C] a layer."""

    def __init__(self, vocab_size, d_model, n_heads, d_head, n_layers, dropout_p, seqlen, d_latent):
        self.block_class = functools.partial(Block_MLA, d_latent=d_latent)
        super().__init__(vocab_size, d_model, n_heads, d_head, n_layers, dropout_p, seqlen)


def low_rank(M, rank):
    """The two factors [m, rank] and [rank, n] whose product is nearest to M [m, n], by truncated SVD."""
    if not 1 <= rank <= min(M.shape):
        raise ValueError(f"a matrix {list(M.shape)} has no approximation of rank {rank}")
    U, S, Vh = torch.linalg.svd(M, full_matrices=False)
    root = S[:rank].sqrt()  # [rank], half to each side
    return U[:, :rank] * root, root[:, None] * Vh[:rank]


def attention_prefixes(state_dict):
    """What the names of each attention's weights begin with, for GPTlite or one attention alone."""
    return [name.removesuffix("key_proj.weight") for name in state_dict if name.endswith("key_proj.weight")]


def replace_projections(state, prefix, up, down, value_bias):
    """Puts factors in the place of the key and value projections of one layer, in the dictionary itself.

    Args: up [2*H*D, C], keys' rows first; down [C, E]; value_bias [H*D]: weights of a softmax sum to one,
        so what is added to every value comes out unchanged and moves into the bias of out_proj.
    """
    out_weight, out_bias = state[f"{prefix}out_proj.weight"], state[f"{prefix}out_proj.bias"]
    new = {
        "kv_down_proj.weight": down,
        "out_proj.bias": out_bias.to(up) + out_weight.to(up) @ value_bias.to(up),
    }
    new["key_up_proj.weight"], new["value_up_proj.weight"] = up.chunk(2)
    for name in ("key_proj.weight", "key_proj.bias", "value_proj.weight", "value_proj.bias"):
        del state[prefix + name]
    state.update({prefix + name: tensor.to(out_bias).contiguous() for name, tensor in new.items()})


def convert_mha_to_mla(state_dict, n_heads, d_head, d_latent):
    """Weights of GPTlite -> weights of GPTlite_MLA, by SVD of keys' and values' projections stacked.

    Args: state_dict: names to tensors, of the model or of its attention alone; it is not modified.
    Returns: a state dictionary, equal to the model given for d_latent = d_model. Raises ValueError for a
        d_latent that the projections have no rank for, or projections without n_heads heads of d_head.
    """
    state = dict(state_dict)
    for prefix in attention_prefixes(state_dict):
        weights = [state[f"{prefix}{name}_proj.weight"] for name in ("key", "value")]  # [H*D, E] each
        if weights[0].shape[0] != n_heads * d_head:
            raise ValueError(f"{prefix}key_proj does not project to {n_heads} heads of {d_head}")
        up, down = low_rank(torch.cat(weights).double(), d_latent)  # [2*H*D, C], [C, E]
        replace_projections(state, prefix, up, down, state[f"{prefix}value_proj.bias"])
    return state


if __name__ == "__main__":
    import inference_report as rep
    import inference_training as training
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa
    from main_gqa import align_heads, attention_inputs
    from main_kvcache import generate_kvcache
    from main_mla_conversion import convert_mha_to_mla_calibrated

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument("--batch-size", type=rep.positive_int, default=8, help="sequences of the batch")
    parser.add_argument("--prompt-len", type=rep.positive_int, default=128, help="tokens of the prompts")
    parser.add_argument("--n-tokens", type=rep.positive_int, default=32, help="new tokens")
    parser.add_argument("--d-latent", type=int, nargs="+", default=[384, 192, 96, 48], help="latent widths")
    parser.add_argument("--uptrain-steps", type=rep.count, default=40, help="steps of 8 x 256 tokens")
    with rep.script(parser) as args:
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        W, H, D, E, B = p.seqlen, p.n_heads, p.d_head, p.d_model, 2 if quick else args.batch_size
        n_tokens, n_steps = (8, min(args.uptrain_steps, 2)) if quick else (args.n_tokens, args.uptrain_steps)
        train_batch, train_len, n_windows, n_texts = (2, 128, 4, 8) if quick else (8, W, 64, 32)
        latents, groups = sorted(set(args.d_latent), reverse=True), (1,) if quick else (3, 2, 1)
        for r in latents:
            check_latent(E, r)
        latents = latents[::3] if quick else latents
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        mha_state = utils.load_checkpoint(args.checkpoint)
        number_bytes = p.n_layers * args.dtype.itemsize  # bytes of a token for each number that a layer keeps

        def make(state, model_class=GPTlite_MLA, absorb=None, **kwargs):
            model = utils.make_model(model_class, vocab_size, **kwargs)
            for block in model.blocks:
                block.mha.absorb = absorb
            return utils.load_weights(model, state, str(args.checkpoint)).to(dev)

        def measure_loss(label, state, **kwargs):
            """Loss of these weights, and after training on, with the same batches for all."""
            how = (n_windows, n_steps, p.lr / 5, train_batch, train_len, args.seed, label)
            return training.uptrained_losses(make(state, **kwargs), train_data, valid_data, *how)

        # Conversions and their losses, GQA's beside them
        mha = make(mha_state, GPTlite_KVCache)
        prompts = utils.sample_prompts(valid_data, B, min(args.prompt_len, W)).to(dev)  # [B, T]
        sizes = {"batch_size": B, "prompt_len": prompts.shape[1], "n_tokens": n_tokens}
        columns = {"valid_loss": ("loss", "{:.4f}"), "uptrained_loss": ("up-trained", "{:.4f}")}
        report = rep.Report(args, "MLA", mha, columns, **sizes, uptrain_steps=n_steps)
        for key in ("tpot_p99_ms", "forward_tokens", "same_output"):  # no news here: left out of the table
            report.columns.pop(key)
        inputs = attention_inputs(mha, utils.sample_prompts(train_data, n_texts, W).to(dev))
        control = measure_loss("control", mha_state, model_class=GPTlite_KVCache)
        losses, converted = {}, {}
        for r in latents:
            converted[r] = convert_mha_to_mla_calibrated(mha_state, H, D, r, inputs)
            plain = convert_mha_to_mla(mha_state, H, D, r)
            losses["SVD", r] = measure_loss(f"SVD {r}", plain, d_latent=r)
            losses["MLA", r] = measure_loss(f"two-sided {r}", converted[r], d_latent=r)
            svd, two_sided = losses["SVD", r]["valid_loss"], losses["MLA", r]["valid_loss"]
            if r == E:
                off = max(abs(loss - control["valid_loss"]) for loss in (svd, two_sided))
                report.check(f"d_latent {r}: both keep the loss of MHA (off by {off:.0e})", off <= 1e-4)
            elif svd - control["valid_loss"] > 0.005:  # below that, the order is left to chance
                report.check(f"d_latent {r}: two-sided starts lower than plain SVD", two_sided < svd)
        for G in groups:
            aligned = convert_mha_to_gqa(align_heads(mha_state, H, D, G, inputs), H, D, G)
            losses["GQA", G] = measure_loss(f"GQA {G}", aligned, model_class=GPTlite_GQA, n_groups=G)
            for r in [r for r in latents if r <= 2 * G * D][:1]:  # the widest that takes no more bytes
                lower = losses["MLA", r]["valid_loss"] < losses["GQA", G]["valid_loss"]
                report.check(f"d_latent {r} starts lower than n_groups {G}, for no more bytes", lower)

        # Generation: the same weights, absorbed and explicit
        models = {"MHA": mha}
        for r in latents:
            models[f"MLA {r}, absorbed"] = absorbed = make(converted[r], absorb=True, d_latent=r)
            models[f"MLA {r}, explicit"] = explicit = make(converted[r], absorb=False, d_latent=r)
            with torch.no_grad():
                same = utils.largest_difference(absorbed(prompts)[0], explicit(prompts)[0])
            report.check(f"d_latent {r}: absorbed equals explicit (logits to {same:.0e})", same <= 1e-4)
        methods = []
        for name, model in models.items():
            model.to(args.dtype)
            run = lambda model=model: generate_kvcache(model, prompts, n_tokens, W)  # noqa: E731
            methods.append(utils.Method(name, run, [model]))
        results = utils.measure(methods, B * n_tokens, args.repeats)
        for method in methods:
            r = getattr(method.models[0].blocks[0].mha, "d_latent", None)
            with torch.no_grad():
                _, cache = method.models[0](prompts)
            kv_bytes = utils.cache_bytes_per_token([t for c in cache for t in c], prompts.shape[1], B)
            width = r or 2 * H * D
            report.check(f"{method.name}: a token takes {width} numbers", kv_bytes == number_bytes * width)
            report.row(
                method.name,
                results[method.name],
                baseline=r is None,
                kv_bytes_per_token=kv_bytes,
                same_output="approximate" if r and r < E else None,
                peak_memory_mb=utils.peak_memory_mb(method.run, *method.models, inputs=[prompts]),
                n_parameters=utils.n_parameters(method.models[0]),
                **({"valid_loss": control["valid_loss"]} if r is None else losses["MLA", r]),
            )
        report.row("MHA, control", **control)
        for (how, width), loss in losses.items():
            if how == "SVD":
                report.row(f"MLA {width}, plain SVD", kv_bytes_per_token=number_bytes * width, **loss)
            elif how == "GQA":
                report.row(f"GQA {width}, aligned", kv_bytes_per_token=number_bytes * 2 * width * D, **loss)

        T, r, n = prompts.shape[1], latents[0], prompts.shape[1] + n_tokens // 2
        ttft, tpot = (
            [f"{getattr(results[name], key) or 0:.1f} ms" for name in list(models)[:3]]
            for key in ("ttft_ms", "tpot_ms")
        )
        report.why(
            f"Prefill of {T} tokens, d_latent {r}: a key costs {T} products of length {r} if absorbed, else "
            f"{r} of length {D} to rebuild it and {T} to use it. Absorbing computes "
            f"{T * r / (D * (T + r)):.1f} times as much: TTFT {ttft[1]}, explicit {ttft[2]}, MHA {ttft[0]}."
        )
        step = rep.forward_cost(p, vocab_size, B, 1, n - 1, args.dtype)
        cache = number_bytes * 2 * H * D * B * n
        report.why(
            "A decode step has one query to share the rebuilding: explicit computes "
            f"{D * (1 + r) / r:.0f} times as much. TPOT {tpot[1]} absorbed, {tpot[2]} explicit, {tpot[0]} "
            f"MHA, which reads {cache / 1e6:.0f} MB of cache and {(step.n_bytes - cache) / 1e6:.0f} MB of "
            "weights: a smaller cache wins little here. main_mla_absorption.py goes to long contexts."
        )
        least, most = latents[-1], groups[-1]
        start = [losses[k]["valid_loss"] - control["valid_loss"] for k in (("MLA", least), ("GQA", most))]
        report.why(
            f"Converted, MLA starts at {start[0]:+.3f} nats with {number_bytes * least} bytes a token, "
            f"GQA at {start[1]:+.3f} with {number_bytes * 2 * D * most}: a group makes heads agree, a "
            "latent keeps what they differ in, as far as it has room."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for how, color, numbers in (("SVD", "C1", 1), ("MLA", "C0", 1), ("GQA", "C2", 2 * D)):
                label = {"SVD": "MLA, SVD", "MLA": "MLA, two-sided"}.get(how, how)
                points = {w * numbers * number_bytes: loss for (f, w), loss in losses.items() if f == how}
                for key, style in zip(control, ("--", "-"), strict=False):
                    when = "converted" if key == "valid_loss" else "trained on"
                    y = [loss[key] for loss in points.values()]
                    axes.plot(list(points), y, style, color=color, marker="o", label=f"{label}, {when}")
            axes.axhline(control["valid_loss"], color="gray", linestyle=":", label="MHA")
            axes.set(xlabel="KV bytes per token", ylabel="validation loss (nats)")
            axes.legend(fontsize=8)
            rep.save_figure(figure, args.plot)
        report.finish()
