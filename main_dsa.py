"""DeepSeek sparse attention (DSA): a small indexer scores all earlier tokens, attention reads the best ones.

An indexer beside the attention has a few narrow query heads and one narrow key a token. Its score of a token
is a weighted sum of ReLU(query . key) over its heads; the top_k tokens with the highest scores are chosen,
once for all heads, and attention reads no others. The indexer is trained first, with the model frozen, to
predict where the dense attention of all heads together goes (warm-up), then with the model on sparse
attention, where its input is detached: the text trains the model, the attention trains the indexer.

Approximate below top_k = all. Wins time on long texts: an index key is a fraction of a token's keys and
values, and no more than top_k of those are read. Loses memory, the index keys on top of the cache, and time
where top_k is most of the text or the text is as short as GPTlite's. Needs training, but little: the indexer
is small, and its target costs one pass of the model.

Run: python main_dsa.py            (--warmup-steps 0 shows an indexer that has learned nothing)

Source: DeepSeek-AI, DeepSeek-V3.2, 2025. There queries and keys of the indexer are in FP8 after a rotation.
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from data.shakespeare import get_batch
from gptlite_dsa import indexer_loss
from gptlite_gqa import grouped_weights
from gptlite_sparse import attention_inputs, causal
from inference_training import autocast, learning_rate, make_optimizer, optimizer_step


def batches(train_data, iters, lr, batch_size, seqlen, seed, device):
    """The batches and learning rates of train_steps: yields (x [B, T], y [B, T], rate) for each step."""
    generator = torch.Generator().manual_seed(seed)
    for step in tqdm(range(iters), desc="training", leave=False, disable=None):
        x, y = (t.to(device) for t in get_batch(train_data, batch_size, seqlen, generator))  # [B, T]
        yield x, y, learning_rate((step + 0.5) / iters, lr, warmup=0.1)


def warm_up(model, dense, train_data, iters, lr, batch_size, seqlen, seed=42):
    """First stage: trains the indexers of a GPTlite_DSA on the attention of the dense model, which is frozen.

    Args: dense: a GPTlite of the same weights; the others as in train_steps. Returns: the loss of every step,
        the mean over layers, in nats per token.
    """
    indexers = nn.ModuleList(block.mha.indexer for block in model.blocks)
    optimizer, device, losses = make_optimizer(indexers, lr), next(model.parameters()).device, []
    visible = causal(seqlen, seqlen, device)  # [T, T]
    for x, _, rate in batches(train_data, iters, lr, batch_size, seqlen, seed, device):
        with autocast(device):
            layers, parts = attention_inputs(dense, x), []  # of each layer (x, Q, K)
            for indexer, (inputs, Q, K) in zip(indexers, layers, strict=True):
                weights = grouped_weights(Q, K).float().mean(dim=1)  # [B, T, T]
                parts.append(indexer_loss(indexer(inputs).float(), weights, visible))
        loss = torch.stack(parts).mean()
        optimizer_step(indexers, optimizer, loss, rate)
        losses.append(loss.item())
    return losses


def train_sparse(model, train_data, iters, lr, batch_size, seqlen, seed=42):
    """Second stage: train_steps with the loss of the indexers, on chosen tokens, beside that of the text."""
    optimizer, device, losses = make_optimizer(model, lr), next(model.parameters()).device, []
    model.train()
    for x, y, rate in batches(train_data, iters, lr, batch_size, seqlen, seed, device):
        with autocast(device):
            logits = model(x)[0]  # [B, T, V]
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        losses.append(loss.item())
        optimizer_step(model, optimizer, loss + sum(block.mha.index_loss for block in model.blocks), rate)
    for block in model.blocks:
        block.mha.index_loss = None  # it holds the graph of the last step
    model.eval()
    return losses


if __name__ == "__main__":
    from functools import partial

    import gptlite_sparse as sparse
    import inference_report as harness
    import inference_sparse as study
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_dsa import GPTlite_DSA, choose_tokens, convert_mha_to_dsa, dsa_step, index_scores
    from gptlite_kvcache import GPTlite_KVCache
    from inference_report import Method
    from inference_training import UPTRAIN_LR, UPTRAINED_COLUMNS, uptrained, uptrained_figures
    from inference_utils import load_checkpoint, parameters_of
    from linear_packed import pack_linears
    from main_kvcache import generate_kvcache

    READ, WARMUP_LR = 1024, 1e-2  # tokens that attention alone reads
    quick = {"n_tokens": 8, "warmup_steps": 8, "uptrain_steps": 1}
    parser = harness.options(__doc__, 3, quick=quick, prompt_len=192, n_tokens=32)
    add, number = parser.add_argument, harness.positive_int
    add("--top-k", type=number, default=32, help="tokens that a query reads, in GPTlite")
    add("--warmup-steps", type=harness.count, default=30, help="steps of 4 x 256 tokens, indexers alone")
    add("--uptrain-steps", type=harness.count, default=20, help="steps of 8 x 256 tokens, whole models")
    with harness.script(parser) as args:
        text, k, name = harness.load_text(args), args.top_k, f"DSA {args.top_k}"
        (mha,) = harness.load_models(args, GPTlite_KVCache)
        (plain,) = harness.load_models(args, GPTlite, packed=False)
        state, p = convert_mha_to_dsa(load_checkpoint(args.checkpoint)), parameters_of(mha)
        model = harness.build(args, state, partial(GPTlite_DSA, top_k=k), packed=False).float()
        T = max(min(args.prompt_len, mha.seqlen - args.n_tokens), 1)
        prompts, columns = text.prompts(1, T), study.COLUMNS | UPTRAINED_COLUMNS
        report = harness.Report(args, "DSA", mha, columns, study.HIDE, text)
        choices = study.Choices(args, report, mha, text)

        def ready(model):  # for losses and decoding
            return pack_linears(copy.deepcopy(model).to(args.dtype))

        def figures_of(model):  # on the dense model's attention, each layer with its own indexer
            layers = zip(choices.inputs, model.blocks, strict=True)
            with torch.no_grad():
                chosen = [(Q, K, choose_tokens(one.mha.indexer(x), k)) for (x, Q, K), one in layers]
            return study.mean_figures([sparse.choice_figures(*layer) for layer in chosen]) | {"budget": k}

        before, training = ready(model), (text.train, args.uptrain_steps, UPTRAIN_LR, 8, p.seqlen)
        warm_up(model, copy.deepcopy(plain).float(), text.train, args.warmup_steps, WARMUP_LR, 4, p.seqlen)
        warm, control = ready(model), ready(uptrained(plain, *training))
        train_sparse(model, *training)
        trained = ready(model)
        figures = figures_of(warm) | uptrained_figures(report, trained, control)
        dense = Method("dense", generate_kvcache, mha, keys_read=(p.seqlen + 1) / 2)
        sparsely = Method(name, generate_kvcache, warm, exact=False, **figures)
        rows = report.compare(prompts, args.n_tokens, dense, sparsely, label="")
        row = choices.add(name, warm, rows[name])
        choices.add_trained(name, row, trained, control)
        figures = figures_of(before) | report.loss_figures(before, mha)
        first = report.row("DSA, not warmed up", same_output="approximate", **figures)
        choices.row("oracle for all heads", k, partial(sparse.choose_oracle, budget=k, n_choices=1))
        choices.row("window", k, partial(sparse.choose_window, budget=k))
        after = report.row("dense, trained on", **report.loss_figures(control, mha))
        whole = harness.build(args, state, partial(GPTlite_DSA, top_k=p.seqlen))
        study.check_model(report, prompts, warm, whole, mha)

        indexer = warm.blocks[0].mha.indexer
        queries = indexer.queries(torch.randn(1, 1, p.d_model, device=args.device).to(args.dtype))

        def attention(q, K, V):  # the indexer's work is part of it
            keys = K[:, :1, :, : indexer.d_index].contiguous()  # [1, 1, Sk, d]: any will do for times
            return lambda: dsa_step(q, K, V, index_scores(*queries, keys), READ)

        sweep = study.decode_sweep(args, report, p, "DSA", f"{READ} tokens", attention)
        found = f"{first['mass']:.0%} of the attention before the warm-up, {row['mass']:.0%} after it"
        more, gain = f"The indexers learn where to look: {found}.", row["mass"] - first["mass"]
        learned = words.choose(gain, (0.01, more), f"The indexers learn nothing: {found}.")
        report.why(learned + words.loss(row) + choices.between(name, f"window {k}"))
        report.why(words.recovery(row, args.uptrain_steps) + words.loss(after))
        study.explain(report, row, rows["dense"], sweep, "DSA")
        choices.plot_losses()
        report.finish()
