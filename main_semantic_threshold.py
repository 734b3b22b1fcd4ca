"""Choosing the threshold of a semantic cache: on labelled pairs, and judged on topics it was not chosen on.

A threshold trades hits against wrong hits, and the right one is a property of the encoder and the questions:
it is measured. Precision (the right ones of the hits) and recall (the hits of what could be one) are counted
over the threshold on one half of the topics, and the smallest that reaches the target precision is taken.
Chosen on few pairs it flatters itself, so the other half judges it, with Wilson's bound.

Run: python main_semantic_threshold.py            (--target 0.99: share of the hits that must be right)

Source: Wilson, Probable inference, 1927; Reimers and Gurevych, Sentence-BERT, 2019; Bang, GPTCache, 2023.
"""

import math

import numpy as np

from main_semantic_cache import ROUNDING


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
    import torch

    import inference_report as rep
    import inference_utils as utils
    from data.query_pairs import load_pairs
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import GPTlite_KVCache
    from main_kvcache import generate_kvcache
    from main_semantic_cache import SemanticCache, sentence_transformer_embedder, unit_vectors
    from main_semantic_confirmation import same_details

    parser = rep.options(__doc__, data=False)
    parser.add_argument("--threshold", type=float, help="least cosine of a hit (default: from the pairs)")
    parser.add_argument("--target", type=float, default=0.95, help="share of the hits that must be right")
    parser.add_argument("--n-tokens", type=rep.positive_int, default=64, help="tokens of an answer")
    with rep.script(parser) as args:
        p, dev, n_tokens = get_gptlite_model_parameters(), args.device, 8 if args.quick else args.n_tokens
        if not 0 < args.target <= 1:
            raise ValueError(f"--target {args.target} is no share of the hits: above 0, at most 1")
        SemanticCache(None, args.threshold or 0.0)  # refuses what is no cosine before anything is loaded
        vocab_size, _, _, encode, _ = get_shakespeare_data()
        model = utils.load_model(GPTlite_KVCache, vocab_size, args.checkpoint).to(dev, args.dtype)
        embed = sentence_transformer_embedder(device=dev)

        # Chosen on one half of the topics, judged on the other
        tuning, test = load_pairs()
        scores, vectors = [], {}
        for pairs in (tuning, test):
            a, b = (unit_vectors(embed([pair[column] for pair in pairs])) for column in (3, 4))  # [n, d]
            vectors |= {pair[3 + i]: v[j] for i, v in enumerate((a, b)) for j, pair in enumerate(pairs)}
            confirmed = np.array([same_details(pair.query, pair.other) for pair in pairs])
            scores.append(((a * b).sum(axis=1), np.array([pair.same for pair in pairs]), confirmed))
        (cosine, same, confirmed), (cosine_test, same_test, confirmed_test) = scores
        alone = choose_threshold(cosine, same, args.target)
        chosen = choose_threshold(cosine, same, args.target, confirmed)
        threshold = args.threshold if args.threshold is not None else 1.0 if chosen is None else chosen
        topics = np.array([pair.topic for pair in tuning])
        n_left, right_left = judge_left_out(cosine, same, topics, args.target, confirmed)

        question = tuning[0].query
        prompt, T = torch.tensor([encode(question + "\n")], device=dev), len(question) + 1  # [1, T]
        answer_ms = utils.median_ms(
            lambda: generate_kvcache(model, prompt, n_tokens, p.seqlen), args.repeats, dev
        )
        hit_ms = utils.median_ms(lambda: embed(question), args.repeats, dev)
        forms = {"hits": "{}", "right": "{}", "precision": "{:.1%}", "at least": "{:.1%}", "recall": "{:.1%}"}
        columns = {"latency_ms": ("ms", "{:.2f}")} | {key: (key, form) for key, form in forms.items()}
        sizes = {"batch_size": 1, "prompt_len": T, "n_tokens": n_tokens, "threshold": threshold}
        report = rep.Report(args, "threshold of a semantic cache", model, columns, **sizes)
        report.row("no cache", baseline=True, latency_ms=answer_ms, same_output=True)
        kinds = {"cosine": (None, None), "cosine, confirmed": (confirmed, confirmed_test)}
        served = {name: judge(cosine_test, same_test, threshold, by) for name, (_, by) in kinds.items()}
        grid = sorted({*np.linspace(0.5, 0.95, 10).round(2).tolist(), threshold})
        for name, (by, _) in kinds.items():
            report.row(f"{name}, test half", latency_ms=hit_ms, same_output="approximate", **served[name])
            lines = [{"threshold": t} | judge(cosine, same, t, by) for t in grid]
            report.sweep(f"Tuning half, {len(same)} pairs, {name}; threshold {threshold:.4g}", lines)
        lines = hits_by_kind(test, cosine_test, threshold, confirmed_test)
        report.sweep("Test half by kind: hits on all but paraphrases are wrong", lines)
        lines = [
            {"stored": pair.query, "asked": pair.other, "same": pair.same, "cosine": c, "confirmed": bool(ok)}
            for pair, c, ok in zip(tuning, cosine.tolist(), confirmed, strict=True)
            if pair.query in (tuning[0].query, "What is the capital of Australia?")
        ]
        report.sweep("What a cosine tells apart and what it does not", lines)
        for (name, figures), confirm in zip(served.items(), (None, same_details), strict=True):
            n_hits = 0
            for pair in test:
                cache = SemanticCache(vectors.get, threshold, confirm)
                cache(pair.query, str)
                n_hits += cache(pair.other, str)[2]
            report.check(f"{name}: a cache hits {n_hits} of the pairs, as counted", n_hits == figures["hits"])

        limits = rep.measure_ceilings(dev, args.dtype)
        steps = [(T, 0), *((1, n_past) for n_past in range(T, T + n_tokens - 1))]
        costs = [rep.forward_cost(p, vocab_size, 1, *step, args.dtype) for step in steps]
        least = sum(rep.lower_bound_ms(cost, limits) for cost in costs)
        found = "no threshold reaches" if alone is None else f"a threshold of {alone:.3f} reaches"
        report.why(
            f"By the cosine alone {found} {args.target:.0%} right hits on the tuning half: a negation or a "
            "swap moves the vector less than a paraphrase does, so a higher threshold loses those first."
        )
        right, n_hits, proven = (served["cosine, confirmed"][key] for key in ("right", "hits", "at least"))
        missed = n_hits == 0 or right / n_hits < args.target
        report.why(
            f"On other topics {right} of {n_hits} confirmed hits are right at {threshold:.3f}: the target is "
            f"{'missed' if missed else 'met'}, and proved are {proven:.0%} (Wilson, 95%); {args.target:.0%} "
            f"takes {1.96**2 * args.target / (1 - args.target + 1e-9):.0f} hits, all right. Half of these "
            "pairs are traps, on purpose: real traffic has fewer."
        )
        report.why(
            "The choice flatters itself: it fits the pairs that made it. With each topic of the tuning half "
            f"judged at the threshold that the others choose, {right_left} of {n_left} hits are right, which "
            "the tuning half tells alone. So label pairs of your own traffic, and more of them."
        )
        report.why(
            f"A hit takes {hit_ms:.1f} ms, one pass of the encoder; GPTlite, which stands in for a model "
            f"that can answer, {answer_ms:.0f} ms for {n_tokens} tokens (at least {least:.0f} ms here, share "
            f"reached {rep.share_of(least, answer_ms)}): the threshold decides how often that is saved, and "
            f"how often wrongly. Below {hit_ms / answer_ms:.1%} hits nothing is saved at all."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for name, (by, _) in kinds.items():
                curve = [judge(cosine, same, t, by) for t in sorted(cosine.tolist())]
                curve = [(point["recall"], point["precision"]) for point in curve if point["hits"]]
                axes.plot(*zip(*curve, strict=True), label=name)
            point = judge(cosine, same, threshold, confirmed)
            axes.plot(point["recall"], point["precision"] or 0.0, "o", label=f"threshold {threshold:.3f}")
            axes.axhline(args.target, linestyle=":", color="grey", label="target")
            axes.set(xlabel="recall", ylabel="precision", ylim=(0, 1.05), title="Tuning half of the topics")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
