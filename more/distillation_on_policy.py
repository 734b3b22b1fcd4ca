"""On-policy distillation: the teacher judges what the student itself writes.

A student that is trained on given texts meets other texts as soon as it writes: its own, mistakes included.
On-policy it writes first, and the teacher's distribution at each of its tokens is the label (GKD). What is
compared may be the forward divergence, by which the student covers all that the teacher may say; the reverse
one, by which it says nothing that the teacher would not; or a mean of the two (generalised Jensen-Shannon).

Approximate, as every student is. Wins in what the student writes, as the teacher sees it, for tasks in which
one mistake leads to the next. Loses time, as texts are written token by token before a step; and on given
texts, where forward divergence is what the loss measures. A student must write something to be judged:
all arms begin with the same student, which soft labels have taught for as many steps before.

Run: python more/distillation_on_policy.py

Source: Agarwal et al., On-Policy Distillation of Language Models (GKD), 2024; Gu et al., MiniLLM, 2024, which
takes the reverse divergence of whole texts by policy gradient; here it is that of each token.
"""

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_pruned import with_kv_cache
from inference_training import check_same_shape


def divergence(logits, logits_teacher, kind, beta=0.5):
    """How far the student's distributions q are from the teacher's p, the mean over tokens in nats.

    Args: logits, logits_teacher [..., V], finite; kind: "forward" KL(p || q), "reverse" KL(q || p), "mixed":
        beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, for beta between 0 and 1.
    Returns: a scalar. Raises ValueError for logits of different shapes, another kind, or a beta outside.
    """
    check_same_shape(logits, logits_teacher)
    log_q, log_p = logits.log_softmax(-1), logits_teacher.log_softmax(-1)  # [..., V]

    def kl(log_a, log_b):
        return (log_a.exp() * (log_a - log_b)).sum(dim=-1).mean()

    if kind == "forward":
        return kl(log_p, log_q)
    if kind == "reverse":
        return kl(log_q, log_p)
    if kind != "mixed" or not 0 < beta < 1:
        raise ValueError(
            f"no divergence {kind!r} with beta {beta}: forward, reverse, mixed with 0 < beta < 1"
        )
    shares = log_p.new_tensor([beta, 1 - beta]).log()  # [2]
    log_m = torch.logaddexp(log_p + shares[0], log_q + shares[1])  # [..., V]
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


@torch.no_grad()
def write_on(student, prompts, n_tokens, generator):
    """What a student writes behind prompts [B, T], sampled from its own distribution: [B, T + n_tokens].

    No gradient goes through the choice. Args: generator: on the CPU, so that every device draws alike.
    """
    decoder, cache, new, tokens = with_kv_cache(student).eval(), None, prompts, [prompts]
    for _ in range(n_tokens):
        logits, cache = decoder(new, cache)  # [B, S, V]
        probabilities = logits[:, -1].float().softmax(dim=-1).cpu()  # [B, V]
        new = torch.multinomial(probabilities, 1, generator=generator).to(prompts.device)  # [B, 1]
        tokens.append(new)
    return torch.cat(tokens, dim=1)


class OwnTexts:
    """Texts of a student that is being trained, written anew every few steps.

    Args: student; prompts_of: step -> [B, T] of the plays; n_tokens: to write; every: steps that learn from
        the same texts. A call with a step gives [B, T + n_tokens].
    """

    def __init__(self, student, prompts_of, n_tokens, every, seed):
        self.student, self.prompts_of, self.n_tokens, self.every = student, prompts_of, n_tokens, every
        self.generator, self.texts = torch.Generator().manual_seed(seed), None

    def __call__(self, step):
        if self.texts is None or step % self.every == 0:
            self.texts = write_on(self.student, self.prompts_of(step), self.n_tokens, self.generator)
        return self.texts


if __name__ == "__main__":
    import copy
    from functools import partial

    import inference_distillation as distillation
    import inference_report as harness
    import inference_training as training
    import inference_utils as utils
    import inference_words as words
    from gptlite import get_gptlite_distilled_model_parameters
    from main_distillation import LR, compare_with_teacher, make_students

    options = {"checkpoint_help": "teacher", "plot": False, "dtype": False}
    parser = harness.options(
        __doc__, repeats=None, quick={"steps": 2, "prompt_len": 8}, prompt_len=64, **options
    )
    parser.add_argument(
        "--steps", type=harness.positive_int, default=60, help="steps before, and of each arm"
    )
    parser.add_argument("--every", type=harness.positive_int, default=4, help="steps on the same own texts")
    with harness.script(parser) as args:
        p, dev, T_prompt = get_gptlite_distilled_model_parameters(), args.device, args.prompt_len
        T = 48 if args.quick else p.seqlen
        if T_prompt > T - 1:
            raise ValueError(f"--prompt-len {T_prompt}: {T - 1} at most, so that something is written")
        text, teacher, report, settings = distillation.begin(args, "on-policy distillation", p, LR)
        report.columns["own_text_loss"] = ("own text, by the teacher", "{:.4f}")
        settings["seqlen"] = T
        unseen = text.prompts(args.n_windows, T)  # [N, T]

        given = distillation.batches(text, {"teacher": teacher}, settings, dev)
        loss_on = lambda kind: lambda _, logits, b: divergence(logits, b[2]["teacher"], kind)  # noqa: E731
        before = make_students(["student"], text.vocab_size, p, args.seed, dev)
        training.train_side_by_side(
            before, given, loss_on("forward"), settings, text.valid, 2, n_evaluations=2
        )

        def arm(kind, own):
            student, batch_of, start = copy.deepcopy(before["student"]), given, 0
            if own:
                prompts_of = lambda step: given(step)[0][:, :T_prompt]  # noqa: E731
                texts, start = OwnTexts(student, prompts_of, T - T_prompt, args.every, args.seed), T_prompt

                def batch_of(step):
                    x = texts(step)[:, :-1]  # [B, T - 1]
                    return x, None, distillation.Answers({"teacher": teacher}, x)

            def loss_of(_, logits, batch):  # of the tokens behind the prompt, where the student wrote them
                behind = slice(max(start - 1, 0), None)
                return divergence(logits[:, behind], batch[2]["teacher"][:, behind], kind)

            return {"student": student}, batch_of, loss_of

        def compare(student):
            generator = torch.Generator().manual_seed(args.seed)
            own = write_on(student, unseen[:16, :T_prompt], T - T_prompt, generator)  # [16, T]
            log_p = distillation.Answers({"teacher": teacher}, own[:, :-1])["teacher"].log_softmax(-1)
            chosen = log_p.gather(-1, own[:, 1:, None])[:, T_prompt - 1 :]  # [16, T - T_prompt, 1]
            return compare_with_teacher(student, teacher, unseen) | {"own_text_loss": -chosen.mean().item()}

        places = {"given text": False, "own text": True}
        kinds = [(where, kind) for where in places for kind in ("forward", "mixed", "reverse")]
        arms = {f"{where}, {kind}": partial(arm, kind, places[where]) for where, kind in kinds}
        rows, students = distillation.train_arms(report, text, arms, settings, compare)
        zero = divergence(*[distillation.Answers({"t": teacher}, unseen[:2])["t"]] * 2, "mixed")
        report.check_close("a copy of the teacher has divergence 0", zero, torch.zeros_like(zero), 1e-6)
        base = "given text, forward"
        for name in ("given text, reverse", "own text, forward", "own text, reverse"):
            losses = [report.loss_of(students[one]) for one in (name, base)]
            report.why(words.loss_between(name, base, *utils.loss_difference(*losses)))
        report.why(words.compare(rows["own text, reverse"], rows[base], "own_text_loss"))
        report.finish()
