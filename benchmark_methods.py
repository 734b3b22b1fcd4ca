"""The methods of main_benchmark.py: how each is made from the same weights, and called on the same prompts.

Each line of `methods` names the script that explains it. `peers` are the same weights in the transformers
library: its generate with a growing and a preallocated cache, its continuous batching, and its two ways of
guessing several tokens that one step then checks.
"""

import logging
from functools import cached_property

import torch

from gptlite import GPTlite
from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from gptlite_paged import BlockPool, GPTlite_Paged
from gptlite_slots import GPTlite_Slots
from inference_utils import sample_prompts
from main_continuous_batching import continuous_batching_kvcache
from main_flash_attention import use_sdpa
from main_flash_decoding import GPTlite_FlashDecoding
from main_gqa import align_heads, attention_inputs
from main_kvcache import CompiledStep, CudaGraphStep, generate, generate_kvcache, generate_static
from main_mla import GPTlite_MLA
from main_mla_conversion import convert_mha_to_mla_calibrated
from main_paged_attention import PagedScheduler, serve
from main_prefix_cache import compute_prefix_cache, generate_with_prefix
from main_pruning import compute_importance, prune
from main_static_batching import static_batching


class DoesNotApply(Exception):
    """A method that is not made for this batch, model or version: a row that says so, and no fault."""


class Collection:
    """Makes the methods, each from the weights that all share.

    Args: load(model_class, **kwargs): a model with the trained weights; make(model_class, state, **kwargs):
        one with converted weights; state: the trained weights; text: to calibrate conversions on [N];
        distilled_path: the student's checkpoint.
    Every function takes prompts [B, T] with a common beginning of n_shared tokens and the number of new
    tokens, and returns (run, models, buffers, cache): run() gives prompt and answer [B, T + n]; cache: the
    tensors that hold keys and values of the prompts (dynamic) or of the whole room, and its tokens.
    """

    def __init__(self, load, make, state, text, distilled_path, n_shared):
        self.load, self.make, self.state, self.text = load, make, state, text
        self.distilled_path, self.n_shared = distilled_path, n_shared
        self.made = {}
        self.cached = load(GPTlite_KVCache)
        self.seqlen, mha = self.cached.seqlen, self.cached.blocks[0].mha
        self.H, self.D = mha.n_heads, mha.d_head

    def methods(self, cuda):
        """[(name, exact, function)], the baseline first."""
        return [
            ("no cache", True, self.no_cache),  # main_kvcache.py
            ("no cache (SDPA)", True, self.sdpa),  # main_flash_attention.py
            ("KV cache", True, lambda x, n: self.dynamic(self.cached, x, n)),
            ("static KV cache", True, self.static),
            ("compiled step", True, lambda x, n: self.static(x, n, lambda model, _: CompiledStep(model))),
            *([("CUDA graph", True, lambda x, n: self.static(x, n, CudaGraphStep))] if cuda else []),
            ("flash decoding", True, self.flash_decoding),  # main_flash_decoding.py
            ("prefix cache", True, self.prefix),  # main_prefix_cache.py
            ("static batching", True, lambda x, n: self.served(GPTlite, static_batching, x, n)),
            (
                "continuous batching",
                True,
                lambda x, n: self.served(GPTlite_Slots, continuous_batching_kvcache, x, n),
            ),
            ("paged KV cache", True, self.paged),  # main_paged_attention.py
            ("GQA 3 (converted)", False, lambda x, n: self.gqa(3, x, n)),  # main_gqa.py
            ("MQA (converted)", False, lambda x, n: self.gqa(1, x, n)),
            ("MLA 192 (converted)", False, lambda x, n: self.mla(192, x, n)),  # main_mla.py
            ("pruned by 1/6", False, self.pruned),  # main_pruning.py
            ("distilled", False, self.distilled),  # main_distillation.py
        ]

    def dynamic(self, model, x, n):
        cache = [t for kv in model(x)[1] for t in kv]
        return lambda: generate_kvcache(model, x, n, self.seqlen), [model], [], (cache, x.shape[1])

    def no_cache(self, x, n):
        model = self.load(GPTlite)
        return lambda: generate(model, x, n, self.seqlen), [model], [], None

    def sdpa(self, x, n):
        model = use_sdpa(self.load(GPTlite))
        return lambda: generate(model, x, n, self.seqlen), [model], [], None

    def static(self, x, n, make_step=None, model_class=GPTlite_StaticKVCache, **kwargs):
        model = self.load(model_class, **kwargs)
        cache = StaticKVCache(model, len(x))
        step = make_step(model, cache) if make_step else None
        kept = [cache.k, cache.v]
        models = [model, step] if step else [model]
        return lambda: generate_static(model, x, n, cache, step), models, kept, (kept, self.seqlen)

    def flash_decoding(self, x, n):
        return self.static(x, n, model_class=GPTlite_FlashDecoding, n_splits=2)

    def prefix(self, x, n):
        first, rest = x[:, : self.n_shared], x[:, self.n_shared :]  # [B, S], [B, T - S]
        stored = compute_prefix_cache(self.cached, first[:1])

        def run():
            return torch.cat([first, generate_with_prefix(self.cached, stored, rest, n, self.seqlen)], dim=1)

        kept = [t for kv in stored for t in kv]
        return run, [self.cached], kept, (kept, self.n_shared)

    def served(self, model_class, serve_all, x, n):
        model, requests = self.load(model_class), [(row, n) for row in x]
        return lambda: torch.stack(serve_all(model, requests, len(x), self.seqlen)[0]), [model], [], None

    def paged(self, x, n):
        model, requests = self.load(GPTlite_Paged), [(row, n) for row in x]
        pool = BlockPool(model, len(x) * -(-(x.shape[1] + n) // 16))
        room = pool.n_blocks * pool.block_size / len(x)
        return (
            lambda: torch.stack(serve(PagedScheduler(model, pool), requests)),
            [model],
            [pool.kv],
            ([pool.kv], room),
        )

    @cached_property
    def attention_inputs(self):
        """What the attention of each layer reads on 16 texts, which conversions are calibrated on."""
        texts = sample_prompts(self.text, 16, self.seqlen).to(self.cached.fc_out.weight.device)  # [16, T]
        return attention_inputs(self.make(GPTlite_KVCache, self.state).float(), texts)

    def converted(self, name, convert):
        """The model that convert() makes, once for all sizes of batches."""
        if name not in self.made:
            self.made[name] = convert()
        return self.made[name]

    def gqa(self, n_groups, x, n):
        def convert():
            aligned = align_heads(self.state, self.H, self.D, n_groups, self.attention_inputs)
            weights = convert_mha_to_gqa(aligned, self.H, self.D, n_groups)
            return self.make(GPTlite_GQA, weights, n_groups=n_groups)

        return self.dynamic(self.converted(f"GQA {n_groups}", convert), x, n)

    def mla(self, d_latent, x, n):
        def convert():
            how = (self.H, self.D, d_latent, self.attention_inputs)
            return self.make(GPTlite_MLA, convert_mha_to_mla_calibrated(self.state, *how), d_latent=d_latent)

        return self.dynamic(self.converted(f"MLA {d_latent}", convert), x, n)

    def pruned(self, x, n):
        def convert():
            model = self.load(GPTlite_KVCache)
            heads, neurons = compute_importance(model, self.text, 2, 8, self.seqlen)
            return prune(model, heads, neurons, self.H - 1, neurons.shape[1] * (self.H - 1) // self.H)

        return self.dynamic(self.converted("pruned", convert), x, n)

    def distilled(self, x, n):
        return self.dynamic(self.student(), x, n)

    def student(self):
        return self.load(GPTlite_KVCache, ckpt_path=self.distilled_path, distilled=True)

    def peers(self):
        """[(name, exact, function)] for transformers' generate: the same weights, its code."""
        from transformers import GenerationConfig

        from gptlite_opt import opt_from_gptlite

        opt = opt_from_gptlite(self.cached)

        def peer(x, n, **how):
            how |= {"max_new_tokens": n, "do_sample": False, "attention_mask": torch.ones_like(x)}
            return lambda: opt.generate(x, **how), [opt], [], None

        def assisted(x, n, **how):
            if len(x) > 1:
                raise DoesNotApply("takes one sequence at a time")
            return peer(x, n, **how)

        def continuous(x, n):
            try:
                from transformers import ContinuousBatchingConfig
            except ImportError as error:
                raise DoesNotApply("this version of transformers has no such class") from error
            logging.getLogger("ContinuousBatchingLogger").disabled = True  # the row says what went wrong
            # without limits it takes most of the memory for its cache
            limits = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=1024)
            config = GenerationConfig(max_new_tokens=n, do_sample=False)

            def run():
                requests = [row.tolist() for row in x]
                answers = opt.generate_batch(requests, config, continuous_batching_config=limits).values()
                if errors := [answer.error for answer in answers if answer.error]:
                    raise DoesNotApply(f"does not run on OPT: {errors[0]}")
                new = torch.tensor([answer.generated_tokens for answer in answers], device=x.device)  # [B, n]
                return torch.cat([x, new], dim=1)  # [B, T + n]

            return run, [opt], [], None

        return [
            ("transformers", True, peer),
            ("transformers (static)", True, lambda x, n: peer(x, n, cache_implementation="static")),
            ("transformers (continuous)", True, continuous),
            (  # speculative decoding: the small model guesses, the large one checks several at once
                "transformers (assisted)",
                True,
                lambda x, n: assisted(x, n, assistant_model=opt_from_gptlite(self.student())),
            ),
            # guesses what followed the same characters before
            ("transformers (lookup)", True, lambda x, n: assisted(x, n, prompt_lookup_num_tokens=4)),
        ]
