"""Trains GPTlite on Shakespeare's plays, and writes the checkpoint that every other script loads.

Idea: plain next-character training, arranged so that 30 million tokens fit two CPU cores: bfloat16
matrix products, attention tiled along the queries so that half of what the mask hides is never computed,
and stochastic depth (deeper blocks are skipped more often), which regularises like dropout but removes
work instead of adding random numbers. A state file is written every few minutes, and every batch
follows from the seed and the step, so a killed run resumes and repeats itself exactly.

Exact or approximate: tiling is exact; bfloat16 products and stochastic depth change the training run,
not the trained model, which is evaluated whole.

Run: python main_training.py --steps 7400            (--resume goes on after an interruption)

Source: Radford et al., GPT-2, 2019; Loshchilov and Hutter, AdamW, 2019; Huang et al., Deep Networks with
Stochastic Depth, 2016.
"""

import math

import torch
import torch.nn.functional as F

from data.shakespeare import get_batch
from gptlite import GPTlite, MultiHeadAttention, scaled_dot_product_attention
from inference_training import autocast, optimizer_step

DROPOUT = 0.0  # 0 to 1; its random numbers cost 13% of a step on a CPU, so the next line takes its place
CURVE_WINDOWS = 64  # windows of an evaluation during training; the end is evaluated like every method
DROP = 0.3  # probability of leaving out the last block in a step; earlier blocks in proportion


def tiled_causal_attention(Q, K, V, tile=128):
    """Textbook causal attention, one tile of queries at a time, on the keys that this tile can see.

    Args: Q, K, V [B, H, T, D]; tile: queries in a tile.
    Returns: [B, H, T, D]. With T = 2 * tile a quarter of the score matrix is never computed.
    """
    T, D = Q.shape[-2:]
    out = []
    for start in range(0, T, tile):
        stop = min(start + tile, T)
        scores = Q[..., start:stop, :] @ K[..., :stop, :].transpose(-2, -1)  # [B, H, tile, stop]
        hidden = torch.full((stop - start, stop), float("-inf"), dtype=scores.dtype, device=Q.device)
        hidden = hidden.triu(start + 1)  # [tile, stop]: 0 where a key is visible
        weights = F.softmax(scores / math.sqrt(D) + hidden, dim=-1)  # [B, H, tile, stop]
        out.append(weights @ V[..., :stop, :])  # [B, H, tile, D]
    return torch.cat(out, dim=-2)


class MultiHeadAttention_Training(MultiHeadAttention):
    """The same attention for training: fused on a GPU, tiled on a CPU (whose fused backward is slow)."""

    def forward(self, x, causal_mask=True):
        Q = self.split_heads(self.query_proj(x))  # [B, H, T, D]
        K = self.split_heads(self.key_proj(x))  # [B, H, T, D]
        V = self.split_heads(self.value_proj(x))  # [B, H, T, D]
        if x.device.type == "cpu":
            out = tiled_causal_attention(Q, K, V)  # [B, H, T, D]
        else:
            out = F.scaled_dot_product_attention(Q, K, V, is_causal=True)  # [B, H, T, D]
        return self.dropout(self.out_proj(self.merge_heads(out)))  # [B, T, E]


def forward_with_stochastic_depth(model, x, drop, generator):
    """GPTlite's forward pass that leaves out block l with probability drop * l / (L - 1).

    Args: x: token ids [B, T]; drop: probability of skipping the last block; generator: source of the
        decisions, one a block and step.
    Returns: logits [B, T, V]. What a block adds is divided by its probability of being there, so that
        its expectation is the whole model's.
    """
    L = len(model.blocks)
    positions = torch.arange(x.shape[1], device=x.device)  # [T]
    x = model.token_embedding(x) + model.position_embedding(positions)  # [B, T, E]
    for layer, block in enumerate(model.blocks):
        p = drop * layer / max(L - 1, 1)
        if torch.rand((), generator=generator) >= p:
            x = x + (block(x) - x) / (1 - p) if p else block(x)  # [B, T, E]
    return model.fc_out(model.ln(x))  # [B, T, V]


def training_step(model, optimizer, x, y, lr, drop, generator):
    """One step of training: forward with stochastic depth, backward, clipping, update.

    Args: x, y: inputs and targets [B, T]; lr: learning rate of this step; drop, generator: as in
        forward_with_stochastic_depth.
    Returns: the loss of the batch in nats per token, a tensor.
    """
    with autocast(x.device):
        logits = forward_with_stochastic_depth(model, x, drop, generator)  # [B, T, V]
    loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
    optimizer_step(model, optimizer, loss, lr)
    return loss.detach()


def batch_of_step(data, batch_size, seqlen, seed, step):
    """Inputs and targets [B, T] of a step, and the generator for what else the step draws.

    They follow from seed and step alone, so a resumed run sees what an uninterrupted one sees.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return *get_batch(data, batch_size, seqlen, generator), generator


def model_for_training(vocab_size, p):
    """GPTlite with random weights and the attention for training; p: its parameters."""
    model = GPTlite(vocab_size, p.d_model, p.n_heads, p.d_head, p.n_layers, DROPOUT, p.seqlen)
    for block in model.blocks:
        block.mha.__class__ = MultiHeadAttention_Training  # the same weights, another forward
    return model


if __name__ == "__main__":
    import signal
    import sys
    import tempfile
    import time
    from pathlib import Path

    from tqdm import tqdm

    import inference_report as rep
    import inference_training as training
    import inference_utils as utils
    from data.shakespeare import check_length, get_shakespeare_data
    from gptlite import get_gptlite_distilled_model_parameters, get_gptlite_model_parameters

    default = utils.ROOT / "checkpoints" / "gptlite_trained.pth"
    how = {"repeats": None, "dtype": False}  # it times nothing twice, and the weights it trains are float32
    parser = rep.options(__doc__, checkpoint=default, checkpoint_help="weights to write", **how)
    parser.add_argument("--size", choices=["full", "distilled"], default="full", help="which model")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=rep.positive_int, default=7400, help="length of the run in steps")
    length.add_argument("--minutes", type=rep.positive_int, help="length of the run in time instead")
    parser.add_argument("--resume", action="store_true", help="go on from the last saved state")
    with rep.script(parser) as args:
        sizes = {"full": get_gptlite_model_parameters, "distilled": get_gptlite_distilled_model_parameters}
        p = sizes["distilled" if args.quick else args.size]()
        if args.quick and args.resume:
            raise ValueError("--quick keeps nothing, so there is nothing to --resume")
        if args.quick:  # ten steps that leave nothing behind
            folder = tempfile.TemporaryDirectory()
            p = p._replace(batch_size=4, seqlen=64)
            args.steps, args.minutes, args.checkpoint = 10, None, Path(folder.name) / "quick.pth"
        rep.check_writable(args.checkpoint, (".pth",))
        state_path = args.checkpoint.with_suffix(".state")
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        check_length(train_data, p.seqlen, "the training part of the text")  # now, and not later
        check_length(valid_data, p.seqlen + 1, "the validation part of the text (its last tenth)")
        model = model_for_training(vocab_size, p).to(args.device)
        optimizer = training.make_optimizer(model, p.lr)
        settings = {"steps": None if args.minutes else args.steps, "minutes": args.minutes}
        settings |= {"seed": args.seed, "drop": DROP, "n_train": len(train_data), **p._asdict()}
        step, seconds = 0, 0.0
        losses, curve = [], []  # of the steps since the last point; [step, training loss, validation loss]
        if args.resume:
            types = {"model": dict, "optimizer": dict, "seconds": float, "curve": list}
            state = training.load_state(state_path, settings, **types)
            utils.load_weights(model, state["model"], str(state_path))
            optimizer.load_state_dict(state["optimizer"])
            step, seconds, curve = state["step"], state["seconds"], state["curve"]
            losses = state.get("losses", [])  # not in states of earlier versions

        def save(may_fail=False):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "settings": settings}
            state |= {"step": step, "seconds": seconds, "curve": curve, "losses": losses}
            training.save_state(state_path, state, model, may_fail=may_fail)

        def progress():
            return seconds / 60 / args.minutes if args.minutes else step / args.steps

        bar = tqdm(total=100, disable=None, bar_format="{percentage:.1f}%|{bar}| {remaining} left{postfix}")
        last_save = time.monotonic()
        interval, n_windows = (5, 4) if args.quick else (200, CURVE_WINDOWS)  # steps between evaluations
        with bar, training.stop_between_steps(signal.SIGINT) as stop:
            while progress() < 1 and not stop:
                with utils.Timer(args.device) as timer:
                    x, y, generator = batch_of_step(train_data, p.batch_size, p.seqlen, args.seed, step)
                    x, y = x.to(args.device), y.to(args.device)
                    lr = training.learning_rate(progress() if args.minutes else (step + 1) / args.steps, p.lr)
                    loss = training_step(model, optimizer, x, y, lr, DROP, generator).item()
                step, seconds = step + 1, seconds + timer.seconds
                training.check_finite(step, loss)
                losses.append(loss)
                if step % interval == 0 or progress() >= 1:
                    valid = utils.validation_loss(model, valid_data, n_windows, p.seqlen)
                    training.check_finite(step, valid)
                    curve.append([step, round(sum(losses) / len(losses), 4), round(valid, 4)])
                    losses = []
                    if bar.disable:
                        print(f"step {step}: loss {curve[-1][1]}, validation {valid:.4f}, {seconds:.0f} s")
                bar.n = min(100 * progress(), 100)
                known = f", validation {curve[-1][2]:.3f}" if curve else ""
                speed = step * p.batch_size * p.seqlen / seconds
                bar.set_postfix_str(f"step {step}, loss {loss:.3f}{known}, {speed:.0f} tokens/s")
                if time.monotonic() - last_save > 180:
                    save(may_fail=True)
                    last_save = time.monotonic()
            save()
        if stop:
            print(f"\nstopped at step {step}; '{training.command_line()} --resume' goes on")
            sys.exit(130)

        training.write_weights(args.checkpoint, model)
        trained = GPTlite(vocab_size, p.d_model, p.n_heads, p.d_head, p.n_layers, DROPOUT, p.seqlen)
        utils.load_weights(trained, utils.load_checkpoint(args.checkpoint)).to(args.device).eval()
        valid = utils.validation_loss(trained, valid_data, 4 if args.quick else 128, p.seqlen)
        parameters = p._asdict() | {"vocab_size": vocab_size, "n_parameters": utils.n_parameters(model)}
        facts = {"tokens_seen": step * p.batch_size * p.seqlen, "settings": settings}
        facts |= {"training_minutes": round(seconds / 60, 1), "device": rep.device_name(args.device)}
        json_path = training.write_card(
            args.checkpoint, parameters, valid, args.data, facts, CURVE_WINDOWS, curve
        )

        columns = {"training_loss": ("training loss", "{:.4f}"), "tokens_seen": ("tokens seen", "{:,}")}
        columns |= {"training_tokens_per_s": ("training tokens/s", "{:.0f}")}
        report = rep.Report(args, "training", trained, columns, batch_size=p.batch_size, seqlen=p.seqlen)
        speed = facts["tokens_seen"] / seconds
        report.row(
            f"GPTlite, {step} steps",
            baseline=True,
            valid_loss=valid,
            n_parameters=utils.n_parameters(trained),
            training_loss=curve[-1][1],
            tokens_seen=facts["tokens_seen"],
            training_tokens_per_s=speed,
        )
        Q, K, V = torch.randn(3, 2, p.n_heads, p.seqlen, p.d_head).unbind(0)
        textbook = scaled_dot_product_attention(Q, K, V)
        difference = utils.largest_difference(tiled_causal_attention(Q, K, V), textbook)
        report.check(f"tiled attention is the textbook's within 1e-5 ({difference:.0e})", difference < 1e-5)
        report.check("the model predicts better than chance", valid < math.log(vocab_size))
        cost = rep.forward_cost(p, vocab_size, p.batch_size, p.seqlen, 0, torch.float32)
        dtype = torch.bfloat16 if training.has_bfloat16(args.device) else torch.float32
        limit = rep.measure_ceilings(args.device, dtype).flops_per_s
        kept = 1 - DROP / 2  # share of the blocks that run
        per_token = cost.flops / (p.batch_size * p.seqlen)
        rate = 3 * kept * per_token * speed
        report.why(
            f"A token costs {per_token / 1e6:.0f} MFLOP forward and twice that backward; stochastic depth "
            f"runs {kept:.0%} of the blocks. {speed:.0f} tokens/s are {rate / 1e9:.0f} GFLOP/s, "
            f"{100 * rate / limit:.0f}% of the {limit / 1e9:.0f} that {str(dtype).removeprefix('torch.')} "
            "matrix products reach here; attention and element-wise operations take the rest."
        )
        report.why(
            f"{facts['tokens_seen'] / len(train_data):.1f} passes over {len(train_data):,} training "
            "characters. The training loss is measured with blocks left out: above the whole model's."
        )
        report.why(
            "A quick run keeps nothing."
            if args.quick
            else f"Written: {args.checkpoint.name} and {json_path.name}, validation loss {valid:.4f}; "
            f"{state_path.name}, from which --resume goes on, may be deleted."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            tokens = [point[0] * p.batch_size * p.seqlen / 1e6 for point in curve]
            axes.plot(tokens, [point[1] for point in curve], label="training (blocks left out)")
            axes.plot(
                tokens, [point[2] for point in curve], label=f"validation plays, {CURVE_WINDOWS} windows"
            )
            axes.set(xlabel="training tokens (millions)", ylabel="loss (nats per character)")
            axes.set_title(f"GPTlite on Shakespeare's plays: {valid:.3f} nats in the end, 128 windows")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
