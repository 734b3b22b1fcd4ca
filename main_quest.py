"""Quest: a decode step reads only the pages of its cache whose keys can matter to its query.

Keys are cut into pages. Of each page the smallest and the largest value in every channel are kept, from
which follows an upper bound of the score of any key in it: channel by channel the larger of query times
smallest and query times largest. A step computes the bounds, takes the pages with the highest ones and
attends to their keys alone. Nothing is evicted: another query may take other pages.

Approximate: a bound is never below the best score of its page, but it can lie far above it, so the page
with the best key can be missed; the report counts how often. With all pages chosen it is exact. Wins time
where the cache is long: a step reads two vectors a page and the chosen pages. Loses memory (the bounds come
on top of the cache, of which everything is kept), and time in a context as short as GPTlite's. Bounds need
keys that are alike within a page: large pages are cheap to judge and judged badly.

Run: python main_quest.py            (--page-size 16 for the paper's pages)

Source: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, 2024. The paper
leaves the first two layers dense; here all layers choose, and a row of its own shows two dense ones.
"""

import torch

import gptlite_sparse as sparse
from gptlite_gqa import grouped_attention
from gptlite_kvcache import (
    Block_StaticKVCache,
    GPTlite_StaticKVCache,
    MultiHeadAttention_StaticKVCache,
    StaticKVCache,
)
from gptlite_sparse import for_heads, gather_rows, in_blocks, sum_of_group, top_mask


def bound_by_definition(Q, lowest, highest):
    """The score that no key of a page can exceed: Q [B, H, Sq, D], extremes [B, H, n, D] -> [B, H, Sq, n]."""
    Q, lowest, highest = Q.unsqueeze(-2), lowest.unsqueeze(-3), highest.unsqueeze(-3)
    return torch.maximum(Q * lowest, Q * highest).sum(dim=-1)


def page_bound(Q, lowest, highest):
    """The same by two products: positive channels of a query meet the largest values, negative the smallest.

    Q [B, H, Sq, D]; extremes of each page's keys [B, G, n, D] -> [B, H, Sq, n], not divided by sqrt(D).
    """
    wide = torch.promote_types(Q.dtype, torch.float32)  # bounds of 16 bits may overflow
    lowest, highest = (for_heads(t, Q.shape[1]).to(wide) for t in (lowest, highest))  # [B, H, n, D]
    return Q.clamp(min=0).to(wide) @ highest.mT + Q.clamp(max=0).to(wide) @ lowest.mT


def running_bounds(K, page_size):
    """Smallest and largest values of each key's page up to that key: K [B, G, Sk, D] -> two of its shape."""
    pages, Sk = in_blocks(K, page_size), K.shape[-2]  # [B, G, n, page, D]
    return [f(dim=-2).values.flatten(2, 3)[:, :, :Sk] for f in (pages.cummin, pages.cummax)]


def check_budget(budget, page_size):
    """Raises ValueError unless the budget of keys is at least one page."""
    if not 1 <= page_size <= budget:
        raise ValueError(f"a budget of {budget} keys is no page of {page_size}")


def choose_pages(Q, K, budget, page_size):
    """The pages that each query reads, as a mask over keys: by definition, for any number of queries.

    Args: Q [B, H, Sq, D]; K [B, G, Sk, D], the last query belongs to the last key; budget: keys that a query
        may read, whole pages of page_size. A page in progress is judged by the keys that it had then.
    Returns: bool [B, H, Sq, Sk]; heads of a group choose together. ValueError for a budget below a page.
    """
    check_budget(budget, page_size)
    Sq, Sk = Q.shape[-2], K.shape[-2]
    lowest, highest = running_bounds(K, page_size)  # [B, G, Sk, D]
    own_key = torch.arange(Sk - Sq, Sk, device=Q.device)  # [Sq]
    last = torch.arange(page_size, Sk + page_size, page_size, device=Q.device).clamp(max=Sk) - 1  # [n]
    scores = page_bound(Q, lowest[:, :, last], highest[:, :, last])  # [B, H, Sq, n]
    now = (for_heads(t[:, :, own_key].to(scores), Q.shape[1]) for t in (lowest, highest))  # [B, H, Sq, D]
    own_scores = torch.maximum(*(Q * t for t in now)).sum(dim=-1, keepdim=True)  # [B, H, Sq, 1]
    pages, own_page = torch.arange(len(last), device=Q.device), own_key[:, None] // page_size  # [n], [Sq, 1]
    scores = sum_of_group(torch.where(pages == own_page, own_scores, scores), K.shape[1])  # [B, G, Sq, n]
    chosen = top_mask(scores, budget // page_size, pages <= own_page)  # [B, G, Sq, n]
    visible = chosen.repeat_interleave(page_size, dim=-1)[..., :Sk] & sparse.causal(Sq, Sk, Q.device)
    return for_heads(visible, Q.shape[1])  # [B, H, Sq, Sk]


def quest_attention(q, K, V, lowest, highest, length, budget):
    """Attention of one query to its best pages: the fast form, which reads bounds and chosen pages alone.

    Args: q [B, H, 1, D]; K, V: room for whole pages [B, G, n * page, D], of which `length` rows hold a token;
        lowest, highest: extremes of each page [B, G, n, D]; budget: keys to read.
    Returns: [B, H, 1, D]. Raises ValueError for bounds of other keys, or a budget below a page.
    """
    B, G, room, D = K.shape
    page_size, rest = divmod(room, lowest.shape[2])
    if rest or not 0 < length <= room:
        raise ValueError(f"{lowest.shape[2]} pages and {length} tokens do not fit {room} rows of keys")
    check_budget(budget, page_size)
    n = -(-length // page_size)  # pages in use
    scores = sum_of_group(page_bound(q, lowest[:, :, :n], highest[:, :, :n]), G)[:, :, 0]  # [B, G, n]
    chosen = scores.topk(min(budget // page_size, n), dim=-1).indices  # [B, G, k]
    k, v = (gather_rows(in_blocks(t, page_size), chosen).flatten(2, 3) for t in (K, V))  # [B, G, k * page, D]
    visible = False  # nothing is hidden
    if length % page_size:  # the last page has empty rows
        rows = chosen.unsqueeze(-1) * page_size + torch.arange(page_size, device=q.device)  # [B, G, k, page]
        visible = for_heads(rows.flatten(2).unsqueeze(2) < length, q.shape[1])  # [B, H, 1, k * page]
    return grouped_attention(q, k, v, visible)


# ---- In the model ----


class PageCache(StaticKVCache):
    """A static cache with the bounds of its pages, [2, L, B, H, pages, D]: smallest and largest values."""

    def __init__(self, model, batch_size):
        super().__init__(model, batch_size)
        page_size = model.blocks[0].mha.page_size
        if self.window % page_size:
            raise ValueError(f"pages of {page_size} do not fill the context of {self.window} evenly")
        L, B, H, W, D = self.k.shape
        self.page_size, self.bounds = page_size, self.k.new_zeros(2, L, B, H, W // page_size, D)

    def write(self, layer, K, V):
        """Puts keys and values of new tokens [B, H, Sq, D] behind the others, renews their pages' bounds."""
        start, stop, size = self.length, self.length + K.shape[-2], self.page_size
        self.k[layer, :, :, start:stop], self.v[layer, :, :, start:stop] = K, V
        for page in range(start // size, -(-stop // size)):  # those that changed
            keys = self.k[layer, :, :, page * size : min((page + 1) * size, stop)]  # [B, H, up to page, D]
            self.bounds[0, layer, :, :, page], self.bounds[1, layer, :, :, page] = (
                keys.amin(-2),
                keys.amax(-2),
            )


class MultiHeadAttention_Quest(MultiHeadAttention_StaticKVCache):
    """Attention over one layer of a PageCache: `budget` keys a query, in pages of page_size."""

    budget, page_size = 32, 4

    def forward(self, x, cache, layer):
        Q, K, V = (self.split_heads(f(x)) for f in (self.query_proj, self.key_proj, self.value_proj))
        n = cache.length + x.shape[1]  # tokens
        cache.write(layer, K, V)
        k, v = cache.k[layer], cache.v[layer]  # [B, H, W, D]
        if x.shape[1] == 1:
            out = quest_attention(Q, k, v, *cache.bounds[:, layer], n, self.budget)  # [B, H, 1, D]
        else:
            visible = choose_pages(Q, k[:, :, :n], self.budget, self.page_size)  # [B, H, Sq, n]
            out = sparse.attend_to(Q, k[:, :, :n], v[:, :, :n], visible)  # [B, H, Sq, D]
        return self.out_proj(self.merge_heads(out))  # [B, Sq, E]


class GPTlite_Quest(GPTlite_StaticKVCache):
    """GPTlite over a PageCache; the weights are GPTlite's. Ends at the context (ValueError)."""

    block_class = type("Block_Quest", (Block_StaticKVCache,), {"mha_class": MultiHeadAttention_Quest})

    def __init__(self, *args, budget=32, page_size=4, **kwargs):
        check_budget(budget, page_size)
        super().__init__(*args, **kwargs)
        for block in self.blocks:
            block.mha.budget, block.mha.page_size = budget, page_size

    def forward(self, x, kv_cache=None):
        kv_cache = PageCache(self, x.shape[0]) if kv_cache is None else kv_cache
        sparse.check_context(self, kv_cache.length + x.shape[1])
        return super().forward(x, kv_cache)


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_sparse as study
    import inference_words as words
    from inference_report import Method
    from inference_utils import cached_logits, parameters_of
    from main_kvcache import generate_static

    PAGE, READ = 16, 1024  # of attention alone
    quick = {"n_tokens": 8, "budgets": [32]}
    parser = harness.options(__doc__, 3, quick=quick, prompt_len=192, n_tokens=32)
    add, number = parser.add_argument, harness.positive_int
    add("--page-size", type=number, default=4, help="keys of a page, in GPTlite")
    add("--budgets", type=number, nargs="+", default=[16, 32], help="keys a query may read, in GPTlite")
    with harness.script(parser) as args:
        size, B, text = args.page_size, sorted(args.budgets)[len(args.budgets) // 2], harness.load_text(args)
        for budget in args.budgets:
            check_budget(budget, size)
        models = GPTlite_StaticKVCache, partial(GPTlite_Quest, budget=B, page_size=size)
        static, model = harness.load_models(args, *models)
        p, T = parameters_of(static), max(min(args.prompt_len, static.seqlen - args.n_tokens), 1)
        prompts = text.prompts(1, T)
        report = harness.Report(args, "Quest", static, study.COLUMNS, study.HIDE, text)
        choices, quest = study.Choices(args, report, static, text), partial(choose_pages, page_size=size)

        name, cache, mean = f"Quest {B}", PageCache(model, 1), (p.seqlen + 1) / 2  # keys of a dense query
        dense = Method("dense", generate_static, static, StaticKVCache(static, 1), keys_read=mean)
        figures = choices.figures(partial(quest, budget=B)) | {"budget": B}
        pages = Method(name, generate_static, model, cache, exact=False, **figures)
        pages.buffers.append(cache.bounds)
        pages.figures["kv_bytes_per_token"] = sum(t.nbytes for t in pages.buffers) / p.seqlen
        rows = report.compare(prompts, args.n_tokens, dense, pages, label="")
        row = choices.add(name, model, rows[name])
        rules = {"oracle": sparse.choose_oracle, "window": sparse.choose_window, "Quest": quest}
        for rule, budget in ((rule, budget) for budget in args.budgets for rule in rules):
            if (rule, budget) != ("Quest", B):
                choices.row(rule, budget, partial(rules[rule], budget=budget))
        choices.row("Quest", B, partial(quest, budget=B), n_dense_layers=2)  # as the paper has it

        study.check_model(report, prompts, model, choices.model(partial(quest, budget=p.seqlen)), static)
        with torch.no_grad():
            gathered, _ = cached_logits(model, prompts, T // 2)  # half a prompt, then one token at a time
            masked, _ = choices.model(partial(quest, budget=B))(prompts)
        report.check_close("pages gathered as masked", gathered, masked)
        slack = []
        for _, Q, K in [[t.cpu().double() for t in layer] for layer in choices.inputs]:
            bounds = [t[:, :, size - 1 :: size] for t in running_bounds(K, size)]  # [B, H, n, D], whole pages
            scores = (Q @ K.mT)[..., : bounds[0].shape[2] * size].unflatten(-1, (-1, size))
            slack.append((page_bound(Q, *bounds) - scores.amax(dim=-1)).amin().item())
        report.check("no bound is below the best score of its page", min(slack) > -1e-9)
        sizes = {n: partial(quest, budget=B, page_size=n) for n in (1, 2, 4, 8, 16) if n <= B}
        by_size = [{"page": n} | choices.figures(rule) for n, rule in sizes.items()]
        report.sweep(f"Pages of other sizes, at most {B} keys a query", by_size)

        def attention(q, K, V):
            bounds = [f(in_blocks(K, PAGE), dim=-2) for f in (torch.amin, torch.amax)]  # [1, H, pages, D]
            return partial(quest_attention, q, K, V, *bounds, K.shape[2], READ)

        choices.plot_losses()
        sweep = study.decode_sweep(args, report, p, "Quest", f"{READ} keys in pages of {PAGE}", attention)
        n = sweep[-1]["keys"]
        report.why(words.loss(row) + choices.between(name, f"window {B}"))
        study.explain(report, row, rows["dense"], sweep, "Quest")
        vectors = {"dense": 2 * n, "Quest": 2 * n // PAGE + 2 * READ}  # to read, of each head
        costs = {form: study.reading_cost(m, p.n_heads, p.d_head, args.dtype) for form, m in vectors.items()}
        report.why(words.about(f"{n} keys", words.bounds(sweep[-1], costs, report.ceilings())))
        report.finish()
