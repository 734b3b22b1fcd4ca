"""Distillation: a small model learns from the probabilities of a large one instead of from single characters.

A text shows one next character; the teacher's distribution tells how likely each of the 96 was, so the
same tokens carry more information. Three students with the same initial weights and batches compare it:
hard labels (the text), soft labels (the teacher), and both mixed. The teacher's answers do not depend on
the student, so they are computed once, stored in 16 bits, and used by all students in every epoch.

Approximate: a student is a smaller, different model. Exact: storing all log-probabilities is running the
teacher, up to 16-bit rounding; --top-k keeps the k best and the mass of the rest, and loses the rest's order.

Run: python main_distillation.py            (--steps 8000 trains the student that the collection carries)

Source: Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015; Ba and Caruana, Do
Deep Nets Really Need to be Deep?, 2014 (mean squared error of logits).
"""

import torch
import torch.nn.functional as F

from inference_training import distill

LR = 3e-3  # peak learning rate of AdamW: a narrow model wants more than GPTlite's
N_STORED = 24_576  # windows with stored labels at most: 1.5 times the plays, 1.2 GB; epochs reuse them
CURVE_WINDOWS = 64  # windows of an evaluation during training; the end is evaluated like every method


def distillation_loss(logits_student, logits_teacher, temperature):
    """KL divergence from the teacher's to the student's softened distribution, times temperature squared.

    Args: logits_student, logits_teacher [..., V]; temperature > 0: both are divided by it first, so that
        above 1 the improbable tokens count for more. The square keeps the size of the gradient.
    Returns: the mean per token in nats, a scalar; 0 exactly where both are equal.
    """
    V = logits_student.shape[-1]
    log_q = F.log_softmax(logits_student.reshape(-1, V) / temperature, dim=-1)  # [N, V]
    log_p = F.log_softmax(logits_teacher.reshape(-1, V) / temperature, dim=-1)  # [N, V]
    # batchmean divides by the first dimension alone: flattened, so that this is the number of tokens
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean") * temperature**2


def logit_mse(logits_student, logits_teacher):
    """Mean squared error of logits [..., V] after taking each token's mean away, which softmax ignores."""
    difference = logits_student - logits_teacher  # [..., V]
    return (difference - difference.mean(dim=-1, keepdim=True)).square().mean()


@torch.no_grad()
def compare_with_teacher(student, windows, targets, batch_size=16):
    """How far a student is from the teacher, at every position of some texts.

    Args: student: token ids [B, T] -> logits [B, T, V], or a tuple that begins with them; windows: token
        ids [N, T]; targets: the teacher's logits for them [N, T, V].
    Returns: the KL divergence from teacher to student in nats per token, and the share of positions where
        both find the same token best.
    """
    kl, same = 0.0, 0
    for x, target in zip(windows.split(batch_size), targets.split(batch_size), strict=True):
        logits = student(x)  # [B, T, V]
        logits = (logits[0] if isinstance(logits, tuple) else logits).float()
        kl += distillation_loss(logits, target, 1.0).item() * len(x)
        same += (logits.argmax(-1) == target.argmax(-1)).sum().item()
    return kl / len(windows), same / windows.numel()


if __name__ == "__main__":
    import copy
    import hashlib
    import json
    import statistics
    import sys
    import tempfile
    from pathlib import Path

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import check_length, get_shakespeare_data
    from distillation_run import make_students, train_students
    from gptlite import GPTlite, get_gptlite_distilled_model_parameters, get_gptlite_model_parameters
    from gptlite_kvcache import GPTlite_KVCache
    from inference_training import command_line, digest, load_state, write_card, write_weights
    from main_distillation_store import store_soft_labels
    from main_kvcache import generate_kvcache
    from main_training import DROPOUT, MultiHeadAttention_Training

    parser = rep.options(__doc__, repeats=3, checkpoint_help="weights of the teacher")
    parser.add_argument("--steps", type=rep.positive_int, default=400, help="training steps of each student")
    parser.add_argument("--temperature", type=float, default=1.0, help="softens both distributions")
    parser.add_argument("--alpha", type=float, default=0.5, help="weight of the text in the mix; 0: no mix")
    parser.add_argument("--loss", choices=["kl", "mse"], default="kl", help="loss on the soft labels")
    parser.add_argument("--top-k", type=rep.positive_int, help="store the k best tokens (default: all)")
    default = utils.ROOT / "checkpoints" / "gptlite_distilled_trained.pth"
    parser.add_argument("--output", type=Path, metavar="FILE", default=default, help="student to write")
    parser.add_argument("--resume", action="store_true", help="go on from the last saved state")
    with rep.script(parser) as args:
        p, dev, n_valid, n_tokens = get_gptlite_distilled_model_parameters(), args.device, 128, 128
        if args.quick:  # a few steps that leave nothing behind
            if args.resume:
                raise ValueError("--quick keeps nothing, so there is nothing to --resume")
            folder = tempfile.TemporaryDirectory()
            p, n_valid, n_tokens = p._replace(batch_size=4, seqlen=64), 8, 8
            args.steps, args.output = 12, Path(folder.name) / "quick.pth"
        B, T, state_path = p.batch_size, p.seqlen, args.output.with_suffix(".state")
        V, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        if not 0 < args.temperature < float("inf") or not 0 <= args.alpha <= 1:
            raise ValueError("--temperature must be above 0, --alpha from 0 to 1")
        if args.top_k and args.loss == "mse" and args.top_k < V:
            raise ValueError("--loss mse compares all logits, and --top-k stores only some of them")
        rep.check_writable(args.output, (".pth",))
        if args.output.resolve() == args.checkpoint.resolve():
            raise ValueError(f"--output {args.output} is the teacher's own file")
        check_length(valid_data, T + 1)  # now, and not after the training
        shipped, shipped_weights = utils.GPTLITE_DISTILLED_CKPT_PATH, None
        if shipped.is_file() and shipped.resolve() != args.output.resolve():
            shipped_weights = utils.load_checkpoint(shipped)
            utils.load_weights(utils.make_model(GPTlite, V, distilled=True), shipped_weights, str(shipped))
        n_windows = min(args.steps * B, N_STORED)
        windows = utils.sample_prompts(train_data, n_windows, T + 1)  # [N, T+1]
        teacher = utils.load_model(GPTlite, V, args.checkpoint).to(dev)
        untouched = copy.deepcopy(teacher.state_dict())
        for block in teacher.blocks:
            block.mha.__class__ = MultiHeadAttention_Training  # the same attention, tiled
        weight_of_text = {"hard labels": 1.0, "soft labels": 0.0}
        if args.alpha:
            weight_of_text["mixed"] = args.alpha
        students = make_students(weight_of_text, V, p, args.seed, dev)
        settings = {"steps": args.steps, "temperature": args.temperature, "alpha": args.alpha}
        settings |= {"loss": args.loss, "top_k": args.top_k, "n_windows": n_windows, "seed": args.seed}
        settings |= {"text": digest(train_data)} | p._asdict() | {"lr": LR, "dropout_p": DROPOUT}
        settings["teacher_sha256"] = hashlib.sha256(args.checkpoint.read_bytes()).hexdigest()
        state = stored = None  # the store follows from the teacher and the text: not part of the state
        if args.resume:
            types = {"students": dict, "optimizers": dict, "times": list, "curves": dict, "losses": dict}
            state = load_state(state_path, settings, **types)
        if state is None or state["step"] < args.steps:
            with utils.Timer(dev) as timer:
                stored = store_soft_labels(teacher, windows[:, :-1], args.temperature, args.top_k)
            if not sys.stderr.isatty():
                speed = n_windows * T / timer.seconds
                print(f"soft labels of {n_windows} windows: {speed:.0f} tokens/s", flush=True)
        interval, n_curve = (4, 4) if args.quick else (min(200, max(args.steps // 8, 1)), CURVE_WINDOWS)
        evaluate = lambda student: utils.validation_loss(student, valid_data, n_curve, T)  # noqa: E731
        how = (settings, evaluate, interval, state_path, state)
        state, stopped = train_students(students, weight_of_text, windows, stored, *how)
        step, times, curves = state["step"], state["times"], state["curves"]
        if stopped:
            print(f"\nstopped at step {step}; '{command_line()} --resume' goes on")
            sys.exit(130)

        # What was trained, as others will load it: in 16 bits, then with a KV cache
        states = {"teacher": utils.load_checkpoint(args.checkpoint)}
        for name, student in students.items():
            states[name] = {key: tensor.cpu().half() for key, tensor in student.state_dict().items()}
        if shipped_weights is not None:
            states["shipped student"] = shipped_weights
        columns = {"weights_mb": ("MB", "{:.1f}"), "kl_to_teacher": ("KL to teacher", "{:.4f}")}
        columns |= {"same_best_token": ("same best", "{:.1%}"), "train_loss": ("train loss", "{:.4f}")}
        sizes = {"batch_size": 1, "prompt_len": 32, "n_tokens": n_tokens, "steps": args.steps}
        report = rep.Report(args, "distillation", teacher, columns, **sizes)
        prompt = utils.sample_prompts(valid_data, 1, 32).to(dev)  # [1, 32]
        methods, row_of = [], {}
        for name, weights in states.items():
            size = {"seqlen": T} if name in students else {}
            model = utils.make_model(GPTlite_KVCache, V, name != "teacher", **size)
            utils.load_weights(model, weights, name).to(dev, args.dtype)
            run = lambda model=model: generate_kvcache(model, prompt, n_tokens, T)  # noqa: E731
            methods.append(utils.Method(name, run, [model]))
        measured = utils.measure(methods, n_tokens, args.repeats)
        valid_windows = utils.sample_prompts(valid_data, n_valid, T + 1)[:, :-1].to(dev)  # [N, T]
        with torch.no_grad():
            targets = torch.cat([teacher(x) for x in valid_windows.split(16)])  # [N, T, V]
        for name, run, (model,), _ in methods:
            kl, same = compare_with_teacher(model, valid_windows, targets)
            loss = utils.validation_loss(model, valid_data, n_valid, T)
            row_of[name] = {"valid_loss": loss, "kl_to_teacher": kl, "same_best_token": same}
            row_of[name]["train_loss"] = utils.validation_loss(model, train_data, n_valid, T)
            figures = {"n_parameters": utils.n_parameters(model), "weights_mb": utils.model_size_mb(model)}
            figures |= {"peak_memory_mb": utils.peak_memory_mb(run, model, inputs=[prompt])} | row_of[name]
            report.row(name, measured[name], baseline=name == "teacher", **figures)
        hard, soft, large = (row_of[name] for name in ("hard labels", "soft labels", "teacher"))
        compared = {
            name: {key: round(figure, 4) for key, figure in row_of[name].items()}
            for name in ("teacher", *students)
        }
        one_ms = 1000 * statistics.median(times) / len(students)  # a step of one student
        facts = {"tokens_seen": step * B * T, "settings": settings, "compared": compared}
        facts |= {"training_minutes": round(step * one_ms / 60_000, 1), "device": rep.device_name(dev)}
        n_large, n_small = utils.n_parameters(teacher), utils.n_parameters(students["soft labels"])
        parameters = p._asdict() | {"vocab_size": V, "n_parameters": n_small, "lr": LR, "dropout_p": DROPOUT}
        write_weights(args.output, students["soft labels"])  # together: the card holds the weights' hash
        write_card(args.output, parameters, soft["valid_loss"], args.data, facts, n_curve, curves)

        x = windows[:B, :-1].to(dev)  # [B, T]
        with torch.no_grad():
            target = teacher(x)  # [B, T, V]
            off = distillation_loss(copy.deepcopy(teacher)(x), target, 2.0).item()
        report.check(f"a copy of the teacher starts with loss 0 ({off:.0e})", off < 1e-6)
        with utils.Timer(dev) as alone:
            values, _ = store_soft_labels(teacher, x, 1.0)  # [B, T, V]
        off = distillation_loss(values.to(dev).float(), target, 1.0).item()
        report.check(f"stored labels are the teacher's on the same inputs (KL {off:.0e})", off < 1e-3)
        with utils.Timer(dev) as along:
            distill(copy.deepcopy(students["soft labels"]), teacher, train_data, 3, LR, B, T)
        same = all(torch.equal(tensor, untouched[n]) for n, tensor in teacher.state_dict().items())
        report.check("the teacher is what it was, bit for bit", same and not teacher.training)

        gain = hard["valid_loss"] - soft["valid_loss"]
        report.why(
            f"After {step} steps of {B} x {T} tokens the validation loss on soft labels is "
            f"{gain:.4f} nats below that on the text alone (KL to the teacher "
            f"{soft['kl_to_teacher']:.4f} against {hard['kl_to_teacher']:.4f}). The teacher's own "
            f"is {large['valid_loss']:.4f}."
        )
        gaps = {name: row_of[name]["valid_loss"] - row_of[name]["train_loss"] for name in states}
        report.why(
            "From the training text to unseen plays the loss rises by "
            f"{', '.join(f'{gap:.3f} ({name})' for name, gap in gaps.items())} nats: what a model knows by "
            "heart is no use there. A student too small for that can beat its teacher on unseen text."
        )
        entropy = torch.distributions.Categorical(logits=target).entropy().mean()
        report.why(
            f"The text shows one draw from what the teacher takes for {entropy:.2f} nats, as of "
            f"{entropy.exp():.1f} equally likely characters. Soft labels are that whole distribution: less "
            "noise in the gradient, but no help where the student is too small."
        )
        parts = []
        for name, size in (("teacher", get_gptlite_model_parameters()), ("soft labels", p)):
            cost, ms = rep.forward_cost(size, V, 1, 1, 32 + n_tokens // 2, args.dtype), measured[name].tpot_ms
            least = rep.lower_bound_ms(cost, rep.measure_ceilings(dev, args.dtype, int(cost.n_bytes)))
            share = rep.share_of(least, ms)
            parts.append(f"{cost.n_bytes / 1e6:.1f} MB in {ms:.2f} ms ({share} of the ceiling)")
        faster = measured["teacher"].tpot_ms / measured["soft labels"].tpot_ms
        report.why(
            f"A decode step reads weights and cache: the teacher {parts[0]}, a student {parts[1]}. "
            f"{n_large / n_small:.1f} times fewer weights, {faster:.1f} times faster: half the blocks are "
            "half as many operations; narrow ones take less, down to the time that starting one takes."
        )
        n_bytes = 2 * V if args.top_k in (None, V) else 3 * args.top_k + 2
        report.why(
            f"For a batch the teacher takes {alone.ms:.0f} ms, a student's step {one_ms:.0f} ms, one with "
            f"the teacher running along (distill) {along.ms / 3:.0f} ms. Stored instead: {n_bytes} bytes a "
            f"token, {n_bytes * n_windows * T / 1e6:.0f} MB, each read {step * B / n_windows:.1f} "
            f"times by {sum(alpha < 1 for alpha in weight_of_text.values())} of the students."
        )
        if "shipped student" in states and shipped.with_suffix(".json").is_file():
            known = json.loads(shipped.with_suffix(".json").read_text())
            loss = {name: row["valid_loss"] for name, row in known.get("compared", {}).items()}
            if loss:  # not where main_training.py has trained it
                report.why(
                    f"The shipped student saw {known['tokens_seen'] / 1e6:.0f} million tokens: validation "
                    f"loss {loss['soft labels']} on soft labels, {loss['hard labels']} on the text alone."
                )
        report.why(
            "A quick run keeps nothing."
            if args.quick
            else f"Written: the student of the soft labels, {args.output.name}, and {args.output.stem}.json; "
            f"{args.output.stem}.state, from which --resume goes on, may be deleted."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for name, curve in curves.items():
                axes.plot([point[0] for point in curve], [point[2] for point in curve], label=name)
            axes.axhline(evaluate(teacher), color="black", linestyle=":", label="teacher")
            axes.set(xlabel="training step", ylabel=f"validation loss on {n_curve} windows (nats)")
            axes.set_title(f"A student of {n_small / 1e6:.1f} M parameters, {step} steps")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
