"""Trains GPTlite on Shakespeare's plays, and writes the checkpoint that every other script loads.

Idea: plain next-character training with dropout on embeddings, attention and MLP, arranged so that tens of
millions of tokens fit two CPU cores: matrix products in bfloat16, attention tiled along the queries so that
half of what the mask hides is never computed, and dropout from one random byte an element. Every batch and
every mask follow from the seed and the step, and a state is written every few minutes, so a run that was
stopped goes on and repeats itself exactly.

Exact or approximate: tiling is exact; bfloat16 products and dropout change the training run, not the trained
model, which is evaluated whole. Wins over stochastic depth, the regulariser of an earlier run, in what the
model is: every block counts, while blocks that were left out at random could be removed afterwards without a
loss. Loses time: about a tenth of a step goes to random numbers that skipping blocks does not need.

Run: python main_training.py            (hours; --resume goes on after an interruption)

Source: Radford et al., GPT-2, 2019; Srivastava et al., Dropout, 2014; Loshchilov and Hutter, AdamW, 2019;
Haegele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, 2024 (schedule).
"""

import copy

import torch
import torch.nn.functional as F

from data.shakespeare import get_batch
from gptlite import GPTlite
from inference_training import use_training_attention

DROPOUT = 0.2  # as in nanoGPT's character model of this shape
PEAK_LR = 1e-3
DECAY = 0.3  # share of the run in which the learning rate falls


class ByteDropout(torch.nn.Dropout):
    """Dropout that draws one random byte an element, eight at once: a fifth of nn.Dropout's time on a CPU."""

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        n_dropped = round(256 * self.p)  # of 256 values of a byte
        words = torch.empty(x.numel() // 8 + 1, dtype=torch.int64, device=x.device).random_(-(2**63), None)
        keep = words.view(torch.uint8)[: x.numel()].view(x.shape) >= n_dropped  # [...]
        return x * keep * (256 / (256 - n_dropped))


class GPTlite_Training(GPTlite):
    """GPTlite with the attention for training, and dropout on embeddings, attention and MLP outputs."""

    def __init__(self, vocab_size, d_model, n_heads, d_head, n_layers, dropout_p, seqlen):
        super().__init__(vocab_size, d_model, n_heads, d_head, n_layers, dropout_p, seqlen)
        self.dropout = ByteDropout(dropout_p)
        for block in use_training_attention(self).blocks:
            block.mha.dropout = block.ffwd.net[3] = self.dropout

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)  # [T]
        x = self.dropout(self.token_embedding(x) + self.position_embedding(positions))  # [B, T, E]
        for block in self.blocks:
            x = block(x)  # [B, T, E]
        return self.fc_out(self.ln(x))  # [B, T, V]


def warmup_stable_decay(progress, peak_lr, warmup=0.01, decay=DECAY):
    """Learning rate: a warm-up, constant, then a straight fall to zero. progress: share done, 0 to 1.

    Unlike a cosine it does not depend on the length of the run before the fall begins, so that a run can be
    made longer when it goes on.
    """
    return peak_lr * min(1.0, progress / warmup, (1 - progress) / decay)


def batch_of_step(data, batch_size, seqlen, seed, step):
    """Inputs and targets [B, T] of a step; what dropout draws follows from seed and step as well."""
    torch.manual_seed(seed * 1_000_003 + step)  # dropout draws from this one
    return get_batch(data, batch_size, seqlen, torch.Generator().manual_seed(seed * 1_000_003 + step))


def next_token_loss(logits, targets):
    """Mean cross entropy in nats: logits [B, T, V], targets [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def without_blocks(model, layers):
    """A copy of the model without the blocks of these numbers."""
    shorter = copy.deepcopy(model)
    shorter.blocks = torch.nn.ModuleList(b for i, b in enumerate(shorter.blocks) if i not in layers)
    return shorter


if __name__ == "__main__":
    import math

    import inference_report as harness
    import inference_training as training
    import inference_utils as utils
    import inference_words as words
    from gptlite import get_gptlite_distilled_model_parameters, get_gptlite_model_parameters

    default = utils.ROOT / "checkpoints" / "gptlite_trained.pth"
    how = {"repeats": None, "dtype": False}  # it times nothing twice, and the weights it trains are float32
    how |= {"checkpoint": default, "checkpoint_help": "weights to write"}
    parser = harness.options(__doc__, quick={"size": "distilled", "steps": 10}, **how)
    parser.add_argument("--size", choices=["full", "distilled"], default="full", help="which model")
    parser.add_argument("--steps", type=harness.positive_int, default=11000, help="steps of the whole run")
    parser.add_argument("--resume", action="store_true", help="go on from the last saved state")
    columns = {"train_loss": ("train loss", "{:.4f}"), "tokens_seen": ("tokens seen", "{:,}")}
    columns |= {"training_tokens_per_s": ("training tokens/s", "{:.0f}")}
    with harness.script(parser) as args:
        sizes = {"full": get_gptlite_model_parameters, "distilled": get_gptlite_distilled_model_parameters}
        p = sizes[args.size]()._replace(lr=PEAK_LR, dropout_p=DROPOUT)
        p = p._replace(batch_size=4) if args.quick else p
        output, text = training.output_of(args, args.checkpoint), harness.load_text(args)
        shape = {key: value for key, value in p._asdict().items() if key not in ("batch_size", "lr")}
        model = GPTlite_Training(text.vocab_size, **shape).to(args.device).train()
        report = harness.Report(args, "training", model, columns, text=text, **p._asdict(), steps=args.steps)

        def batch_of(step):
            batch = batch_of_step(text.train, p.batch_size, p.seqlen, args.seed, step)
            return [part.to(args.device) for part in batch]

        curves, facts = training.train_side_by_side(
            {"GPTlite": model},
            batch_of,
            lambda name, logits, batch: next_token_loss(logits, batch[1]),
            training.settings_of(args, text, p, "steps", "seed") | {"decay": DECAY},
            text.valid,
            args.n_windows,
            output.with_suffix(".state"),
            args.resume,
            schedule=warmup_stable_decay,
            n_evaluations=max(args.steps // 200, 2),
            unsettled=1 - DECAY,
        )
        curve = curves["GPTlite"]
        training.write_weights(output, model)  # together: the card holds their hash
        trained = utils.model_from(utils.load_checkpoint(output), GPTlite, text.vocab_size).to(args.device)
        last = range(p.n_layers)
        losses = {"none": report.loss_of(trained)}
        for layers in [*([i] for i in last), *(last[-n:] for n in range(2, p.n_layers))]:
            name = ", ".join(str(i + 1) for i in layers)
            losses[name] = report.loss_of(without_blocks(trained, layers))
        costs = {name: utils.loss_difference(one, losses["none"]) for name, one in losses.items()}
        rows = [{"blocks left out": name, "costs": cost, "+-": se} for name, (cost, se) in costs.items()]
        report.sweep("What the blocks are worth: loss without them", rows)
        facts["train_loss"] = round(utils.validation_loss(trained, text.train, args.n_windows), 4)
        facts["costs_of_blocks"] = {row["blocks left out"]: round(row["costs"], 4) for row in rows[1:]}
        loss, n_weights = losses["none"].mean().item(), utils.n_parameters(trained)
        parameters = p._asdict() | {"vocab_size": text.vocab_size, "n_parameters": n_weights}
        training.write_card(output, parameters, loss, args.data, facts, args.n_windows, curve)

        seen = {key: facts[key] for key in ("tokens_seen", "train_loss")}
        seen["training_tokens_per_s"] = facts["tokens_seen"] / (60 * max(facts["training_minutes"], 0.01))
        report.row(f"GPTlite, {args.steps} steps", valid_loss=loss, n_parameters=n_weights, **seen)
        report.check("the model predicts better than chance", loss < math.log(text.vocab_size))
        gap = f"{loss - facts['train_loss']:+.3f} nats"
        by_heart = (
            f"Unseen plays cost {gap} against the training text, which the model knows by heart so far."
        )
        same = f"Unseen plays cost {gap} against the training text: nothing is known by heart yet."
        report.why(words.choose(loss - facts["train_loss"], (0.02, by_heart), same))
        least = min(rows[1 : 1 + p.n_layers], key=lambda row: row["costs"])
        what = f"leaving out block {least['blocks left out']} costs {least['costs']:+.4f} nats"
        counts, idle = f"Every block counts: {what}, and no other less.", f"Not every block counts: {what}."
        report.why(words.choose(least["costs"], (2 * least["+-"], counts), idle))
        tokens, seen, unseen = zip(
            *((n * p.batch_size * p.seqlen / 1e6, *pair) for n, *pair in curve), strict=True
        )
        lines = {"training (with dropout)": (tokens, seen), "unseen plays": (tokens, unseen)}
        report.plot_lines(lines, "million tokens", "loss (nats per character)", f"{loss:.3f} nats in the end")
        report.finish()
