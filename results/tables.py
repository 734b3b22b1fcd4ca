"""The README's table of techniques: what is known of each without measuring, and the cells that reports fill.

gain and cost take the report of the technique's script and return at most 80 characters, all figures from it.
"""


def row(report, method):
    """The row of a method, by its whole name or its beginning; of a tiny run any size of it will do."""
    rows = report["rows"]
    exact = [r for r in rows if r["method"] == method]
    if report["config"]["quick"]:
        exact += [r for r in rows if r["method"].startswith(method.partition(",")[0])]
    return (exact or [r for r in rows if r["method"].startswith(method)])[0]


def sweep(report, title):
    """The rows of a further table, by the beginning of its title."""
    return next(rows for name, rows in report["sweeps"].items() if name.startswith(title))


def times(report, one, other, key="tpot_ms"):
    """How many times lower a figure of `one` is than that of `other`, or higher for tokens/s."""
    a, b = row(report, one)[key], row(report, other)[key]
    return a / b if key == "tokens_per_s" else b / a


def at(rows, key, value):
    """The row of a further table where a column has this value, else the last."""
    return next((line for line in rows if line[key] == value), rows[-1])


def evicted(report, rule, budget):
    """The line of a rule at a budget in the report of main_kv_eviction.py."""
    lines = [line for line in sweep(report, "Loss against budget") if line["rule"] == rule]
    return at(lines, "budget", budget)


def faster(line, one, other):
    """How many times as fast `one` is as `other`, in a line of times."""
    return line[other] / line[one]


def fastest_draft(report):
    """The row of the draft length that was fastest."""
    rows = [line for line in report["rows"] if line["method"].endswith(" drafts") and line.get("speedup")]
    if not rows:
        raise LookupError("no draft length gave the baseline's tokens")
    return max(rows, key=lambda line: line["speedup"])


def most_zeros(report, method, nats):
    """The largest share of zeros of a method whose loss rises by less than this."""
    lines = sweep(report, "Rise of the loss")
    return max((line["zeros"] for line in lines if (line[method] or nats) < nats), default="0%")


def cells(entry, reports):
    """(gain, cost) of an entry from its report, "-" where there is none yet."""
    report = reports.get(entry["script"].rpartition("/")[2].removesuffix(".py").removeprefix("main_"))
    if report is None:
        return "-", "-"
    try:
        found = tuple(entry[key](report) for key in ("gain", "cost"))
    except (LookupError, StopIteration):
        if not report["config"]["quick"]:
            raise
        return "-", "-"  # a tiny run has not every size
    if too_long := [cell for cell in found if len(cell) > 80]:
        raise ValueError(f"{entry['technique']}: a cell has {len(too_long[0])} characters: {too_long[0]}")
    return found


TABLE = [
    {
        "technique": "roofline",
        "script": "main_roofline.py",
        "deeper": [],
        "exact": "a model",
        "training": "no",
        "reduces": "nothing: it tells what limits a step",
        "gain": lambda r: "one sequence: {intensity:.1f} operations a byte, {share:.0%} of the roof".format(
            **row(r, "decode, batch 1")
        ),
        "cost": lambda r: "{method}: {intensity:.0f} operations a byte, {share:.0%} of the roof".format(
            **[line for line in r["rows"] if line["method"].startswith("prefill")][-1]
        ),
    },
    {
        "technique": "KV cache",
        "script": "main_kvcache.py",
        "deeper": [
            "more/kvcache_compiled.py",
            "more/kvcache_graph.py",
            "more/kvcache_past_window.py",
            "more/linear_packed_study.py",
        ],
        "exact": "exact",
        "training": "no",
        "reduces": "work of a step",
        "gain": lambda r: (
            f"TPOT {times(r, 'dynamic, batch 1', 'no cache, batch 1'):.1f} times lower, "
            f"batch 8 {times(r, 'dynamic, batch 8', 'no cache, batch 8'):.1f}"
        ),
        "cost": lambda r: (
            f"{row(r, 'dynamic')['kv_bytes_per_token']:,.0f} bytes a token of every sequence; "
            f"TTFT {1 / times(r, 'dynamic, batch 1', 'no cache, batch 1', 'ttft_ms'):.2f} of no cache's"
        ),
    },
    {
        "technique": "prefix cache",
        "script": "main_prefix_cache.py",
        "deeper": ["more/prefix_cache_chat.py"],
        "exact": "exact",
        "training": "no",
        "reduces": "time to the first token",
        "gain": lambda r: (
            f"TTFT {times(r, 'prefix cache, batch 1', 'no reuse, batch 1', 'ttft_ms'):.1f} times lower, "
            f"batch 8 {times(r, 'prefix cache, batch 8', 'no reuse, batch 8', 'ttft_ms'):.1f} "
            f"({row(r, 'prefix cache, batch 1')['hit_share']:.0%} shared)"
        ),
        "cost": lambda r: (
            f"{row(r, 'prefix cache, batch 1')['stored_mb']:.1f} MB stored; "
            f"TPOT {1 / times(r, 'prefix cache, batch 1', 'no reuse, batch 1'):.2f} of no reuse's"
        ),
    },
    {
        "technique": "semantic cache",
        "script": "main_semantic_cache.py",
        "deeper": [
            "more/semantic_threshold.py",
            "more/semantic_confirmation.py",
            "more/semantic_production.py",
            "more/semantic_index.py",
        ],
        "exact": "approximate",
        "training": "no",
        "reduces": "calls of the model",
        "gain": lambda r: (
            f"{row(r, 'semantic')['hit_rate']:.0%} hits (exact match "
            f"{row(r, 'exact match')['hit_rate']:.0%}), recall {row(r, 'semantic')['recall']:.0%}"
        ),
        "cost": lambda r: (
            f"{row(r, 'semantic')['wrong_per_thousand']:.0f} of 1000 answers wrong; "
            f"{row(r, 'semantic')['hit_p50_ms']:.1f} ms a hit"
        ),
    },
    {
        "technique": "static batching",
        "script": "main_static_batching.py",
        "deeper": [],
        "exact": "exact",
        "training": "no",
        "reduces": "steps: requests share them",
        "gain": lambda r: (
            f"{times(r, 'batch 8', 'one at a time', 'tokens_per_s'):.2f} times the tokens/s of one at a time"
        ),
        "cost": lambda r: f"{1 - row(r, 'batch 8')['slot_utilisation']:.0%} of the slots' work is for nobody",
    },
    {
        "technique": "continuous batching",
        "script": "main_continuous_batching.py",
        "deeper": ["more/continuous_compiled.py", "more/serving.py"],
        "exact": "exact",
        "training": "no",
        "reduces": "idle slots, time in the queue",
        "gain": lambda r: (
            f"{times(r, 'continuous, KV', 'static, KV', 'tokens_per_s'):.2f} times static's tokens/s, "
            f"TTFT {times(r, 'continuous, KV', 'static, KV', 'ttft_ms'):.2f} times lower"
        ),
        "cost": lambda r: (
            f"TPOT {row(r, 'continuous, KV')['tpot_ms']:.1f} ms (static "
            f"{row(r, 'static, KV')['tpot_ms']:.1f}), a whole context a slot"
        ),
    },
    {
        "technique": "paged attention",
        "script": "main_paged_attention.py",
        "deeper": ["more/paged_sharing.py"],
        "exact": "exact",
        "training": "no",
        "reduces": "reserved memory, waiting",
        "gain": lambda r: (
            f"{row(r, 'paged')['at_a_time']:.0f} texts at a time "
            f"({row(r, 'reserve the longest')['at_a_time']:.0f} reserved); "
            f"TTFT {row(r, 'paged')['ttft_ms']:.0f} ms, slots {row(r, 'contiguous slots')['ttft_ms']:.0f}"
        ),
        "cost": lambda r: (
            f"{row(r, 'paged')['n_preempted']} preempted, "
            f"{row(r, 'paged')['forward_tokens'] / row(r, 'reserve the longest')['forward_tokens'] - 1:.0%} "
            "more tokens computed"
        ),
    },
    {
        "technique": "block-hash prefix cache",
        "script": "main_block_cache.py",
        "deeper": [],
        "exact": "exact",
        "training": "no",
        "reduces": "prompt tokens computed, TTFT",
        "gain": lambda r: (
            f"TTFT {sweep(r, 'A prompt of 200')[-1]['times faster']:.1f} times lower with "
            f"{sweep(r, 'A prompt of 200')[-1]['found']} of 200 tokens found"
        ),
        "cost": lambda r: (
            "nothing shared: "
            f"{times(r, 'no sharing: pool 2x', 'no sharing: no cache', 'tokens_per_s'):.2f} of the tokens/s"
        ),
    },
    {
        "technique": "radix prefix cache",
        "script": "main_radix_cache.py",
        "deeper": ["more/radix_offload.py"],
        "exact": "exact",
        "training": "no",
        "reduces": "prompt tokens computed",
        "gain": lambda r: (
            f"chats find {row(r, 'chats: in order, 2x')['found_share']:.0%} of their tokens "
            f"(in pages of 16 {row(r, 'chats: pages of 16, 2x')['found_share']:.0%})"
        ),
        "cost": lambda r: (
            "nothing shared: "
            f"{times(r, 'no sharing: in order', 'no sharing: no cache', 'tokens_per_s'):.2f} of the tokens/s"
        ),
    },
    {
        "technique": "chunked prefill",
        "script": "main_chunked_prefill.py",
        "deeper": [],
        "exact": "exact",
        "training": "no",
        "reduces": "gaps while prompts are computed",
        "gain": lambda r: "worst gap {:.0f} ms instead of {:.0f}; with one prompt {:.0f}, not {:.0f}".format(
            *(
                line[f"worst gap for {n}"]
                for n in ("4 prompts", "1 prompt")
                for name in (f"chunked, {r['config']['budget']} tokens", "prefill first")
                for line in sweep(r, "ms when prompts")
                if line["method"] == name
            )
        ),
        "cost": lambda r: (
            f"TTFT {row(r, 'chunked, {} tokens'.format(r['config']['budget']))['ttft_ms']:.0f} ms "
            f"instead of {row(r, 'prefill first')['ttft_ms']:.0f}"
        ),
    },
    {
        "technique": "FlashAttention",
        "script": "main_flash_attention.py",
        "deeper": [
            "more/flash_attention_backward.py",
            "more/flash_attention_kernels.py",
            "more/flash_attention_triton.py",
        ],
        "exact": "exact",
        "training": "no",
        "reduces": "traffic and memory of attention",
        "gain": lambda r: "4096 tokens: {:.1f} times as fast, 1/{:.0f} of the memory".format(
            *(faster(at(rows, "tokens", 4096), "SDPA", "textbook") for rows in r["sweeps"].values())
        ),
        "cost": lambda r: f"GPTlite's prefill {times(r, 'SDPA', 'textbook', 'ttft_ms'):.2f} times as fast",
    },
    {
        "technique": "flash decoding",
        "script": "main_flash_decoding.py",
        "deeper": [],
        "exact": "exact",
        "training": "no",
        "reduces": "idle cores at few sequences",
        "gain": lambda r: "one head, {:,} keys: split {:.2f} times as fast".format(
            sweep(r, "One step of attention, one head")[-1]["keys"],
            faster(sweep(r, "One step of attention, one head")[-1], "split", "unsplit"),
        ),
        "cost": lambda r: "8 sequences: {:.2f} times as fast; GPTlite's steps {:.2f} times".format(
            faster(sweep(r, "One step of attention, 8 sequences")[-1], "split", "unsplit"),
            times(r, "split", "static cache"),
        ),
    },
    {
        "technique": "grouped-query attention",
        "script": "main_gqa.py",
        "deeper": ["more/gqa_alignment.py"],
        "exact": "approximate",
        "training": "a few steps",
        "reduces": "cache of a token",
        "gain": lambda r: (
            f"cache {times(r, 'GQA 3, mean', 'MHA', 'kv_bytes_per_token'):.0f} to "
            f"{times(r, 'GQA 1, mean', 'MHA', 'kv_bytes_per_token'):.0f} times smaller, TPOT "
            f"{times(r, 'GQA 3, mean', 'MHA'):.2f} to {times(r, 'GQA 1, mean', 'MHA'):.2f} times lower"
        ),
        "cost": lambda r: (
            f"loss {row(r, 'GQA 3, mean')['loss_difference']:+.2f} with 3 heads (mean), "
            f"{row(r, 'GQA 3, mean')['uptrained_loss_difference']:+.2f} after training on"
        ),
    },
    {
        "technique": "multi-head latent attention",
        "script": "main_mla.py",
        "deeper": ["more/mla_conversion.py", "more/mla_absorption.py"],
        "exact": "at d_latent = d_model, else approximate",
        "training": "none or a few steps",
        "reduces": "cache of a token",
        "gain": lambda r: (
            f"cache {times(r, 'MLA 192, absorbed', 'MHA', 'kv_bytes_per_token'):.0f} times smaller "
            f"at loss {row(r, 'MLA 192, absorbed')['loss_difference']:+.4f}"
        ),
        "cost": lambda r: (
            f"TPOT {1 / times(r, 'MLA 192, absorbed', 'MHA'):.2f}, "
            f"TTFT {1 / times(r, 'MLA 192, absorbed', 'MHA', 'ttft_ms'):.2f} of MHA's (d_latent 192)"
        ),
    },
    {
        "technique": "distillation",
        "script": "main_distillation.py",
        "deeper": [
            "more/distillation_store.py",
            "more/distillation_online.py",
            "more/distillation_ensemble.py",
            "more/distillation_features.py",
            "more/distillation_on_policy.py",
        ],
        "exact": "approximate",
        "training": "yes, and one pass of the teacher",
        "reduces": "weights, memory, time per token",
        "gain": lambda r: (
            f"{row(r, 'soft labels')['speedup']:.1f} times the tokens/s, "
            f"{times(r, 'soft labels', 'teacher', 'n_parameters'):.1f} times fewer weights"
        ),
        "cost": lambda r: (
            f"loss {row(r, 'soft labels')['loss_difference']:+.3f} after {r['config']['steps']} steps "
            f"(text alone {row(r, 'hard labels')['loss_difference']:+.3f})"
        ),
    },
    {
        "technique": "pruning",
        "script": "main_pruning.py",
        "deeper": [
            "more/pruning_importance.py",
            "more/pruning_refit.py",
            "more/pruning_parts.py",
            "more/pruning_depth.py",
            "more/pruning_learned_masks.py",
            "more/pruning_search.py",
        ],
        "exact": "approximate",
        "training": "yes, a short distillation",
        "reduces": "weights, cache, operations",
        "gain": lambda r: (
            f"{row(r, 'one shot')['speedup']:.2f} times the tokens/s with "
            f"{row(r, 'one shot')['n_parameters'] / row(r, 'teacher')['n_parameters']:.0%} of the parameters"
        ),
        "cost": lambda r: (
            f"loss {row(r, 'one shot')['loss_difference']:+.3f} "
            f"(untrained {row(r, 'cut, not trained')['loss_difference']:+.3f}, "
            f"rounds {row(r, 'rounds')['loss_difference']:+.3f})"
        ),
    },
    {
        "technique": "sparsity",
        "script": "main_sparsity.py",
        "deeper": ["more/sparsity_outliers.py", "more/sparsity_speed.py"],
        "exact": "approximate",
        "training": "no, calibration texts",
        "reduces": "weights that are not zero",
        "gain": lambda r: (
            f"{most_zeros(r, 'SparseGPT by layer', 0.01)} zeros for less than 0.01 nats "
            f"(magnitude {most_zeros(r, 'magnitude by layer', 0.01)})"
        ),
        "cost": lambda r: (
            f"loss {row(r, 'SparseGPT by layer, 50%')['loss_difference']:+.3f} SparseGPT, "
            f"{row(r, 'Wanda by row, 50%')['loss_difference']:+.3f} Wanda, "
            f"{row(r, 'magnitude by layer, 50%')['loss_difference']:+.3f} magnitude"
        ),
    },
    {
        "technique": "quantised weights",
        "script": "main_quantization.py",
        "deeper": [
            "more/quantization_gptq.py",
            "more/quantization_awq.py",
            "more/quantization_smoothquant.py",
            "more/quantization_rotation.py",
            "more/quantization_nf4.py",
        ],
        "exact": "approximate",
        "training": "no",
        "reduces": "bytes of the weights that a step reads",
        "gain": lambda r: (
            f"{row(r, 'float32')['weights_mb']:.0f} to {row(r, 'int8, c')['weights_mb']:.0f} MB, TPOT "
            f"{times(r, 'int8, compiled, batch 1', 'float32, batch 1'):.1f} times lower, batch 8 "
            f"{times(r, 'int8, compiled, batch 8', 'float32, batch 8'):.1f}"
        ),
        "cost": lambda r: (
            f"loss {row(r, 'int8, compiled')['loss_difference']:+.4f}; int4 "
            f"{row(r, 'int4 g64, compiled')['weights_mb']:.0f} MB, "
            f"{row(r, 'int4 g64, compiled')['loss_difference']:+.4f}"
        ),
    },
    {
        "technique": "speculative decoding",
        "script": "main_speculative_decoding.py",
        "deeper": [
            "more/speculative_batch.py",
            "more/speculative_compiled.py",
            "more/speculative_lookup.py",
            "more/speculative_early_exit.py",
            "more/speculative_lookahead.py",
        ],
        "exact": "exact; sampled: the same distribution",
        "training": "a draft model",
        "reduces": "forwards of the model",
        "gain": lambda r: (
            "{speedup:.2f} times the tokens/s: {tokens_per_round:.1f} tokens a round of {method}".format(
                **fastest_draft(r)
            )
        ),
        "cost": lambda r: (
            f"{times(r, 'static', '1 drafts', 'peak_memory_mb'):.2f} times the memory; a round "
            f"{fastest_draft(r)['round_steps']:.1f} steps"
        ),
    },
    {
        "technique": "multi-token prediction",
        "script": "main_multi_token_prediction.py",
        "deeper": ["more/speculative_medusa.py"],
        "exact": "exact",
        "training": "a block behind the frozen model",
        "reduces": "forwards of the model",
        "gain": lambda r: (
            "{speedup:.2f} times the tokens/s: {tokens_per_round:.1f} tokens a round of {method}".format(
                **fastest_draft(r)
            )
        ),
        "cost": lambda r: (
            f"{times(r, 'static', '1 drafts', 'n_parameters'):.2f} times the weights; untrained "
            f"{row(r, 'untrained')['tokens_per_round']:.1f} tokens a round"
        ),
    },
    {
        "technique": "Prompt Cache",
        "script": "main_prompt_cache.py",
        "deeper": [],
        "exact": "approximate; exact for a prefix or a scaffold",
        "training": "no",
        "reduces": "time to the first token",
        "gain": lambda r: (
            f"TTFT {times(r, 'prompt cache', 'whole prompt', 'ttft_ms'):.1f} times lower, prefix cache "
            f"{times(r, 'prefix cache', 'whole prompt', 'ttft_ms'):.1f}"
        ),
        "cost": lambda r: (
            f"loss {row(r, 'prompt cache')['loss_difference']:+.3f}; "
            f"{row(r, 'prompt cache')['stored_mb']:.1f} MB stored"
        ),
    },
    {
        "technique": "CacheBlend",
        "script": "main_cacheblend.py",
        "deeper": [],
        "exact": "approximate; exact if all is recomputed",
        "training": "no",
        "reduces": "time to the first token",
        "gain": lambda r: (
            f"TTFT {times(r, 'recompute 15%', 'full prefill', 'ttft_ms'):.1f} times lower, prefix cache "
            f"{times(r, 'prefix cache', 'full prefill', 'ttft_ms'):.1f}"
        ),
        "cost": lambda r: (
            f"loss {row(r, 'recompute 15%')['loss_difference']:+.3f}, nothing recomputed "
            f"{row(r, 'recompute 0%')['loss_difference']:+.3f}; "
            f"{row(r, 'recompute 15%')['stored_mb']:.1f} MB stored"
        ),
    },
    {
        "technique": "cache-aware routing",
        "script": "main_cache_routing.py",
        "deeper": ["more/routing_processes.py"],
        "exact": "exact",
        "training": "no",
        "reduces": "prompt tokens computed over replicas",
        "gain": lambda r: (
            f"{row(r, 'skewed: cache-aware')['found_share']:.0%} of the prompts found, in turns "
            f"{row(r, 'skewed: round robin')['found_share']:.0%}"
        ),
        "cost": lambda r: (
            f"bursts: {row(r, 'bursts: cache-aware')['imbalance']:.2f} times the mean load "
            f"(in turns {row(r, 'bursts: round robin')['imbalance']:.2f})"
        ),
    },
    {
        "technique": "structured decoding",
        "script": "main_structured_decoding.py",
        "deeper": ["more/structured_distribution.py", "more/structured_grammar.py"],
        "exact": "each text matches; not the model's distribution",
        "training": "no",
        "reduces": "invalid texts; steps, where text is forced",
        "gain": lambda r: (
            f"{row(r, 'record, jump-forward')['match']:.0%} match; a record in "
            f"{1 / times(r, 'record, jump-forward', 'record, table', 'n_steps'):.0%} of the steps, "
            f"{times(r, 'record, jump-forward', 'record, table', 'tokens_per_s'):.1f}x as fast"
        ),
        "cost": lambda r: "a row of the table a step: {:.3f} ms".format(
            at(sweep(r, "Making the mask"), "tokens so far", None)["table"]
        ),
    },
    {
        "technique": "multi-LoRA serving",
        "script": "main_multi_lora.py",
        "deeper": ["more/lora_pool.py"],
        "exact": "exact",
        "training": "an adapter each",
        "reduces": "weights of many fine-tuned models; steps of a mixed batch",
        "gain": lambda r: (
            f"{times(r, 'gathered', 'merged copies', 'tokens_per_s'):.1f}x the tokens/s of merged copies, "
            f"{times(r, 'gathered', 'merged copies', 'peak_memory_mb'):.1f}x less memory"
        ),
        "cost": lambda r: (
            "one adapter: {:.2f} of the merged weights' speed; rank 8 is {:.1%} of the model".format(
                faster(
                    next(rows for name, rows in r["sweeps"].items() if "each adapter's" in name)[0],
                    "gathered",
                    "merged copies",
                ),
                at(sweep(r, "Memory of an adapter"), "rank", 8)["share of the model"],
            )
        ),
    },
    {
        "technique": "offloading",
        "script": "main_offloading.py",
        "deeper": [],
        "exact": "exact, bit for bit",
        "training": "no",
        "reduces": "weights in the device's memory",
        "gain": lambda r: (
            f"{row(r, 'two buffers')['weight_mb']:.1f} MB of weights on the device, not "
            f"{row(r, 'resident')['weight_mb']:.1f}"
        ),
        "cost": lambda r: (
            f"TPOT {1 / times(r, 'two buffers', 'resident'):.1f} times as long; with "
            f"{sweep(r, 'One step')[-1]['tokens']} tokens a step "
            f"{sweep(r, 'One step')[-1]['times resident']:.2f}"
        ),
    },
    {
        "technique": "tensor parallelism",
        "script": "main_tensor_parallel.py",
        "deeper": [],
        "exact": "exact",
        "training": "no",
        "reduces": "weights and cache of a rank",
        "gain": lambda r: "2 ranks: {:.0%} of the weights, {:.0%} of the cache on each".format(
            row(r, "2 ranks, batch 1")["n_parameters"] / row(r, "one process, batch 1")["n_parameters"],
            row(r, "2 ranks, batch 1")["kv_bytes_per_token"]
            / row(r, "one process, batch 1")["kv_bytes_per_token"],
        ),
        "cost": lambda r: "TPOT {:.1f} times higher here; a block of width {} {:.1f} times as fast".format(
            times(r, "one process, batch 1", "2 ranks, batch 1"),
            sweep(r, "A decode step")[-1]["width"],
            faster(sweep(r, "A decode step")[-1], "2 ranks", "one process"),
        ),
    },
    {
        "technique": "pipeline parallelism",
        "script": "main_pipeline_parallel.py",
        "deeper": [],
        "exact": "exact",
        "training": "no",
        "reduces": "weights and cache of a rank",
        "gain": lambda r: "2 stages: {:.0%} of the weights each, {:.2f} times a rank's tokens/s".format(
            row(r, "2 stages, 1 group")["n_parameters"] / row(r, "one process")["n_parameters"],
            max(line["tokens_per_s"] or 0 for line in r["rows"] if "stages" in line["method"])
            / row(r, "a rank alone")["tokens_per_s"],
        ),
        "cost": lambda r: "TPOT {:.1f} times higher with 2 groups, {:.0%} idle".format(
            times(r, "one process", "2 stages, 2 groups"), row(r, "2 stages, 2 groups")["idle"]
        ),
    },
    {
        "technique": "expert parallelism",
        "script": "main_expert_parallel.py",
        "deeper": [],
        "exact": "exact (copied experts)",
        "training": "a mixture, yes",
        "reduces": "weights of a rank",
        "gain": lambda r: "2 ranks: {:.0%} of the mixture's weights on each".format(
            row(r, "mixture, 2 ranks")["n_parameters"] / row(r, "mixture, one process")["n_parameters"]
        ),
        "cost": lambda r: (
            "{:.2f} times the tokens/s of the mixture in one process, {:.2f} of the dense".format(
                times(r, "mixture, 2 ranks", "mixture, one process", "tokens_per_s"),
                times(r, "mixture, 2 ranks", "dense", "tokens_per_s"),
            )
        ),
    },
    {
        "technique": "sequence parallelism: Ulysses, ring",
        "script": "main_sequence_parallel.py",
        "deeper": [],
        "exact": "exact",
        "training": "no",
        "reduces": "cache of a rank, time of long prompts",
        "gain": lambda r: (
            "{tokens:,} tokens: attention {0:.2f} times as fast as one rank, cache {1:.2f}".format(
                sweep(r, "Causal")[-1]["a rank alone"] / sweep(r, "Causal")[-1]["zigzag ring"],
                row(r, "zigzag ring")["kv_bytes_per_token"] / row(r, "one process")["kv_bytes_per_token"],
                **sweep(r, "Causal")[-1],
            )
        ),
        "cost": lambda r: (
            f"TPOT {1 / times(r, 'zigzag ring', 'one process'):.1f} times that of one process on all cores"
        ),
    },
    {
        "technique": "prefill-decode disaggregation",
        "script": "main_disaggregation.py",
        "deeper": [],
        "exact": "exact",
        "training": "no",
        "reduces": "gaps between tokens",
        "gain": lambda r: "160 + 16: p99 {:.1f} times lower than of replicas, {:.1f} with chunks".format(
            times(r, "160 + 16: split", "160 + 16: 2 replicas", "tpot_p99_ms"),
            times(r, "160 + 16: split", "160 + 16: 2 replicas, chunks", "tpot_p99_ms"),
        ),
        "cost": lambda r: (
            f"tokens/s {row(r, '160 + 16: split')['speedup']:.2f} of the replicas', "
            f"{row(r, '16 + 160: split')['speedup']:.2f} for 16 + 160"
        ),
    },
    {
        "technique": "sliding window, Longformer, BigBird",
        "script": "main_sliding_window.py",
        "deeper": [],
        "exact": "against its mask; approximate to all keys",
        "training": "no",
        "reduces": "cache and keys read per token",
        "gain": lambda r: (
            f"cache {times(r, 'window 64', 'all keys', 'cache_bytes'):.0f} times smaller with 64 keys; "
            f"prompt of 8192 {faster(sweep(r, 'Attention of a prompt')[-1], 'in blocks', 'all keys'):.1f} "
            "times as fast"
        ),
        "cost": lambda r: (
            f"loss {row(r, 'window 64')['loss_difference']:+.4f} with 64 keys, "
            f"{row(r, 'window 32')['loss_difference']:+.3f} with 32"
        ),
    },
    {
        "technique": "StreamingLLM: text without end",
        "script": "main_streaming_llm.py",
        "deeper": ["more/streaming_sinks.py"],
        "exact": "approximate past the context",
        "training": "no",
        "reduces": "tokens encoded for each token",
        "gain": lambda r: (
            f"{row(r, 're-encode 64')['encoded']:.2f} tokens encoded a token, not "
            f"{row(r, 'recomputed')['encoded']}: {row(r, 're-encode 64')['speedup']:.1f} times the tokens/s"
        ),
        "cost": lambda r: (
            f"loss {row(r, 're-encode 64')['stream_difference']:+.3f} "
            f"(last position {row(r, 'last position')['stream_difference']:+.2f}, "
            f"cyclic {row(r, 'cyclic')['stream_difference']:+.2f})"
        ),
    },
    {
        "technique": "KV eviction: H2O, TOVA, SnapKV",
        "script": "main_kv_eviction.py",
        "deeper": [],
        "exact": "approximate",
        "training": "no",
        "reduces": "cache, keys read per token",
        "gain": lambda r: (
            f"cache {times(r, 'H2O', 'all keys', 'cache_bytes'):.0f} times smaller, loss H2O "
            f"{evicted(r, 'H2O', 32)['difference']:+.3f}, "
            f"window {evicted(r, 'window', 32)['difference']:+.3f}"
        ),
        "cost": lambda r: (
            f"TPOT {1 / times(r, 'H2O', 'all keys'):.1f}, "
            f"TTFT {1 / times(r, 'H2O', 'all keys', 'ttft_ms'):.1f} of all keys' (H2O)"
        ),
    },
    {
        "technique": "KV cache quantisation (KIVI)",
        "script": "main_kv_quantization.py",
        "deeper": ["more/kv_quantization_speed.py"],
        "exact": "approximate",
        "training": "no",
        "reduces": "cache of a token",
        "gain": lambda r: (
            f"cache {times(r, '2 bits', 'dense', 'kv_bytes_per_token'):.1f} times smaller in 2 bits, "
            f"{times(r, '4 bits', 'dense', 'kv_bytes_per_token'):.1f} in 4"
        ),
        "cost": lambda r: (
            f"loss {row(r, '2 bits')['loss_difference']:+.4f} in 2 bits; "
            f"TPOT {1 / times(r, '2 bits', 'dense'):.1f} times that of the dense cache"
        ),
    },
    {
        "technique": "SageAttention: 8-bit products",
        "script": "main_sage_attention.py",
        "deeper": ["more/sage_formats.py"],
        "exact": "approximate",
        "training": "no",
        "reduces": "time of the scores, on units for integers",
        "gain": lambda r: (
            f"scores in 8 bits at KL {row(r, 'by block')['kl']:.0e}, "
            f"{row(r, 'by block')['top1']:.1%} the same best token"
        ),
        "cost": lambda r: "without such units {0:.1f} times the textbook's time at {tokens} tokens".format(
            1 / faster(sweep(r, "Causal")[-1], "int8", "textbook"), **sweep(r, "Causal")[-1]
        ),
    },
    {
        "technique": "early exit (CALM)",
        "script": "main_early_exit.py",
        "deeper": ["more/relu_sparsity.py"],
        "exact": "approximate",
        "training": "no",
        "reduces": "blocks that a token passes",
        "gain": lambda r: (
            f"{row(r, 'from block 1, 0.7, batch 1')['n_blocks']:.1f} blocks a token, TPOT "
            f"{times(r, 'from block 1, 0.7, batch 1', 'all blocks, batch 1'):.2f} times lower"
        ),
        "cost": lambda r: "loss {:+.3f} (a static cut to as many blocks {:+.3f})".format(
            row(r, "from block 1, 0.7, batch 1")["loss_difference"],
            next(line for line in r["rows"] if line["method"].startswith("cut"))["loss_difference"],
        ),
    },
    {
        "technique": "Quest",
        "script": "main_quest.py",
        "deeper": [],
        "exact": "approximate",
        "training": "no",
        "reduces": "keys that a decode step reads",
        "gain": lambda r: (
            f"attention over {sweep(r, 'Attention of a decode step')[-1]['keys']:,} keys "
            f"{faster(sweep(r, 'Attention of a decode step')[-1], 'Quest', 'dense'):.1f} times as fast"
        ),
        "cost": lambda r: (
            f"loss {row(r, 'Quest 32')['loss_difference']:+.4f} with 32 keys (window "
            f"{row(r, 'window 32')['loss_difference']:+.3f}), cache "
            f"{times(r, 'dense', 'Quest 32', 'kv_bytes_per_token'):.2f} times"
        ),
    },
    {
        "technique": "MoBA",
        "script": "main_moba.py",
        "deeper": [],
        "exact": "approximate",
        "training": "none or a few steps",
        "reduces": "keys that a query sees",
        "gain": lambda r: (
            f"attention over {sweep(r, 'Attention of a decode step')[-1]['keys']:,} keys "
            f"{faster(sweep(r, 'Attention of a decode step')[-1], 'MoBA', 'dense'):.1f} times as fast, "
            f"a prompt {faster(sweep(r, 'Attention of a prompt')[-1], 'MoBA', 'SDPA'):.1f}"
        ),
        "cost": lambda r: (
            f"loss {row(r, 'MoBA 32')['loss_difference']:+.3f} with 32 keys, "
            f"{row(r, 'MoBA 32')['uptrained_loss_difference']:+.3f} after training on"
        ),
    },
    {
        "technique": "DeepSeek sparse attention",
        "script": "main_dsa.py",
        "deeper": [],
        "exact": "approximate",
        "training": "the indexers, then a few steps",
        "reduces": "keys that a query reads",
        "gain": lambda r: (
            f"attention over {sweep(r, 'Attention of a decode step')[-1]['keys']:,} keys "
            f"{faster(sweep(r, 'Attention of a decode step')[-1], 'DSA', 'dense'):.1f} times as fast"
        ),
        "cost": lambda r: (
            f"loss {row(r, 'DSA 32')['loss_difference']:+.3f} with 32 keys "
            f"(window {row(r, 'window 32')['loss_difference']:+.3f}), "
            f"{row(r, 'DSA 32')['uptrained_loss_difference']:+.3f} trained on"
        ),
    },
    {
        "technique": "native sparse attention",
        "script": "main_nsa.py",
        "deeper": [],
        "exact": "approximate",
        "training": "yes",
        "reduces": "keys that a query reads",
        "gain": lambda r: (
            f"attention over {sweep(r, 'Attention of a decode step')[-1]['keys']:,} keys "
            f"{faster(sweep(r, 'Attention of a decode step')[-1], 'NSA', 'dense'):.1f} times as fast"
        ),
        "cost": lambda r: (
            f"loss {row(r, 'NSA')['loss_difference']:+.3f} with {row(r, 'NSA')['keys_read']:.0f} keys, "
            f"{row(r, 'NSA')['uptrained_loss_difference']:+.3f} trained on "
            f"(window {row(r, 'window')['uptrained_loss_difference']:+.3f})"
        ),
    },
    {
        "technique": "sparse-linear attention (SLA)",
        "script": "main_sla.py",
        "deeper": [],
        "exact": "approximate",
        "training": "a projection (fitted here)",
        "reduces": "time of long attention without a mask",
        "gain": lambda r: "{tokens:,} tokens: attention {0:.1f} times as fast".format(
            faster(sweep(r, "Attention without")[-1], "SLA", "full attention"),
            **sweep(r, "Attention without")[-1],
        ),
        "cost": lambda r: "error {:.0%} of the output (exact part alone {:.0%})".format(
            *(row(r, name)["error on other texts"] for name in ("SLA", "exact part alone"))
        ),
    },
    {
        "technique": "linear attention",
        "script": "main_linear_attention.py",
        "deeper": [],
        "exact": "approximate",
        "training": "a few steps",
        "reduces": "cache, to a state of fixed size",
        "gain": lambda r: (
            f"a state takes the bytes of "
            f"{row(r, 'Mamba-2')['state_bytes'] / row(r, 'softmax')['kv_bytes_per_token']:.0f} tokens; "
            f"step at {sweep(r, 'A decode step')[-1]['tokens']:,} tokens "
            f"{faster(sweep(r, 'A decode step')[-1], 'one decay', 'SDPA'):.0f} times as fast"
        ),
        "cost": lambda r: (
            "loss after equal steps: "
            + ", ".join(
                f"{name} {row(r, name)['loss_difference']:+.2f}" for name in ("elu + 1", "Mamba-2", "GLA")
            )
        ),
    },
    {
        "technique": "delta rule",
        "script": "main_delta_rule.py",
        "deeper": [],
        "exact": "approximate",
        "training": "a few steps",
        "reduces": "cache, to a state of fixed size",
        "gain": lambda r: (
            "error of {pairs} pairs read back {delta:.2f}, where values are added {linear:.2f}".format(
                **at(sweep(r, "N pairs"), "pairs", 16)
            )
        ),
        "cost": lambda r: (
            "loss after equal steps: "
            + ", ".join(
                f"{name} {row(r, name)['loss_difference']:+.2f}"
                for name in ("DeltaNet", "Gated DeltaNet", "KDA")
            )
        ),
    },
    {
        "technique": "linear hybrids",
        "script": "main_linear_hybrid.py",
        "deeper": ["more/linear_prefix.py", "more/linear_drafts.py"],
        "exact": "approximate",
        "training": "a few steps",
        "reduces": "cache, to a share of the layers and a state",
        "gain": lambda r: (
            "{:,} tokens: bytes {:.1f} times less in 2:1, attention of a step {:.1f} times as fast".format(
                sweep(r, "What a text takes")[-1]["tokens"],
                faster(sweep(r, "What a text takes")[-1], "2:1", "softmax"),
                faster(sweep(r, "Attention of a decode step")[-1], "2:1", "softmax"),
            )
        ),
        "cost": lambda r: (
            "loss after equal steps: "
            + ", ".join(
                f"{name} {row(r, name)['loss_difference']:+.2f}" for name in ("2:1", "5:1", "all linear")
            )
        ),
    },
    {
        "technique": "export to engines",
        "script": "main_export.py",
        "deeper": [],
        "exact": "exact",
        "training": "no",
        "reduces": "work of serving it elsewhere",
        "gain": lambda r: (
            f"transformers gives the same tokens, TPOT {row(r, 'transformers')['tpot_ms']:.2f} ms"
        ),
        "cost": lambda r: f"TPOT here {row(r, 'GPTlite')['tpot_ms']:.2f} ms",
    },
    {
        "technique": "all side by side",
        "script": "main_benchmark.py",
        "deeper": [],
        "exact": "both, labelled",
        "training": "no",
        "reduces": "nothing: it shows all in one table",
        "gain": lambda r: (
            f"KV cache {times(r, 'KV cache, batch 1', 'no cache, batch 1', 'tokens_per_s'):.1f}, compiled "
            f"{times(r, 'compiled step, batch 1', 'no cache, batch 1', 'tokens_per_s'):.1f} times no cache"
        ),
        "cost": lambda r: "loss of each row in its table",
    },
]
