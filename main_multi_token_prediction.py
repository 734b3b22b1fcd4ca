"""Multi-token prediction: a block trained behind a frozen model says what comes after the next token.

The block takes the model's hidden state of a token and the embedding of the token that follows, and gives a
state that stands for the hidden state of that one: the model's own head reads the token after it from
there. Fed with its own output it goes on for as many tokens as are wanted. Those are drafts, which the
model verifies all at once; then its true states take the place of the guessed ones.

Exact: drafts of any module, an untrained one too, leave the tokens as they are. Wins without a second
model: a draft costs a block, sees what the model has understood, and needs keys and values of one layer.
Loses against a small model that was distilled for long; and with each further draft, as a state made of
guessed states drifts away. The trunk stays frozen here and learns nothing; trained along from the start, it
would.

Run: python main_multi_token_prediction.py            (--train-steps 1000 for better drafts)

Source: Gloeckle et al., Better & Faster Large Language Models via Multi-token Prediction, 2024; DeepSeek-AI,
DeepSeek-V3, 2024 (the module in sequence); Li et al., EAGLE, 2024 (its loss of states).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptlite_kvcache import Block_KVCache, GPTlite_StaticKVCache
from inference_training import train_heads
from main_speculative_decoding import generate_speculative


class MTP(nn.Module):
    """From states of tokens and embeddings of the next ones to what the next ones' states will be.

    States are those behind the last block and before the last norm. They hold their positions already.
    """

    def __init__(self, trunk):
        super().__init__()
        E, mha = trunk.fc_out.in_features, trunk.blocks[0].mha
        self.ln_state, self.ln_token, self.merge = nn.LayerNorm(E), nn.LayerNorm(E), nn.Linear(2 * E, E)
        self.block = Block_KVCache(E, mha.n_heads, mha.d_head, 0.0)
        with torch.no_grad():
            for p in self.block.parameters():
                if p.ndim == 2:
                    nn.init.normal_(p, std=0.02)
            self.merge.weight.copy_(torch.eye(E).repeat(1, 2))  # begins as the sum of both
            self.merge.bias.zero_()
        self.to(trunk.position_embedding.weight)

    def forward(self, tokens, states, trunk, kv_cache=None):
        """Tokens [B, S], and states [B, S, E] of those before each -> states of these, the block's cache.

        kv_cache: (k, v) of the block for the tokens before, or None; the trunk gives the embeddings.
        """
        e = self.ln_token(trunk.token_embedding(tokens))  # [B, S, E]
        return self.block(self.merge(torch.cat([self.ln_state(states), e], dim=-1)), kv_cache)


def states_of(trunk, tokens):
    """What the last block of a GPTlite gives for tokens [B, T], before the last norm: [B, T, E]."""
    h = trunk.token_embedding(tokens) + trunk.position_embedding.weight[: tokens.shape[1]]  # [B, T, E]
    for block in trunk.blocks:
        h = block(h)  # [B, T, E]
    return h


def head_of(trunk, states):
    """Logits that the trunk's own norm and head read from states: [..., E] -> [..., V]."""
    return trunk.fc_out(trunk.ln(states))


def mtp_loss(mtp, trunk, tokens, weight=0.3):
    """How far module and trunk differ in what they say after each next token, and in its state.

    The trunk's own probabilities are the targets. T tokens give T - 1 of them: pair t holds the state of
    token t and the token t + 1, and what the trunk says behind that is its target. Nothing wraps around.
    """
    with torch.no_grad():
        states = states_of(trunk, tokens)  # [B, T, E]
        target = head_of(trunk, states[:, 1:]).float().softmax(dim=-1)  # [B, T - 1, V]
    guessed, _ = mtp(tokens[:, 1:], states[:, :-1], trunk)  # [B, T - 1, E]
    logits = head_of(trunk, guessed).float()  # [B, T - 1, V]
    scale = states.float().std()
    of_states = F.smooth_l1_loss(guessed.float() / scale, states[:, 1:].float() / scale)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1)) + weight * of_states


def logits_by_depth(mtp, trunk, tokens, n_depths):
    """What the module says after one, two, .. of its steps, each fed with the true next token.

    Args: tokens [B, T]. Yields: for depth k logits [B, T - k, V], at place t of the token t + k + 1.
    """
    states = states_of(trunk, tokens)  # [B, T, E]
    for k in range(1, n_depths + 1):
        states, _ = mtp(tokens[:, k:], states[:, :-1], trunk)  # [B, T - k, E]
        yield head_of(trunk, states)


class GPTlite_Trunk(GPTlite_StaticKVCache):
    """GPTlite_StaticKVCache that keeps the states of the tokens which it read last: hidden [B, S, E]."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.hidden = None
        self.ln.register_forward_pre_hook(self.keep)

    def keep(self, _, inputs):
        self.hidden = inputs[0]  # [B, S, E]

    def forward(self, x, kv_cache=None):
        output = super().forward(x, kv_cache)
        self.hidden = None if kv_cache is None else self.hidden  # such a text does not go on
        return output


class MTPDraft:
    """Drafts of an MTP module for generate_speculative, whose target is the GPTlite_Trunk."""

    def __init__(self, mtp, trunk):
        self.mtp, self.trunk = mtp, trunk
        self.reset()

    def reset(self):
        self.kv_cache, self.n_read = None, 0  # of true states only: what was guessed is never kept
        self.trunk.hidden = None

    def propose(self, ids, n, temperature=0.0, generators=None):
        """n greedy drafts [1, n]. The trunk has just read the tokens from number n_read on."""
        states = self.trunk.hidden[:, : len(ids) - 1 - self.n_read]  # [1, S, E], of all tokens but the last
        new = torch.tensor([ids[self.n_read + 1 :]], device=states.device)  # [1, S]
        kv_cache, drafted = self.kv_cache, []
        for i in range(n):
            states, kv_cache = self.mtp(new, states, self.trunk, kv_cache)  # [1, S, E]
            if i == 0:
                self.kv_cache, self.n_read = kv_cache, len(ids) - 1
            states = states[:, -1:]  # [1, 1, E]
            new = head_of(self.trunk, states).argmax(dim=-1)  # [1, 1]
            drafted.append(new)
        return torch.cat(drafted, dim=1), None


if __name__ == "__main__":
    import copy

    import inference_report as harness
    import inference_speculation as study
    import inference_words as words
    from gptlite import GPTlite
    from inference_utils import n_parameters
    from linear_packed import pack_linears
    from main_kvcache import generate_static

    quick = {"n_requests": 1, "prompt_len": 16, "n_tokens": 12, "draft_lens": [2], "train_steps": 2}
    parser = harness.options(__doc__, 3, quick=quick, n_requests=4, prompt_len=64, n_tokens=96)
    add, number = parser.add_argument, harness.positive_int
    add("--draft-lens", type=number, nargs="+", default=[1, 2, 3, 4], help="drafts of a round")
    add("--train-steps", type=harness.count, default=300, help="steps of 6 x 256 tokens")
    with harness.script(parser) as args:
        text, T, N, lens = harness.load_text(args), args.prompt_len, args.n_tokens, sorted({*args.draft_lens})
        (target,) = harness.load_models(args, GPTlite_Trunk)
        trunk = harness.load_models(args, GPTlite, packed=False)[0].float().requires_grad_(False)
        study.check_request(target, torch.zeros(1, T), N)
        prompts = text.prompts(args.n_requests, T)  # [n, T]
        columns = harness.COLUMNS | study.COLUMNS
        report = harness.Report(args, "multi-token prediction", target, columns, study.HIDE, text)
        before, mtp = copy.deepcopy(trunk.state_dict()), MTP(trunk)
        modules = {"untrained": copy.deepcopy(mtp).eval(), "trained": mtp}
        training = text.train, args.train_steps, 2e-3, 2 if args.quick else 6, trunk.seqlen, args.seed
        losses = train_heads(mtp, lambda heads, x: mtp_loss(heads, trunk, x), *training)
        same = all(torch.equal(before[name], p) for name, p in trunk.state_dict().items())
        report.check("the trunk is unchanged, bit for bit", same)

        depths, tokens = max(lens), text.prompts(2 if args.quick else 16, trunk.seqlen)  # [B, T]
        lines = [{"depth": k} for k in range(1, depths + 1)]
        with torch.no_grad():
            best = trunk(tokens).argmax(dim=-1)  # [B, T]
            for name, module in modules.items():
                for k, logits in enumerate(logits_by_depth(module, trunk, tokens, depths), 1):
                    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, k + 1 :].flatten())
                    agree = (logits.argmax(dim=-1) == best[:, k:]).float().mean()
                    lines[k - 1] |= {f"loss, {name}": loss.item(), f"agreement, {name}": agree.item()}
        report.sweep(
            "By depth, on real text: loss of the token there, agreement with the trunk's choice", lines
        )

        test, names, cost = study.Study(target), {n: f"{n} drafts" for n in lens}, target.fc_out.in_features
        methods = [test.baseline(generate_static)]
        drafts = {k: MTPDraft(pack_linears(m.to(args.dtype)), target) for k, m in modules.items()}
        forms = [(name, "trained", n) for n, name in names.items()] + [("untrained", "untrained", lens[-1])]
        for name, kind, n in forms:
            more = drafts[kind], n, test.cache
            methods.append(test.method(name, generate_speculative, *more, models=[modules[kind]]))
        rows = report.compare(prompts, N, *methods, label="")

        n_past, speed = T + N // 2, []
        h = torch.zeros(1, n_past, cost, device=args.device, dtype=args.dtype)  # [1, S, E]
        new = torch.zeros(1, n_past, dtype=torch.int64, device=args.device)  # [1, S]
        _, past = mtp(new, h, target)
        steps = {"a draft": lambda: head_of(target, mtp(new[:, :1], h[:, :1], target, past)[0])}
        times = study.RowTimes(args, target, n_past, [n + 1 for n in lens], steps)
        times.sweep(report, f"A forward behind {n_past} tokens")
        for name, kind, n in forms:
            row, drawn = rows[name], test.rounds[name]
            given = study.round_figures(drawn)["tokens_per_round"]
            test.add(row, n * times.of("a draft") + times.of(n + 1), given)
            row["kv_bytes_per_token"] += 2 * cost * args.dtype.itemsize  # of one block
            row["n_parameters"] += n_parameters(modules[kind])
            if kind == "trained":
                speed.append({"drafts": n, "measured": row.get("speedup"), "predicted": row["predicted"]})
        title = "Speed-up by the drafts of a round"
        report.sweep(title, speed)
        top = rows[names[max(speed, key=lambda line: line["measured"] or 0)["drafts"]]]
        for row in (top, rows["untrained"]):
            report.why(words.compare(row, rows["static"], "tokens_per_s") + words.rounds(row))
        report.why(words.best_length(speed))
        report.why(words.drift(lines, "agreement, trained", "agreement, untrained"))
        report.plot_sweep(title, "speed-up", "")
        report.finish()
