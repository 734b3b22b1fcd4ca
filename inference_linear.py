"""What the reports of linear layers share: options, models that are trained on beside a control, their rows.

The layers are in gptlite_linear.py, training in inference_training.py.
"""

from functools import partial

import torch

import inference_report as harness
import inference_words as words
from gptlite import GPTlite
from gptlite_linear import GPTlite_Linear, convert_to_linear, state_bytes
from inference_report import Method
from inference_training import CONVERSION_LR, UPTRAIN_LR, uptrained
from inference_utils import cached_logits, is_distilled, load_checkpoint, loss_difference, make_model
from linear_packed import pack_linears

COLUMNS = {"state_bytes": ("state bytes", "{:,.0f}")}  # of a report: what does not grow with the text
HIDE = ("tpot_p99_ms", "speedup", "forward_tokens", "n_parameters", "same_output")  # without news here
CONTROL = "softmax, trained on"
LENGTHS = [256 * 4**i for i in range(5)]  # of texts whose attention alone is timed, up to 65536 tokens


def options(doc, max_tokens, uptrain_steps=12):
    """The parser of a script that trains converted models on and times attention over lengths (LENGTHS)."""
    quick = {"batch_size": 2, "prompt_len": 32, "n_tokens": 4, "uptrain_steps": 1, "max_tokens": 1024}
    parser = harness.options(doc, repeats=3, quick=quick, batch_size=8, prompt_len=128, n_tokens=32)
    add, steps = parser.add_argument, "steps of 8 x 256 tokens for each model"
    add("--uptrain-steps", type=harness.count, default=uptrain_steps, help=steps)
    add("--max-tokens", type=int, choices=LENGTHS[1:], default=max_tokens, help="longest text")
    return parser


def lengths(args):
    """LENGTHS up to --max-tokens."""
    return LENGTHS[: LENGTHS.index(args.max_tokens) + 1]


def converted(args, text, linear_class, full_layers=()):
    """GPTlite's weights by the options as a GPTlite_Linear to train on: what they lack is as it begins."""
    state = load_checkpoint(args.checkpoint)
    kinds = {"linear_class": linear_class, "full_layers": full_layers}
    fresh = make_model(GPTlite_Linear, text.vocab_size, is_distilled(state), **kinds)
    return convert_to_linear(state, fresh).to(args.device, args.dtype)


def trained_on(args, text, model, name, lr=CONVERSION_LR, n_steps=None):
    """A copy of a model after n_steps (default --uptrain-steps) of training on text, ready to be measured."""
    n_steps = args.uptrain_steps if n_steps is None else n_steps
    trained = uptrained(model, text.train, n_steps, lr, 8, model.seqlen, name)
    return pack_linears(trained.to(args.dtype))


def makers(args, text, layers):
    """{name: function that converts GPTlite's weights to that layer in all blocks and trains them on}."""

    def make(name):
        return trained_on(args, text, converted(args, text, layers[name]), name)

    return {name: partial(make, name) for name in layers}


@torch.no_grad()
def memory_of(model, tokens):
    """What a model keeps of one text: bytes that do not grow, and bytes that each further token adds.

    Counted from the real tensors at half of the tokens [1, T] and at all of them.
    """
    T = tokens.shape[1]
    half, whole = (state_bytes(model(tokens[:, :n])[1]) for n in (T // 2, T))
    per_token = (whole - half) / (T - T // 2)
    return whole - per_token * T, per_token


def compare_trained(args, report, text, softmax, generate, makers):
    """Rows of converted models, each trained on, beside softmax attention and a control that keeps it.

    Args: softmax: GPTlite_KVCache, the baseline; generate: function of a Method; makers: {name: function that
        returns the trained model}.
    Returns: {name: row}, {name: model}; "softmax, trained on" is the control in both. Adds a check for each
        model: in pieces and token by token it computes what it computes in one pass.
    """
    window = text.prompts(1, softmax.seqlen)  # [1, T]
    (plain,) = harness.load_models(args, GPTlite, packed=False)
    models = {CONTROL: trained_on(args, text, plain, "control", UPTRAIN_LR)}
    methods = [Method("softmax", generate, softmax)]
    for name, make in makers.items():
        model = models[name] = make()
        with torch.no_grad():
            logits = model(window)[0]  # [1, T, V]
        steps = cached_logits(model, window[:, :66], 50)[0]  # [1, 66, V]
        report.check_close(f"{name}: in pieces and token by token equals one pass", steps, logits[:, :66])
        fixed, per_token = memory_of(model, window)
        figures = {"state_bytes": fixed, "kv_bytes_per_token": per_token or None}
        methods.append(Method(name, generate, model, exact=False, **figures))
    prompts = text.prompts(args.batch_size, args.prompt_len)  # [B, T]
    rows = report.compare(prompts, args.n_tokens, *methods, label="")
    rows[CONTROL] = report.row(CONTROL, **report.loss_figures(models[CONTROL], softmax))
    return rows, models


def between(report, models, one, other):
    """How the losses of two of the models stand to each other, a sentence."""
    losses = [report.loss_of(models[name]) for name in (one, other)]
    return words.loss_between(one, other, *loss_difference(*losses))


def explain_losses(args, report, rows, names):
    """A sentence on the best of these rows, and on the control after as many steps."""
    best = min(names, key=lambda name: rows[name]["valid_loss"])
    label = f"after {args.uptrain_steps} steps"
    return words.about(label, words.loss(rows[best])) + words.loss(rows[CONTROL])


def bytes_at(row, n_tokens):
    """Bytes that a text of n_tokens takes, from the figures of a row."""
    return (row.get("state_bytes") or 0) + (row["kv_bytes_per_token"] or 0) * n_tokens


def plot_memory(report, rows, names, n_tokens):
    """Adds the panel of loss against the bytes that a text of n_tokens takes, the control's for softmax."""
    memory = {name: bytes_at(rows[name], n_tokens) / 1e6 for name in ("softmax", *names)}
    points = {name: (memory[name], rows[name]["valid_loss"]) for name in names}
    points[CONTROL] = memory["softmax"], rows[CONTROL]["valid_loss"]
    report.plot_points(points, f"MB at {n_tokens} tokens", "valid loss (nats)", "After training on")
