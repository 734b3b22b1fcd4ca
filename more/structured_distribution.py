"""What masks do to a model's distribution, measured where all texts that match can be counted.

Masked decoding cuts the model's probabilities at each step and rescales what is left. A text then comes with
probability q, the product of the rescaled ones. Of the model's own texts that match it would be p / sum of p.
The two differ: a beginning that the model likes for the sake of forbidden texts keeps all its probability,
however unlikely the texts are that it may still become.

Exact: both are computed for each text, and sampled texts are counted against q. Rejection gives the right
distribution and takes 1 / sum of p tries with free decoding. Masked texts can be accepted with a probability
in proportion to p / q, which takes max(p / q) / sum of p tries, never more. Masks win wherever few free texts
match; they lose where the choice between beginnings matters more than the form.

Run: python more/structured_distribution.py            (--n-samples 2000 counts more of them)

Source: Park et al., Grammar-Aligned Decoding, 2024; Lew et al., Sequential Monte Carlo Steering of Large
Language Models using Probabilistic Programs, 2023 (weights that set it right).
"""

import torch

import _root  # noqa: F401 (the files above become importable)
from main_structured_decoding import NEVER


@torch.no_grad()
def log_probabilities(model, prompt, answer, guide):
    """How likely an answer, its end included, is behind a prompt [T]: (log p, log q) of each of its tokens.

    Args: model: token ids [B, T] -> logits [B, T, V]; answer: list of n tokens that the guide allows.
    Returns: float64 [n] each, p of the model as it is and q under the masks, without a budget.
    """
    tokens = torch.cat([prompt, prompt.new_tensor(answer)])  # [T + n]
    logits = model(tokens[None, :-1])[0, len(prompt) - 1 :]  # [n, V]
    log_p = logits.double().log_softmax(dim=-1)  # [n, V]
    needed = guide.needed[guide.states(answer)[:-1]]  # [n, V]
    log_q = log_p.masked_fill(needed == NEVER, float("-inf")).log_softmax(dim=-1)
    chosen = prompt.new_tensor(answer)[:, None]  # [n, 1]
    return log_p.gather(-1, chosen)[:, 0], log_q.gather(-1, chosen)[:, 0]


def text_probabilities(model, prompt, answers, guide):
    """Probabilities of whole answers: p of the model as it is, q of masked decoding, float64 [n] each."""
    pairs = [log_probabilities(model, prompt, answer, guide) for answer in answers]
    return tuple(torch.stack([pair[i].sum() for pair in pairs]).exp() for i in (0, 1))


def expected_tries(p, q):
    """How many texts rejection draws for each that it accepts: from free decoding, from masked decoding."""
    return 1 / p.sum().item(), (p / q).max().item() / p.sum().item()


CASES = {  # prompt, all texts that match, and their end; the last two names are in no play of the training
    "who answers": (
        "ROMEO:\nWho art thou?\n\n",
        "ROMEO JULIET KENT HORATIO HAMLET OPHELIA GERTRUDE MACBETH MACDUFF".split(),
        ":",
    ),
    "what she says": (
        "HAMLET:\nShall I go to her?\n\nOPHELIA:\n",
        ["Ay.", "Ay, my lord.", "No.", "No, my lord.", "Nay.", "Not yet.", "I know not.", "I will.", "Yes."],
        "\n",
    ),
}


if __name__ == "__main__":
    import re
    from collections import Counter

    import inference_report as harness
    import inference_words as words
    from data.shakespeare import VOCABULARY, decode, encode
    from gptlite import GPTlite
    from gptlite_kvcache import GPTlite_KVCache
    from main_structured_decoding import Guide, generate_structured

    parser = harness.options(__doc__, repeats=None, data=False, quick={"n_samples": 100})
    parser.add_argument("--n-samples", type=harness.positive_int, default=500, help="texts to draw and count")
    with harness.script(parser) as args:
        plain, cached = harness.load_models(args, GPTlite, GPTlite_KVCache)
        report = harness.Report(args, "what masks do to the distribution", plain, n_samples=args.n_samples)
        for title, (question, texts, end) in CASES.items():
            guide = Guide("|".join(map(re.escape, texts)), VOCABULARY, end, args.device)
            prompt = torch.tensor(encode(question), device=args.device)  # [T]
            p, q = text_probabilities(plain, prompt, [encode(text + end) for text in texts], guide)
            own = p / p.sum()  # [n]: of the model's own texts that match
            total = q.sum().item()
            report.check(f"{title}: masked decoding gives these texts and no others", abs(total - 1) < 1e-3)
            n = args.n_samples
            prompts = prompt.expand(n, -1)  # [n, T]
            drawn = generate_structured(cached, prompts, 20, guide, 1.0, request=args.seed * n)
            counts = Counter(decode(answer[:-1]) for answer in drawn)
            share = torch.tensor([counts[text] / n for text in texts], dtype=torch.float64)
            far = ((share - q.cpu()).abs() / (q.cpu() * (1 - q.cpu()) / n + 1 / n**2).sqrt()).max().item()
            report.check(f"{title}: {n} draws are as q says ({far:.1f} standard errors at most)", far < 5)
            columns = {"text": texts, "model": own, "masked": q, f"of {n} draws": share}
            lines = [dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True)]
            lines = [{k: v if k == "text" else float(v) for k, v in line.items()} for line in lines]
            report.sweep(f"{title}: share of each text", lines)
            moved = (q - own).clamp(min=0).sum().item()
            free, masked = expected_tries(p, q)
            i = (q - own).argmax().item()
            figures = f"{moved:.0%} of the probability, most of all to {texts[i]!r}"
            figures = (
                f"{figures} ({own[i].item():.1%} of the model's own texts that match, {q[i].item():.1%})"
            )
            cost = f"to set it right takes {masked:.0f} masked texts for one, or {free:.0f} free ones."
            report.why(
                words.choose(
                    moved,
                    (0.05, f"{title}: masks move {figures}; {cost}"),
                    f"{title}: masks hardly change the distribution, they move {figures}; {cost}",
                )
            )
            shares = {name: (texts, [line[name] for line in lines]) for name in ("model", "masked")}
            report.plot_lines(shares, "", "share of the texts that match", title)
        report.finish()
