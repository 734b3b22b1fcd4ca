"""Choosing the threshold of a semantic cache: on labelled pairs, and judged on topics it was not chosen on.

Idea: a threshold trades hits against wrong hits, and the right one is a property of the encoder and of the
questions, so it is measured. Precision (the right ones of the hits) and recall (the hits of what could be
one) are counted over the threshold on one half of the topics, and the smallest that reaches the target is
taken. Chosen on few pairs it flatters itself: the other half judges it, with Wilson's bound.

Approximate by nature. Wins over a threshold that was guessed; loses where the pairs are few (95% right hits
are proved by 73 hits, all of them right) or unlike the traffic: half of these pairs are traps on purpose, so
label pairs of your own. By the cosine alone a negation moves a vector less than a paraphrase does, and a
higher threshold loses the paraphrases first.

Run: python more/semantic_threshold.py            (--target 0.99: share of the hits that must be right)

Source: Wilson, Probable inference, 1927; Reimers and Gurevych, Sentence-BERT, 2019; Bang, GPTCache, 2023.
"""

import math

import numpy as np

import _root  # noqa: F401 (the files above become importable)
from main_semantic_cache import ROUNDING, SemanticCache, unit_vectors


def embed_once(embed_fn, texts):
    """Embeds texts in one batch: an embed_fn that looks them up, and the probe of a cache."""
    texts = ["probe", *dict.fromkeys(texts)]
    vectors = dict(zip(texts, embed_fn(texts), strict=True))  # [dim] each
    return lambda asked: np.stack([vectors[text] for text in asked])


def score_pairs(pairs, embed_fn, confirm):
    """Labelled pairs -> their cosines, whether the answer is the same, whether confirm agrees: [n] each."""
    one, other = (unit_vectors(embed_fn([pair[column] for pair in pairs])) for column in (3, 4))  # [n, dim]
    confirmed = np.array([confirm(pair.query, pair.other) for pair in pairs])
    return (one * other).sum(axis=1), np.array([pair.same for pair in pairs]), confirmed


def wilson_lower_bound(n_right, n, z=1.96):
    """The share that n_right of n proves with 95% confidence (Wilson, 1927); 0.0 for n = 0."""
    if n == 0:
        return 0.0
    share = n_right / n
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (share + z * z / (2 * n) - spread) / (1 + z * z / n)


def judge(similarities, same, threshold, confirmed=None):
    """What a threshold does to labelled pairs: similarities [n], same and confirmed, bool [n]."""
    hits = similarities >= threshold - ROUNDING  # [n]
    hits = hits if confirmed is None else hits & confirmed
    n_hits, n_right = int(hits.sum()), int((hits & same).sum())
    return {
        "hits": n_hits,
        "right": n_right,
        "precision": n_right / n_hits if n_hits else None,
        "at least": wilson_lower_bound(n_right, n_hits),
        "recall": n_right / max(int(same.sum()), 1),
    }


def choose_threshold(similarities, same, target, confirmed=None):
    """The smallest threshold whose precision reaches the target, None where no one does."""
    for threshold in sorted(similarities.tolist()):
        if (judge(similarities, same, threshold, confirmed)["precision"] or 0.0) >= target:
            return threshold
    return None


def trade_off(similarities, same, confirmed=None):
    """Recall and precision at every threshold that the pairs tell apart: two lists."""
    judged = [judge(similarities, same, threshold, confirmed) for threshold in sorted(similarities.tolist())]
    return tuple([figures[key] for figures in judged if figures["hits"]] for key in ("recall", "precision"))


def count_hits(pairs, embed_fn, threshold, confirm):
    """How many of the pairs a cache hits that was asked the first question of each: what judge() computes."""
    n_hits = 0
    for pair in pairs:
        cache = SemanticCache(embed_fn, threshold, confirm)
        cache(pair.query, str.upper)
        n_hits += cache(pair.other, str.upper)[2]
    return n_hits


def hits_by_kind(pairs, similarities, threshold, confirmed):
    """Which kinds of pairs a threshold hits, alone and confirmed: a line for each kind."""
    hits, lines = similarities >= threshold - ROUNDING, []  # [n]
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        rows = np.array([pair.kind == kind for pair in pairs])  # [n]
        counts = [int(part.sum()) for part in (rows, rows & hits, rows & hits & confirmed)]
        lines.append({"kind": kind} | dict(zip(("pairs", "hits", "confirmed hits"), counts, strict=True)))
    return lines


def judge_left_out(similarities, same, topics, target, confirmed):
    """What a threshold is worth on a topic it has not seen: each is judged at the choice of the others.

    Args: topics: array [n], the topic of each pair; others as in judge and choose_threshold.
    Returns: hits and right ones over all topics, (n_hits, n_right). A topic gets no hit where the others
        find no threshold.
    """
    n_hits = n_right = 0
    for topic in dict.fromkeys(topics.tolist()):
        out = topics == topic  # [n]
        threshold = choose_threshold(similarities[~out], same[~out], target, confirmed[~out])
        if threshold is not None:
            figures = judge(similarities[out], same[out], threshold, confirmed[out])
            n_hits, n_right = n_hits + figures["hits"], n_right + figures["right"]
    return n_hits, n_right


if __name__ == "__main__":
    import os

    os.environ.setdefault("TQDM_DISABLE", "1")  # the encoder shows a bar when it loads
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from data.query_pairs import load_pairs
    from gptlite_kvcache import GPTlite_KVCache
    from inference_utils import alternating_ms
    from main_kvcache import generate_kvcache
    from main_semantic_cache import check_threshold, sentence_transformer_embedder
    from semantic_confirmation import same_details

    parser = harness.options(__doc__, data=False, quick={"n_tokens": 8}, n_tokens=64)
    parser.add_argument("--threshold", type=float, help="least cosine of a hit (default: from the pairs)")
    parser.add_argument("--target", type=float, default=0.95, help="share of the hits that must be right")
    with harness.script(parser) as args:
        target = args.target
        if not 0 < target <= 1:
            raise ValueError(f"--target {target} is no share of the hits: above 0, at most 1")
        check_threshold(args.threshold or 0.0)  # before anything is loaded
        (model,) = harness.load_models(args, GPTlite_KVCache)
        embed = sentence_transformer_embedder(device=args.device)

        # Chosen on one half of the topics, judged on the other
        tuning, test = load_pairs()
        look_up = embed_once(embed, [text for pair in (*tuning, *test) for text in pair[3:]])
        scores, scores_test = (score_pairs(pairs, look_up, same_details) for pairs in (tuning, test))
        (cosine, same, confirmed), (cosine_test, same_test, confirmed_test) = scores, scores_test
        chosen = choose_threshold(cosine, same, target, confirmed)
        threshold = args.threshold if args.threshold is not None else 1.0 if chosen is None else chosen
        topics = np.array([pair.topic for pair in tuning])
        n_left, right_left = judge_left_out(cosine, same, topics, target, confirmed)

        prompt = harness.load_text(args).prompt(tuning[0].query + "\n")  # [1, T]
        answer = partial(generate_kvcache, model, prompt, args.n_tokens, model.seqlen)
        times = {"answer": answer, "encoder": partial(embed, [tuning[0].query])}
        times = alternating_ms(times, args.repeats, args.device)
        columns = {key: (key, "{:.1%}") for key in ("precision", "at least", "recall")}
        columns = {"latency_ms": ("ms", "{:.2f}"), "hits": ("hits", "{}"), "right": ("right", "{}")} | columns
        report = harness.Report(args, "threshold of a semantic cache", model, columns, threshold=threshold)
        report.row("no cache", baseline=True, latency_ms=times["answer"], same_output=True)
        grid = sorted({*np.linspace(0.5, 0.95, 10).round(2).tolist(), threshold})
        curves = {"target": ([0, 1], [target, target])}
        for name, confirm in (("cosine", None), ("cosine, confirmed", same_details)):
            by, by_test = (None, None) if confirm is None else (confirmed, confirmed_test)
            served = judge(cosine_test, same_test, threshold, by_test)
            figures = served | {"latency_ms": times["encoder"]}
            report.row(f"{name}, test half", same_output="approximate", **figures)
            lines = [{"threshold": t} | judge(cosine, same, t, by) for t in grid]
            report.sweep(f"Tuning half, {len(same)} pairs, {name}; threshold {threshold:.4g}", lines)
            n_hits = count_hits(test, look_up, threshold, confirm)
            report.check(f"{name}: a cache hits {n_hits} of the pairs, as counted", n_hits == served["hits"])
            curves[name] = trade_off(cosine, same, by)
        lines = hits_by_kind(test, cosine_test, threshold, confirmed_test)
        report.sweep("Test half by kind: hits on all but paraphrases are wrong", lines)
        shown = (tuning[0].query, "What is the capital of Australia?")
        lines = [
            {"stored": pair.query, "asked": pair.other, "same": pair.same, "cosine": c, "confirmed": ok}
            for pair, c, ok in zip(tuning, cosine.tolist(), confirmed.tolist(), strict=True)
            if pair.query in shown
        ]
        report.sweep("What a cosine tells apart and what it does not", lines)

        best, proven = max(curves["cosine"][1]), served["at least"]
        alone = f"By the cosine alone at most {best:.0%} of the hits on the tuning half are right"
        texts = f"{alone}: enough for the target.", f"{alone}: no threshold reaches {target:.0%}."
        report.why(words.choose(best - target, (0, texts[0]), texts[1]))
        alone = f"Of {served['hits']} confirmed hits on other topics {served['right']} are right"
        texts = f"{alone}: the target is met", f"{alone}: the target of {target:.0%} is missed"
        texts = [f"{text}; {proven:.0%} are proved (Wilson, 95%)." for text in texts]
        report.why(words.choose((served["precision"] or 0) - target, (0, texts[0]), texts[1]))
        alone = f"With each topic judged at the choice of the others, {right_left} of {n_left} hits are right"
        texts = f"{alone}, as the target asks.", f"{alone}: the choice flatters itself."
        report.why(words.choose(right_left - target * max(n_left, 1), (0, texts[0]), texts[1]))
        report.plot_lines(curves, "recall", "precision", "Tuning half of the topics")
        report.finish()
