"""What a step must cost: operations and bytes of a forward pass, and what this machine can do at most."""

import glob
import os
import tempfile
from collections import namedtuple
from pathlib import Path
from statistics import median

import torch

from inference_utils import Timer, calls_per_ms, n_parameters

Cost = namedtuple("Cost", "flops n_bytes")
Ceilings = namedtuple("Ceilings", "flops_per_s bytes_per_s")


def forward_cost(p, vocab_size, batch_size, n_new, n_past, dtype, weights=True):
    """Operations and bytes of one forward pass over n_new tokens a sequence behind n_past cached ones.

    Args: p: parameters of the model (n_layers, d_model); dtype: of weights and cache; weights: False
        leaves out the bytes of the weights.
    Returns: Cost. Per token and layer 8 d^2 for the projections, 16 d^2 for the MLP, 4 n d for attention
        over n keys, and 2 d V for the head; the weights are read once, each sequence's keys and values
        once (read if they were cached, written if they are new). Activations are left out.
    """
    d, L = p.d_model, p.n_layers
    size = torch.finfo(dtype).bits // 8
    tokens = batch_size * n_new
    keys_seen = batch_size * sum(range(n_past + 1, n_past + n_new + 1))  # over all queries
    flops = L * (24 * d * d * tokens + 4 * d * keys_seen) + 2 * d * vocab_size * tokens
    n_weights = L * (12 * d * d + 13 * d) + d * vocab_size + vocab_size + 2 * d
    cache = 2 * L * d * batch_size * (n_past + n_new)
    return Cost(flops, size * (n_weights * weights + cache))


def step_cost(model, n_past):
    """Operations and bytes of a decode step of one sequence, from the tensors of a model of any shape.

    Args: model: a GPTlite whose heads, neurons, channels or blocks may be fewer; n_past: cached tokens.
    Returns: Cost. Of an embedding one row is read; every other number is read, multiplied and added once.
    """
    embeddings = model.token_embedding.weight.numel() + model.position_embedding.weight.numel()
    cache = sum(2 * block.mha.n_heads * block.mha.d_head * n_past for block in model.blocks)
    n_numbers = n_parameters(model) - embeddings + cache
    return Cost(2 * n_numbers, n_numbers * next(model.parameters()).element_size())


def last_level_cache_bytes(device):
    """Bytes of the cache in front of the memory; 32 MB where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [32_000_000]
    for file in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*/size"):
        text = Path(file).read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1024, "M": 1024**2}.get(text[-1], 0))
    return max(sizes[1:] or sizes)


def best_seconds(function, device, seconds):
    """Seconds of a call of function() in the fastest of several loops, which take `seconds` together.

    A loop is many calls between two synchronisations, since a GPU's calls only start the work: a single call
    would be measured together with its launch and the waiting.
    """
    n_calls, fastest, spent = calls_per_ms(function, device, 10.0), float("inf"), 0.0
    while spent < seconds:
        with Timer(device) as timer:
            for _ in range(n_calls):
                function()
        fastest, spent = min(fastest, timer.seconds / n_calls), spent + timer.seconds
    return fastest


def measure_ceilings(device, dtype=torch.float32, seconds=0.3):
    """What this machine reaches at best: a matrix product, and reading more than its last cache holds.

    Args: seconds: how long each of the three or four measurements takes at least.
    Returns: Ceilings(operations per second, bytes per second); for the product, of large ones and one of the
        model's size (which of them is faster differs by machine).
    """
    shapes = [(256, 384, 1536), (1024, 1536, 1536)]
    if device.type == "cuda":
        shapes.append((8192, 8192, 8192))  # smaller ones leave multiprocessors idle
    flops_per_s = 0
    for n, k, m in shapes:
        a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((n, k), (k, m)))
        flops_per_s = max(flops_per_s, 2 * n * k * m / best_seconds(lambda a=a, b=b: a @ b, device, seconds))
    least = 1_000_000_000 if device.type == "cuda" else 128_000_000  # bytes, long against a launch
    # as int32 words: the largest of integers is limited by reading on every processor
    n_words = max(4 * last_level_cache_bytes(device), least) // 4
    buffer = torch.ones(n_words, dtype=torch.int32, device=device)
    return Ceilings(flops_per_s, n_words * 4 / best_seconds(lambda: buffer.max(), device, seconds))


def disk_bytes_per_s(n_bytes, repeats=3):
    """How fast a file of n_bytes is read from the disk of the temporary folder, bytes per second.

    None where the system keeps what it has read of a file and cannot be asked to forget it.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    seconds = []
    for _ in range(repeats):
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(os.urandom(n_bytes))
            os.fsync(file.fileno())  # what is not on the disk yet cannot be forgotten
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            with Timer(torch.device("cpu")) as timer:
                file.readall()
        seconds.append(timer.seconds)
    return n_bytes / median(seconds)


def lower_bound_ms(cost, ceilings):
    """The time below which no program can be: the slower of computing and reading."""
    return 1000 * max(cost.flops / ceilings.flops_per_s, cost.n_bytes / ceilings.bytes_per_s)


def limit_of(cost, ceilings):
    """'computing' or 'reading': which of the two is the bound."""
    computing, reading = cost.flops / ceilings.flops_per_s, cost.n_bytes / ceilings.bytes_per_s
    return "computing" if computing > reading else "reading"


def share_of(bound_ms, measured_ms):
    """'45%': the bound as a share of what was measured; '-' where nothing was."""
    return f"{100 * bound_ms / measured_ms:.0f}%" if measured_ms else "-"
