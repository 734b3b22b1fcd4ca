"""What the scripts on pruning share: how fast models of any shape decode, and what a step of theirs reads."""

import torch

import inference_report as rep
import inference_utils as utils
from main_kvcache import generate_kvcache
from main_pruning import with_kv_cache

DECODE_COLUMNS = {"step_mb": ("step MB", "{:.1f}"), "of_limit": ("of limit", "{:.0%}")}


@torch.no_grad()
def decode_rows(models, prompt, n_tokens, repeats, dtype):
    """Decodes n_tokens after a prompt [1, T] with every model of {name: model}, in alternation.

    Returns: {name: figures of its row}: times, cache and peak memory, and step_mb, the megabytes that a step
        reads in the middle of the run, with of_limit, the least time this takes as a share of TPOT.
    """
    methods = []
    for name, model in models.items():
        cached = with_kv_cache(model).to(dtype)
        run = lambda m=cached: generate_kvcache(m, prompt, n_tokens, m.seqlen)  # noqa: E731
        methods.append(utils.Method(name, run, [cached]))
    results = utils.measure(methods, n_tokens, repeats)
    limits, rows = rep.measure_ceilings(prompt.device, dtype), {}
    for name, run, (model,), _ in methods:
        kv_cache = [t for kv in model(prompt)[1] for t in kv]
        kv_bytes = utils.cache_bytes_per_token(kv_cache, prompt.shape[1], 1)
        embeddings = model.token_embedding.weight.numel() + model.position_embedding.weight.numel()
        n_bytes = (utils.n_parameters(model) - embeddings) * dtype.itemsize  # of an embedding one row is read
        n_bytes += kv_bytes * (prompt.shape[1] + n_tokens // 2)
        cost = rep.Cost(2 * n_bytes / dtype.itemsize, n_bytes)  # each number is multiplied and added once
        rows[name] = {
            "measurement": results[name],
            "kv_bytes_per_token": kv_bytes,
            "peak_memory_mb": utils.peak_memory_mb(run, model, inputs=[prompt]),
            "step_mb": n_bytes / 1e6,
            "of_limit": rep.lower_bound_ms(cost, limits) / results[name].tpot_ms,
        }
    return rows
