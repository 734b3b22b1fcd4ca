"""Hybrids of linear and softmax layers: a few layers keep all keys, the others a state of fixed size.

A state of 64 x 64 numbers a head cannot hold every earlier token, but if a few layers can look anything up,
the others may do without. One softmax layer stands behind every two linear ones (2:1), or among five (5:1);
the linear ones are Gated DeltaNet. Both can also stand within a layer: softmax over the newest keys, and a
state that all older ones are read from (LoLCATs).

Trained weights are converted in two stages: each linear layer first learns to give what the softmax layer in
its place gives for the same input (attention transfer), then the whole model learns the text. Approximate.
Wins memory: only the softmax layers' caches grow, so 2:1 comes to a third and 5:1 to a sixth of the bytes on
long texts, and to as much of the time in which a step reads keys. Loses on short texts, where a state is
larger than the cache that it replaces (32 tokens of one type, and the convolution's tail), and quality. What
a state costs in serving: more/linear_prefix.py (prefix hits), more/linear_drafts.py (rejected drafts).

Run: python main_linear_hybrid.py            (--uptrain-steps 200 for longer training)

Source: Lieber et al., Jamba, 2024; MiniMax-01, 2025; Kimi Team, Kimi Linear, 2025; Qwen3-Next, 2025; for the
conversion Zhang et al., LoLCATs, 2024; Goldstein et al., RADLADS, 2025. Here all weights learn, not LoRA's.
"""

import copy
import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from data.shakespeare import get_batch
from gptlite_kvcache import window_mask
from gptlite_linear import GatedDelta, MultiHeadAttention_Linear, recurrent
from inference_training import autocast, learning_rate, make_optimizer, optimizer_step


def hybrid_layout(n_layers, n_linear):
    """Numbers of the blocks that keep softmax: of every n_linear + 1, one.

    The last of each group (MiniMax-01, Kimi Linear, Qwen3-Next); of a single group the middle one, as in
    Jamba's. Raises ValueError for a model with fewer layers than a group.
    """
    group = n_linear + 1
    if not 1 <= n_linear < n_layers:
        raise ValueError(f"{n_linear}:1 needs {group} layers, not {n_layers}")
    return tuple(range(n_linear, n_layers, group)) if n_layers > group else (n_layers // 2,)


class WindowPlusLinear(MultiHeadAttention_Linear):
    """Softmax over the newest `window` keys, learned features of all older ones, one divisor for both.

    The cache of a layer is (k, v of the window [B, H, up to W, D], state [B, H, 2 * D, D + 1] or None): a key
    enters the state when it leaves the window. silent: "window" or "linear" leaves that part out.
    """

    rule, window, silent = "linear", 8, None

    def __init__(self, d_model, n_heads, d_head, dropout_p):
        super().__init__(d_model, n_heads, d_head, dropout_p)
        del self.out_gain  # weights that sum to one need no norm
        eye = torch.eye(d_head).repeat(2, n_heads, 1, 1)  # of queries and of keys
        self.feature_maps = nn.Parameter(eye)  # [2, H, D, D]
        self.window_logit = nn.Parameter(torch.ones(n_heads, 1, 1))

    def features(self, q, k):
        """Hedgehog: softmax of W x and of -W x over the channels, all above 0, [B, H, T, 2 * D]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        parts = [x.to(wide) @ one.to(wide) for x, one in zip((q, k), self.feature_maps, strict=True)]
        return [torch.cat([x.softmax(dim=-1), (-x).softmax(dim=-1)], dim=-1) for x in parts]

    def forward(self, x, kv_cache=None, causal_mask=True, max_seqlen=None):
        """As MultiHeadAttention_Linear; the scores of a piece are computed whole: long texts in pieces."""
        if causal_mask is not True:
            raise ValueError("a state has seen all earlier tokens: no other mask than the causal one")
        Q, K, V = (self.split_heads(f(x)) for f in (self.query_proj, self.key_proj, self.value_proj))
        state = None
        if kv_cache is not None:
            k, v, state = kv_cache
            K, V = torch.cat([k, K], dim=-2), torch.cat([v, V], dim=-2)  # [B, H, Sk, D]
        with torch.autocast(x.device.type, enabled=False):
            near, old, state = self.parts(Q, K, V, state)  # [B, H, T, D + 1]
        both = sum(part for name, part in (("window", near), ("linear", old)) if name != self.silent)
        out = (both[..., :-1] / both[..., -1:].clamp(min=1e-6)).to(x.dtype)  # [B, H, T, D]
        kept = K[..., -self.window :, :], V[..., -self.window :, :]
        return self.dropout(self.out_proj(self.merge_heads(out))), (*kept, state)

    def parts(self, Q, K, V, state):
        """Weighted values and sums of weights of both parts, [B, H, T, D + 1] each, and the next state."""
        T, Sk, wide = Q.shape[-2], K.shape[-2], torch.promote_types(Q.dtype, torch.float32)
        Q, K, values = Q.to(wide), K.to(wide), F.pad(V.to(wide), (0, 1), value=1.0)
        scores = Q @ K.mT / math.sqrt(self.d_head)  # [B, H, T, Sk]
        scores = scores.masked_fill(~window_mask(T, Sk, self.window, Q.device), float("-inf"))
        weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        share = self.window_logit.to(wide).sigmoid()  # [H, 1, 1]
        near = share * (weights @ values)
        if Sk <= self.window:
            return near, torch.zeros_like(near), state
        n_old = Sk - self.window  # keys that leave the window: each of the last n_old queries sees one more
        q, k = self.features(Q[..., T - n_old :, :], K[..., :n_old, :])  # [B, H, n_old, 2 * D]
        old, state = self.attend(q, k, values[..., :n_old, :], None, None, state)
        return near, F.pad((1 - share) * old, (0, 0, T - n_old, 0)), state


# ---- Conversion, and what the parts of a hybrid do ----


def attention_transfer(model, teacher, train_data, iters, lr, batch_size, seqlen, seed=42):
    """Trains each linear layer to give what the softmax layer in its place gives for the same input.

    The inputs are the teacher's, so no layer waits for another and no gradient passes between them.
    Args: model: GPTlite_Linear, changed in place; teacher: GPTlite, frozen; the others as in train_steps.
    Returns: the loss of every step: squared error over the variance of what is to be given, mean of layers.
    """
    blocks = zip(model.blocks, teacher.blocks, strict=True)
    pairs = [(a.mha, b.mha) for a, b in blocks if isinstance(a.mha, MultiHeadAttention_Linear)]
    layers, device = nn.ModuleList(new for new, _ in pairs), next(model.parameters()).device
    seen, losses = {}, []

    def note(mha, inputs, output):
        seen[mha] = inputs[0], output  # [B, T, E] each

    hooks = [old.register_forward_hook(note) for _, old in pairs]
    optimizer, generator = make_optimizer(layers, lr), torch.Generator().manual_seed(seed)
    for step in (bar := tqdm(range(iters), desc="attention transfer", leave=False, disable=None)):
        x = get_batch(train_data, batch_size, seqlen, generator)[0].to(device)  # [B, T]
        with autocast(device):
            with torch.no_grad():
                teacher(x)
            given = [(new(seen[old][0])[0].float(), seen[old][1].float()) for new, old in pairs]
        loss = torch.stack([F.mse_loss(out, wanted) / wanted.var() for out, wanted in given]).mean()
        optimizer_step(layers, optimizer, loss, learning_rate((step + 0.5) / iters, lr, warmup=0.1))
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    for hook in hooks:
        hook.remove()
    return losses


def silenced(model, numbers, part=None):
    """A copy of a model, sharing its weights, whose blocks `numbers` attend to nothing.

    part: "window" or "linear": only that part of their WindowPlusLinear is left out.
    """
    model = copy.deepcopy(model, {id(t): t for t in [*model.parameters(), *model.buffers()]})
    for number in numbers:
        mha = model.blocks[number].mha
        if part:
            mha.silent = part
        else:
            mha.register_forward_hook(lambda _mha, _inputs, output: (torch.zeros_like(output[0]), output[1]))
    return model


def step_forms(layouts, n_layers, k, v):
    """Functions that attend with one token in all layers, {name: function}.

    Args: layouts: {name: blocks that keep softmax}; k, v [1, H, T, D]: what these blocks read.
    """
    new = [t[..., -1:, :].contiguous() for t in (k, k, v)]  # [1, H, 1, D]
    gates = -torch.ones_like(new[0][..., :1]), torch.ones_like(new[0][..., :1])  # [1, H, 1, 1]
    state = k.mT.float() @ v.float()  # whatever it holds, the step costs the same

    def step(full):
        return [
            F.scaled_dot_product_attention(new[0], k, v)
            if layer in full
            else recurrent("gated delta", *new, *gates, state)[0]
            for layer in range(n_layers)
        ]

    return {name: partial(step, full) for name, full in layouts.items()}


if __name__ == "__main__":
    import inference_linear as study
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_kvcache import GPTlite_KVCache
    from inference_training import CONVERSION_LR, UPTRAIN_LR
    from inference_utils import loss_difference, parameters_of
    from main_kvcache import generate_kvcache

    TRANSFER_LR = 1e-2  # far above that of fine-tuning: each layer learns for itself, from inputs that stay
    with harness.script(study.options(__doc__, max_tokens=65536, uptrain_steps=48)) as args:
        text, (mha,) = harness.load_text(args), harness.load_models(args, GPTlite_KVCache)
        L, E, H, D, *_ = p = parameters_of(mha)
        layouts = {f"{n}:1": hybrid_layout(L, n) for n in (2, 5) if n < L} | {"all linear": ()}
        report = harness.Report(args, "linear hybrids", mha, study.COLUMNS, study.HIDE, text)
        (teacher,) = harness.load_models(args, GPTlite, packed=False)

        # Equal numbers of steps: two thirds of them transfer, or none
        def make(name, layer, full, first):
            model = study.converted(args, text, layer, full).float()
            attention_transfer(model, teacher.float(), text.train, first, TRANSFER_LR, 8, p.seqlen)
            lr, n_steps = UPTRAIN_LR if first else CONVERSION_LR, args.uptrain_steps - first
            return study.trained_on(args, text, model, name, lr, n_steps)

        first = -(-2 * args.uptrain_steps // 3)
        arms = {name: (GatedDelta, full, first) for name, full in layouts.items()}
        arms["2:1, no transfer"] = GatedDelta, layouts["2:1"], 0
        arms["window + linear"] = WindowPlusLinear, (), first
        makers = {name: partial(make, name, *arm) for name, arm in arms.items()}
        rows, models = study.compare_trained(args, report, text, mha, generate_kvcache, makers)

        # What each part contributes: the loss without it
        full, parts = layouts["2:1"], []
        cases = [("2:1", "its softmax layers", full, None)]
        cases += [("2:1", "its linear layers", sorted({*range(L)} - {*full}), None)]
        both = {"its window": "window", "its state": "linear"}
        cases += [("window + linear", what, range(L), part) for what, part in both.items()]
        for name, what, numbers, part in cases:
            losses = (report.loss_of(m) for m in (silenced(models[name], numbers, part), models[name]))
            rise, se = loss_difference(*losses)
            parts.append({"model": name, "zeroed": what, "blocks": len(numbers), "rise": rise, "+-": se})
        report.sweep("Rise of the loss without a part, which gives zeros (nats)", parts)

        # Bytes and time over the length of the text
        every, table = {"softmax": range(L)} | layouts, []
        for n in (32, 64, *study.LENGTHS):
            table.append({"tokens": n} | {name: study.bytes_at(rows[name], n) / 1e3 for name in every})
        report.sweep("What a text takes (kB)", table)
        title = "Attention of a decode step in all layers (ms)"

        def functions(n):
            k, v = torch.randn(2, 1, H, n, D, device=args.device).to(args.dtype)
            return step_forms(every, L, k, v)

        times = report.time_sweep(title, "tokens", study.lengths(args), functions)
        others = study.CONTROL, "all linear", "2:1, no transfer"
        above, order, transfer = (study.between(report, models, "2:1", other) for other in others)
        report.why(above + order + transfer)
        parts = [(f"{r['model']} without {r['zeroed']}", r["model"], r["rise"], r["+-"]) for r in parts]
        report.why(words.loss_between(*parts[0]) + words.loss_between(*parts[3]))
        kv, kv_left = (rows[name]["kv_bytes_per_token"] for name in ("softmax", "2:1"))
        keeps = "What the linear layers of 2:1 keep", rows["2:1"]["state_bytes"], kv - kv_left
        longest = words.at_size(table[-1], "tokens", "2:1", "softmax", "memory")
        report.why(words.state_size(*keeps, p.seqlen) + longest)
        report.why(words.crossover(times, "tokens", "2:1", "softmax") + words.growth(times, "tokens", every))
        study.plot_memory(report, rows, arms, p.seqlen)
        report.plot_sweep(title)
        report.finish()
