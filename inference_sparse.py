"""What the reports of sparse attention share: a row for each choice of keys, and tensors of a decode step.

The rules and what a choice is worth are in gptlite_sparse.py.
"""

import copy
import math
from functools import partial

import torch
import torch.nn.functional as F

import inference_report as harness
import inference_words as words
from gptlite_gqa import grouped_attention
from gptlite_sparse import GPTlite_Sparse, attention_inputs, choice_figures, use_choice
from inference_cost import Cost
from inference_utils import cached_logits, first_of, loss_difference

COLUMNS = {  # of a report: what a choice of keys adds to a row
    "keys_read": ("keys read", "{:.1f}"),
    "mass": ("mass", "{:.3f}"),
    "recall": ("recall", "{:.2f}"),
    "best_missed": ("best missed", "{:.1%}"),
}
FAMILY_WINDOWS = 32  # on which all methods are compared: as many as main_kv_eviction.py reads
HIDE = ("tpot_p99_ms", "speedup", "forward_tokens", "n_parameters")  # columns without news here


class Choices:
    """Rules that choose keys, each in GPTlite: losses on the report's windows, figures on the same texts.

    Args: args: options; report: Report; base: the dense model that losses are compared with; n_texts: texts
        of a whole context whose attention the figures are measured on (see choice_figures).
    """

    def __init__(self, args, report, base, text, n_texts=2):
        self.args, self.report, self.base = args, report, base
        self.tokens = text.prompts(1 if args.quick else n_texts, base.seqlen)  # [n_texts, T]
        self.inputs = attention_inputs(base, self.tokens)  # of each layer (x, Q, K)
        (self.dense,) = harness.load_models(args, GPTlite_Sparse)
        self.models, self.lines, self.by_budget = {}, {}, []

    def figures(self, choose):
        """What a rule (Q, K) -> bool is worth, the mean over the layers of the dense model."""
        return mean_figures([choice_figures(Q, K, choose(Q, K)) for _, Q, K in self.inputs])

    def model(self, choose, n_dense_layers=0):
        """GPTlite with a rule in its blocks; all these models share one copy of the weights."""
        shared = {id(t): t for t in [*self.dense.parameters(), *self.dense.buffers()]}
        return use_choice(copy.deepcopy(self.dense, shared), choose, n_dense_layers)

    def row(self, name, budget, choose, n_dense_layers=0):
        """Adds the row of a rule at a budget of keys. Returns it."""
        model = self.model(choose, n_dense_layers)
        figures = self.report.loss_figures(model, self.base) | {"budget": budget, "keys_read": None}
        label = f"{name} {budget}" + (f", {n_dense_layers} layers dense" if n_dense_layers else "")
        if not n_dense_layers:  # else its layers differ
            figures |= self.figures(choose)
        return self.add(label, model, self.report.row(label, same_output="approximate", **figures))

    def add(self, label, model, row):
        """Remembers a row that was measured otherwise, for lines and comparisons. Returns it."""
        self.models[label] = model
        if row["keys_read"] is not None:
            point, rule = (row["keys_read"], row["valid_loss"]), label.rpartition(" ")[0]
            self.lines.setdefault(rule, []).append(point)
            self.by_budget.append((rule, row, model, self.base))
        return row

    def add_trained(self, label, row, trained, control):
        """Remembers what training on made of a row's model, and a dense model after the same steps."""
        self.by_budget.append((f"{label.rpartition(' ')[0]}, trained on", row, trained, control))

    def between(self, one, other):
        """How the losses of two of the rows stand to each other, a sentence."""
        losses = [self.report.loss_of(self.models[label]) for label in (one, other)]
        return words.loss_between(one, other, *loss_difference(*losses))

    def budget_sweep(self):
        """Adds the table of loss against budget, which results/make.py draws the family's figure from."""
        few, sweep = min(FAMILY_WINDOWS, self.args.n_windows), []
        for rule, row, *models in self.by_budget:
            losses, reference = (self.report.loss_of(model)[:few] for model in models)
            difference, se = loss_difference(losses, reference)
            line = {"rule": rule, "budget": row["budget"], "keys read": row["keys_read"]}
            sweep.append(line | {"loss": losses.mean().item(), "difference": difference, "+-": se})
        self.report.sweep(f"Loss against budget: {few} windows", sweep)

    def plot_losses(self):
        """Adds the panel of loss against keys read, a line for each rule, and budget_sweep()'s table."""
        self.budget_sweep()
        lines = {name: tuple(zip(*sorted(points), strict=True)) for name, points in self.lines.items()}
        self.report.plot_lines(lines, "keys read by a query", "valid loss (nats)", "GPTlite")


def mean_figures(figures):
    """The mean of each figure over layers: a list of dictionaries with equal keys -> one."""
    return {key: math.fsum(one[key] for one in figures) / len(figures) for key in figures[0]}


def check_model(report, prompts, model, whole, dense):
    """Checks that a model computes a text in any pieces as in one pass, and what it is with all keys chosen.

    Args: prompts [B, T]; model: (tokens, cache) -> (logits, cache); whole: the same with all keys chosen.
    """
    pieces = cached_logits(model, prompts, prompts.shape[1] // 2)[0]  # [B, T, V]
    with torch.no_grad():
        one_pass, unchanged, expected = (first_of(one(prompts)) for one in (model, whole, dense))
    report.check_close("half the prompt, then token by token, as in one pass", pieces, one_pass)
    report.check_close("with all keys chosen the model unchanged", unchanged, expected)


def decode_sweep(args, report, p, name, what, form):
    """Times attention of a decode step, one layer with all heads, beside dense attention; draws it.

    Args: form: (q [1, H, 1, D], K, V [1, H, n, D]) -> a call of the technique's attention; name, what: of the
        form and its size. Returns: the rows of the sweep.
    """

    def forms(n):
        q, K, V = decode_step(args, p.n_heads, p.d_head, n)
        sdpa = partial(F.scaled_dot_product_attention, q, K, V)
        return {
            "dense": partial(grouped_attention, q, K, V),
            "SDPA": sdpa,
            name: torch.no_grad()(form(q, K, V)),
        }

    title, contexts = f"Attention of a decode step (ms), {what}", (1024, 4096, 16384, 65536)
    rows = report.time_sweep(title, "keys", contexts[: 2 if args.quick else 4], forms)
    report.plot_sweep(title)
    return rows


def explain(report, row, dense, sweep, name):
    """Two lines: what a step and its cache cost in GPTlite, and from how many keys attention alone wins."""
    report.why(words.compare(row, dense) + words.compare(row, dense, "kv_bytes_per_token"))
    report.why(words.about("attention alone", words.crossover(sweep, "keys", name, "dense")))


def decode_step(args, n_heads, d_head, n_keys, n_queries=1):
    """Random q [1, H, n_queries, D] and K, V [1, H, n_keys, D] by --device and --dtype."""
    shapes = [(1, n_heads, S, d_head) for S in (n_queries, n_keys, n_keys)]
    return [torch.randn(shape, device=args.device).to(args.dtype) for shape in shapes]


def reading_cost(n_vectors, n_heads, d_head, dtype):
    """Cost of a step that reads n_vectors of each head (keys, values, bounds) once, each for one product."""
    n_numbers = n_vectors * n_heads * d_head
    return Cost(2 * n_numbers, n_numbers * dtype.itemsize)
