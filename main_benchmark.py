"""All methods side by side: the same prompts, one after the other in alternation, and the frontier.

Idea: a technique looks good beside its own baseline. Here all of them do one work, so that they can be
compared with each other: time, memory and loss of each, for one sequence and for a batch, and the methods
than which none is both faster and of lower loss.

Exact and approximate methods, labelled. Wins where one must choose; loses what it cannot show: equal requests
that start at once leave batching and paging nothing to gain over a cache (their scripts serve queues), and a
context of 256 tokens leaves a smaller cache little (theirs go on to long ones).

Run: python main_benchmark.py           (--only "KV cache,MQA" picks rows, --peers adds transformers)

Source: the scripts that `methods` names for each row.
"""

import copy

import torch

from gptlite import GPTlite
from gptlite_blocks import BlockPool
from gptlite_compiled import CompiledStep
from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from gptlite_paged import GPTlite_Paged
from gptlite_pruned import with_kv_cache
from gptlite_slots import GPTlite_Slots
from inference_report import Method, build
from inference_scheduling import PagedScheduler, serve
from inference_utils import GPTLITE_DISTILLED_CKPT_PATH, load_checkpoint
from linear_packed import pack_linears
from main_continuous_batching import continuous_batching_kvcache
from main_flash_attention import use_sdpa
from main_flash_decoding import GPTlite_FlashDecoding
from main_kvcache import generate, generate_kvcache, generate_static
from main_mla import GPTlite_MLA, convert_mha_to_mla
from main_prefix_cache import compute_prefix_cache, generate_with_prefix
from main_pruning import compute_importance, prune
from main_static_batching import static_batching
from more.gqa_alignment import align_heads, attention_inputs
from more.mla_conversion import convert_mha_to_mla_calibrated


def generate_behind_prefix(model, prompts, n_tokens, stored):
    """Prompt and new tokens [B, T + n]; stored: the cache of what all prompts begin with."""
    n = stored[0][0].shape[-2]
    rest = generate_with_prefix(model, stored, prompts[:, n:], n_tokens, model.seqlen)  # [B, T - P + n]
    return torch.cat([prompts[:, :n], rest], dim=1)  # [B, T + n]


def generate_served(model, prompts, n_tokens, serve_all):
    """Prompt and new tokens [B, T + n] by a function that serves a queue of requests."""
    requests = [(prompt, n_tokens) for prompt in prompts]
    return torch.stack(serve_all(model, requests, len(prompts), model.seqlen)[0])  # [B, T + n]


def generate_paged(model, prompts, n_tokens, pool):
    """Prompt and new tokens [B, T + n] over a pool of blocks."""
    requests = [(prompt, n_tokens) for prompt in prompts]
    return torch.stack(serve(PagedScheduler(model, pool), requests))  # [B, T + n]


DRAFTS = {"assistant_model", "prompt_lookup_num_tokens"}  # transformers' names for guessing ahead
BACKEND = {False: "inductor", True: None}  # of the compiled step, by --quick: compiling takes longer


class Collection:
    """Every method, made from the same trained weights; models are made once for all batches.

    Args: args: of the script; text: Text, whose training part calibrates what is converted or pruned.
    """

    def __init__(self, args, text):
        self.args, self.state, self.made = args, load_checkpoint(args.checkpoint), {}
        self.text, self.dense = text, build(args, self.state, GPTlite, packed=False)
        self.H, self.D = self.dense.blocks[0].mha.n_heads, self.dense.blocks[0].mha.d_head
        self.calibration = text.prompts(16, self.dense.seqlen, "train")  # [N, T]

    def model(self, name, make):
        """What make() returns, made once."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def plain(self, model_class, packed=True):
        name = f"{model_class.__name__} {packed}"
        return self.model(name, lambda: build(self.args, self.state, model_class, packed))

    def inputs(self):
        return self.model(
            "inputs", lambda: attention_inputs(copy.deepcopy(self.dense).float(), self.calibration)
        )

    def gqa(self, n_groups, aligned):
        def make():
            state = self.state
            if aligned:
                state = align_heads(state, self.H, self.D, n_groups, self.inputs())
            state = convert_mha_to_gqa(state, self.H, self.D, n_groups)
            return build(self.args, state, GPTlite_GQA, n_groups=n_groups)

        return self.model(f"GQA {n_groups} {aligned}", make)

    def mla(self, d_latent, calibrated):
        def make():
            sizes = (self.state, self.H, self.D, d_latent)
            state = (
                convert_mha_to_mla_calibrated(*sizes, self.inputs())
                if calibrated
                else convert_mha_to_mla(*sizes)
            )
            return build(self.args, state, GPTlite_MLA, d_latent=d_latent)

        return self.model(f"MLA {d_latent} {calibrated}", make)

    def pruned(self):
        def make():
            model = copy.deepcopy(self.dense)
            heads, neurons = compute_importance(model, self.text.train, 2, 8, model.seqlen)
            n_neurons = len(neurons[0]) * (self.H - 1) // self.H // 16 * 16
            return pack_linears(with_kv_cache(prune(model, heads, neurons, self.H - 1, n_neurons)))

        return self.model("pruned", make)

    def distilled(self):
        state = load_checkpoint(GPTLITE_DISTILLED_CKPT_PATH)
        return self.model("distilled", lambda: build(self.args, state, GPTlite_KVCache))

    def methods(self, B, shared):
        """The methods for B sequences with `shared` tokens [1, P] in common, the baseline first."""
        args, state, few = self.args, self.state, max(self.H // 2, 1)
        plain, cached, static = map(self.plain, (GPTlite, GPTlite_KVCache, GPTlite_StaticKVCache))
        slots, paged, latents = self.plain(GPTlite_Slots), self.plain(GPTlite_Paged), self.H * self.D // 4
        sdpa = self.model("sdpa", lambda: use_sdpa(build(args, state, GPTlite)))
        split = self.model("split", lambda: build(args, state, GPTlite_FlashDecoding, n_splits=2))
        step = CompiledStep(self.plain(GPTlite_StaticKVCache, False), B, backend=BACKEND[args.quick])
        pool, prefix = BlockPool(paged, B * -(-paged.seqlen // 16)), compute_prefix_cache(cached, shared)
        buffers = [StaticKVCache(model, B) for model in (static, static, split)]
        steps = {"steps": [static, step]}
        exact = [
            Method("no cache", generate, plain),  # main_kvcache.py
            Method("no cache, SDPA", generate, sdpa),  # main_flash_attention.py
            Method("KV cache", generate_kvcache, cached),
            Method("static KV cache", generate_static, static, buffers[0]),
            Method(
                "compiled step", generate_static, static, buffers[1], step, **steps
            ),  # more/kvcache_compiled
            Method("flash decoding", generate_static, split, buffers[2]),  # main_flash_decoding.py
            Method("prefix cache", generate_behind_prefix, cached, prefix),  # main_prefix_cache.py
            Method("static batching", generate_served, plain, static_batching),  # main_static_batching.py
            Method("continuous batching", generate_served, slots, continuous_batching_kvcache, loss=False),
            Method("paged KV cache", generate_paged, paged, pool, loss=False),  # main_paged_attention.py
        ]
        approximate = {
            f"GQA {few}, mean": self.gqa(few, False),  # main_gqa.py
            f"GQA {few}, aligned": self.gqa(few, True),  # more/gqa_alignment.py
            "MQA, aligned": self.gqa(1, True),
            f"MLA {latents}, SVD": self.mla(latents, False),  # main_mla.py
            f"MLA {latents}, calibrated": self.mla(latents, True),  # more/mla_conversion.py
            "pruned by a head": self.pruned(),  # main_pruning.py
            "distilled": self.distilled(),  # main_distillation.py
        }
        return exact + [Method(n, generate_kvcache, m, exact=False) for n, m in approximate.items()]

    def peers(self, B):
        """transformers' generate on the same weights, packed alike, with caches and drafts; other engines."""
        from gptlite_opt import generate_opt, opt_from_gptlite
        from inference_engines import engine_methods

        opt = self.model("opt", lambda: pack_linears(opt_from_gptlite(self.dense)))
        options = {"transformers": {}, "transformers, static": {"cache_implementation": "static"}}
        options["transformers, static"]["disable_compile"] = True  # its compiled call hides the steps
        if B == 1:  # these two take one sequence
            student = build(self.args, load_checkpoint(GPTLITE_DISTILLED_CKPT_PATH), GPTlite, packed=False)
            draft = self.model("draft", lambda: pack_linears(opt_from_gptlite(student)))
            options["transformers, assisted"] = {"assistant_model": draft}
            options["transformers, lookup"] = {"prompt_lookup_num_tokens": 4}
        rounds = {"tpot_ms": None, "tpot_p99_ms": None}  # a step of theirs gives several tokens
        return [
            Method(n, generate_opt, opt, how, loss=False, peer=True, **(rounds if {*how} & DRAFTS else {}))
            for n, how in options.items()
        ] + engine_methods(self.args, self.dense)


def frontier(rows):
    """Of rows with a loss, those than which no other is both faster and of lower loss, the fastest first."""
    known = [row for row in rows if row["valid_loss"] is not None and row["tokens_per_s"]]
    best, kept = float("inf"), []
    for row in sorted(known, key=lambda row: (-row["tokens_per_s"], row["valid_loss"])):
        if row["valid_loss"] < best - 1e-4:  # not by rounding alone
            best = row["valid_loss"]
            kept.append(row)
    return kept


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from inference_cost import forward_cost
    from inference_utils import parameters_of

    sizes = {"batch_size": 8, "prompt_len": 64, "n_tokens": 64}
    quick = {"batch_size": 2, "prompt_len": 56, "n_tokens": 4}  # within one view of the compiled step
    parser = harness.options(__doc__, repeats=3, quick=quick, **sizes)
    parser.add_argument("--shared", type=harness.positive_int, default=48, help="tokens all prompts share")
    parser.add_argument("--only", metavar="NAMES", help="these methods beside the baseline, with commas")
    parser.add_argument("--peers", action="store_true", help="add transformers' generate and engines")
    with harness.script(parser) as args:
        if args.prompt_len + args.n_tokens > 257 or args.shared >= args.prompt_len:
            raise ValueError("prompt and new tokens are 257 at most, and --shared is less than --prompt-len")
        text = harness.load_text(args)
        collection = Collection(args, text)
        report = harness.Report(args, "all methods side by side", collection.dense, text=text)
        prompts = text.prompts(args.batch_size, args.prompt_len)  # [B, T]
        shared = prompts[:1, : args.shared]  # [1, P]
        prompts = torch.cat([shared.expand(len(prompts), -1), prompts[:, args.shared :]], dim=1)  # [B, T]
        wanted = args.only and ["no cache", *(name.strip() for name in args.only.split(","))]
        tables = {}
        for B in sorted({1, args.batch_size}):
            methods = collection.methods(B, shared) + (collection.peers(B) if args.peers else [])
            if unknown := set(wanted or ()) - {method.name for method in methods}:
                raise ValueError(f"--only: there is no {min(unknown)}; a name as in the table is needed")
            chosen = [method for method in methods if not wanted or method.name in wanted]
            tables[B] = report.compare(prompts[:B], args.n_tokens, *chosen)

        fastest = {}
        for B, rows in tables.items():
            ours = [row for row in rows.values() if not row.get("peer")]
            exact = [row for row in ours if row["same_output"] is True and row["tokens_per_s"]]
            fastest[B] = max(exact, key=lambda row: row["tokens_per_s"])
            figures = ("method", "tokens_per_s", "valid_loss")
            report.sweep(
                f"Batch {B}: the frontier of speed and loss; fastest with the baseline's tokens: "
                + fastest[B]["method"],
                [{key: row[key] for key in figures} for row in frontier(rows.values())],
            )
            points = {n: (r["tokens_per_s"], r["valid_loss"]) for n, r in rows.items() if r["valid_loss"]}
            report.plot_points(points, "tokens/s", "valid loss (nats)", f"Batch {B}")
        one, many = tables[1], tables[args.batch_size]
        report.why(words.compare(fastest[1], one["no cache"], "tokens_per_s"))
        report.why(words.compare(fastest[args.batch_size], many["no cache"], "tokens_per_s"))
        approximate = [row for row in one.values() if row.get("approximate")]
        if approximate:
            best = max(approximate, key=lambda row: row["tokens_per_s"])
            report.why(words.compare(best, fastest[1], "tokens_per_s") + words.loss(best))
        n, V = args.prompt_len + args.n_tokens // 2, text.vocab_size
        step = forward_cost(parameters_of(collection.dense), V, 1, 1, n, args.dtype)
        cached = [name for name in ("KV cache", "compiled step", "transformers") if name in one]
        report.why_step(dict.fromkeys(cached, step) or {"no cache": step}, one)
        report.finish()
