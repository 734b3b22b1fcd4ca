"""Trains GPTlite on Shakespeare's plays, and writes the checkpoint that every other script loads.

Idea: plain next-character training, arranged so that 30 million tokens fit two CPU cores: bfloat16
matrix products, attention tiled along the queries so that most of the masked half is never computed,
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

from gptlite import MultiHeadAttention
from inference_utils import learning_rate, make_optimizer


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


def training_step(model, optimizer, x, y, lr, drop=0.0, generator=None, autocast_dtype=None):
    """One step: forward, backward, gradient clipping at norm 1, update.

    Args: x, y: inputs and targets [B, T]; lr: learning rate of this step; drop, generator: stochastic
        depth; autocast_dtype: type of the matrix products, None for the model's own.
    Returns: the loss of the batch in nats per token, a tensor.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    with torch.autocast(x.device.type, autocast_dtype, enabled=autocast_dtype is not None):
        logits = forward_with_stochastic_depth(model, x, drop, generator)  # [B, T, V]
    loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


if __name__ == "__main__":
    import argparse
    import sys
    import time
    from pathlib import Path

    from tqdm import tqdm

    from data.shakespeare import get_batch, get_shakespeare_data
    from gptlite import (
        GPTlite,
        get_gptlite_distilled_model_parameters,
        get_gptlite_model_parameters,
    )
    from inference_utils import ROOT, validation_loss, write_atomically

    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=["full", "distilled"], default="full")
    parser.add_argument("--steps", type=int, default=7400)
    parser.add_argument("--drop", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "checkpoints" / "gptlite_trained.pth")
    args = parser.parse_args()

    sizes = {"full": get_gptlite_model_parameters, "distilled": get_gptlite_distilled_model_parameters}
    p = sizes[args.size]()
    vocab_size, train_data, valid_data, _, _ = get_shakespeare_data()
    torch.manual_seed(args.seed)
    model = GPTlite(vocab_size, p.d_model, p.n_heads, p.d_head, p.n_layers, 0.0, p.seqlen)
    for block in model.blocks:
        block.mha.__class__ = MultiHeadAttention_Training
    optimizer = make_optimizer(model, p.lr)
    generator = torch.Generator()
    step, seconds, curve = 0, 0.0, []
    state_path = args.output.with_suffix(".state")
    if args.resume:
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, seconds, curve = state["step"], state["seconds"], state["curve"]

    def save_state():
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "seconds": seconds,
            "curve": curve,
            "steps": args.steps,
        }
        write_atomically(state_path, lambda path: torch.save(state, path))

    bar = tqdm(total=args.steps, initial=step, mininterval=20, file=sys.stdout, ncols=110)
    last_save, train_loss = time.time(), []
    while step < args.steps:
        start = time.time()
        generator.manual_seed(args.seed * 1_000_003 + step)
        x, y = get_batch(train_data, p.batch_size, p.seqlen, generator)
        lr = learning_rate((step + 1) / args.steps, p.lr)
        loss = training_step(model, optimizer, x, y, lr, args.drop, generator, torch.bfloat16)
        train_loss.append(loss.item())
        step += 1
        seconds += time.time() - start
        bar.update()
        if step % 200 == 0 or step == args.steps:
            valid = validation_loss(model, valid_data, 64 if step < args.steps else 256, p.seqlen)
            curve.append([step, round(sum(train_loss) / len(train_loss), 4), round(valid, 4)])
            train_loss = []
            bar.set_postfix_str(f"loss {curve[-1][1]:.3f} valid {valid:.3f}")
        if time.time() - last_save > 180 or step == args.steps:
            save_state()
            last_save = time.time()
