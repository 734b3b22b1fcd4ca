"""What the scripts share about models and measuring: loading, timing, memory, evaluation.

Nothing here belongs to a technique. Times are taken by a hook in front of the model's forward, so the
code of a technique holds no clock; memory is counted at the allocator, in a run of its own.
The options, the report and the cost model are in inference_report.py, training in inference_training.py.
"""

import contextlib
import gc
import io
import math
import os
import pickle
import shlex
import statistics
import time
import weakref
from collections import namedtuple
from pathlib import Path

# the profiler that counts memory stays silent, also about tensors from before, which are watched apart
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Linux, CPU: tensors in pages of 2 MB. A decode step reads every weight once, a page of 4 kB at a time
# it waits for address translation instead (measured here: 4.1 ms a compiled step against 3.0).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from data.shakespeare import check_length, get_batch  # noqa: E402, F401
from gptlite import (  # noqa: E402
    get_gptlite_distilled_model_parameters,
    get_gptlite_model_parameters,
)


def __getattr__(name):
    """`from inference_utils import train_steps`, as the post does; training has a file of its own."""
    if name == "train_steps":
        from inference_training import train_steps  # here: that file imports this one

        return train_steps
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


ROOT = Path(__file__).resolve().parent
GPTLITE_CKPT_PATH = ROOT / "checkpoints" / "gptlite.pth"
GPTLITE_DISTILLED_CKPT_PATH = ROOT / "checkpoints" / "gptlite_distilled.pth"
PREFIXES = ("_orig_mod.", "module.")  # what torch.compile and data parallelism put before every name


def pick_device(name="auto"):
    """Returns the torch.device for auto, cpu, cuda or mps. Raises ValueError where there is none."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, present in available.items() if present)
    if not available[name]:
        raise ValueError(f"--device {name}: this machine has none; use --device auto or cpu")
    return torch.device(name)


device = pick_device()


# ---- Checkpoints ----


def write_atomically(path, write):
    """Calls write(temporary path), then renames the result to path, which is whole or untouched.

    Raises: OSError where the folder cannot be written or the disk is full; nothing is left behind.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except RuntimeError as error:  # torch.save reports a full disk as a RuntimeError
        raise OSError(f"cannot write {path}: {str(error).splitlines()[0]}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def load_file(path):
    """torch.load of tensors and plain values only. Raises ValueError for anything else, or a damaged file."""
    content = io.BytesIO(Path(path).read_bytes())  # torch's errors of a short file look like the disk's
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is no plain state dictionary: refused, code in it is not run") from error
    except Exception as error:  # a damaged pickle can end in any error
        raise ValueError(f"{path} is truncated or no checkpoint: copy or train it again") from error


def load_checkpoint(path=GPTLITE_CKPT_PATH):
    """Reads a state dictionary: names to float32 tensors, without the prefixes of wrapped models.

    Raises: FileNotFoundError (with the command that makes the file) and ValueError for a file that is
    truncated, or holds anything but dense tensors of finite numbers, each name once; code in a pickle is
    never run.
    """
    path = Path(path)
    if not path.is_file():
        size = ["--size", "distilled"] if path.name == GPTLITE_DISTILLED_CKPT_PATH.name else []
        output = path if path.suffix.lower() == ".pth" else f"{path}.pth"  # it writes no other names
        command = shlex.join(["python", "main_training.py", *size, "--checkpoint", str(output)])
        raise FileNotFoundError(f"no checkpoint {path}: '{command}' makes one")
    state = load_file(path)
    if not isinstance(state, dict) or not state:
        raise ValueError(f"{path} holds no state dictionary")
    tensors = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{path} holds more than tensors ({name}): save model.state_dict() alone")
        while name.startswith(PREFIXES):
            name = name.removeprefix(PREFIXES[0]).removeprefix(PREFIXES[1])
        if name in tensors:
            raise ValueError(f"{path} holds {name} twice, with and without a prefix")
        if tensor.layout != torch.strided or tensor.is_meta or not tensor.is_floating_point():
            kind = "without values" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
            raise ValueError(f"{path}: {name} is {kind}; weights are dense floating-point tensors")
        tensors[name] = tensor.float()
        if not tensors[name].isfinite().all():
            raise ValueError(f"{path}: {name} holds NaN or infinity: training went wrong, train it again")
    return tensors


def load_weights(model, state, source="the checkpoint"):
    """model.load_state_dict(state), strict. Raises ValueError that names the first thing that differs."""
    expected = model.state_dict()
    missing = [name for name in expected if name not in state]
    unknown = [name for name in state if name not in expected]
    if missing or unknown:
        problem = f"lacks {missing[0]}" if missing else f"has {unknown[0]} besides"
        raise ValueError(f"{source} does not fit {type(model).__name__}: it {problem}")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            found, wanted = list(tensor.shape), list(expected[name].shape)
            raise ValueError(
                f"{source} does not fit {type(model).__name__}: {name} is {found}, must be {wanted}"
            )
    model.load_state_dict(state)
    return model


def make_model(model_class, vocab_size, distilled=False, **kwargs):
    """A model of GPTlite's size (or the distilled one's) with random weights, in evaluation mode.

    kwargs go to the constructor; those it shares with GPTlite replace the standard values.
    """
    p = get_gptlite_distilled_model_parameters() if distilled else get_gptlite_model_parameters()
    names = ("d_model", "n_heads", "d_head", "n_layers", "dropout_p", "seqlen")
    parameters = {name: getattr(p, name) for name in names} | kwargs
    return model_class(vocab_size, **parameters).eval()


def is_distilled(state):
    """Whether a state dictionary is of the distilled size: as wide as that, else the full one is meant."""
    width = get_gptlite_distilled_model_parameters().d_model
    return list(state.get("token_embedding.weight", torch.empty(0, 0)).shape)[-1:] == [width]


def model_from(state, model_class, vocab_size, source="the checkpoint", **kwargs):
    """A model with these weights, of the size that they are of, in evaluation mode on the CPU.

    Raises ValueError for weights that do not fit it.
    """
    return load_weights(make_model(model_class, vocab_size, is_distilled(state), **kwargs), state, source)


def parameters_of(model):
    """The parameters of GPTlite's form that a model was made with, as a namedtuple (see gptlite.py)."""
    distilled = model.token_embedding.weight.shape[1] == get_gptlite_distilled_model_parameters().d_model
    return get_gptlite_distilled_model_parameters() if distilled else get_gptlite_model_parameters()


def load_model(model_class, vocab_size, ckpt_path=GPTLITE_CKPT_PATH, distilled=False, **kwargs):
    """A trained model on `device`, in evaluation mode.

    Args: model_class: GPTlite or a variant with the same weights; distilled: the small size, by default
        from its own checkpoint; kwargs: further arguments of the constructor.
    Raises: FileNotFoundError, ValueError as load_checkpoint and load_weights do.
    """
    if distilled and ckpt_path == GPTLITE_CKPT_PATH:
        ckpt_path = GPTLITE_DISTILLED_CKPT_PATH
    model = make_model(model_class, vocab_size, distilled, **kwargs)
    return load_weights(model, load_checkpoint(ckpt_path), str(ckpt_path)).to(device)


def model_size_mb(model):
    """Bytes of the parameters and buffers, each storage once, in MB of 10^6 bytes."""
    return weight_bytes(model) / 1e6


def weight_bytes(*models):
    """Bytes of the parameters and buffers of all the models, a shared storage counted once."""
    storages = {}
    for model in models:
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_mkldnn:  # packed: its storage is oneDNN's own
                storages[id(tensor)] = tensor.numel() * tensor.element_size()
            else:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def n_parameters(model):
    return sum(p.numel() for p in model.parameters())


# ---- Time ----


def synchronize(device):
    """Waits until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Timer:
    """with Timer() as timer: ...; then timer.ms and timer.seconds. Waits for the device at both ends."""

    def __init__(self, device=device):
        self.device = device

    def __enter__(self):
        synchronize(self.device)
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_):
        synchronize(self.device)
        self.seconds = time.perf_counter() - self.start
        self.ms = 1000 * self.seconds


class StepClock:
    """Takes the time of every forward call of a model from outside, and counts the tokens it read.

    with StepClock(model) as clock: generate(...); then clock.steps_ms[i] is the time from the start of
    forward i to the start of the next (the end of the run for the last), so choosing the token is part
    of it; steps_ms[0] starts at the call. CUDA events on CUDA, so that the run is not slowed by waiting.
    """

    def __init__(self, *models):
        self.models = models
        self.device = next(models[0].parameters()).device

    def _mark(self):
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    def _before_forward(self, _module, args, kwargs):
        self._marks.append(self._mark())
        tokens = args[0] if args else kwargs["input_ids"]  # the name that transformers uses
        self.forward_tokens += tokens.numel()

    def __enter__(self):
        self._marks, self.forward_tokens = [], 0
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True) for model in self.models
        ]
        synchronize(self.device)
        self._start = self._mark()
        return self

    def __exit__(self, *_):
        end = self._mark()
        synchronize(self.device)
        for hook in self._hooks:
            hook.remove()
        marks = [self._start, *self._marks[1:], end]
        if self.device.type == "cuda":
            self.steps_ms = [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]
        else:
            self.steps_ms = [1000 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]
        self.total_ms = sum(self.steps_ms)
        self.n_steps = len(self._marks)


def percentile(values, percent):
    """Nearest rank, so it is always one of the values. Raises ValueError for no values."""
    if not values:
        raise ValueError("a percentile of nothing")
    ordered = sorted(values)
    return ordered[max(math.ceil(percent * len(ordered) / 100), 1) - 1]


# run(): what is timed; models: those whose forward calls are the steps; buffers: tensors that run() uses
# and that are there before it, which belong to its peak memory
TimedMethod = namedtuple("TimedMethod", "name run models buffers", defaults=[()])
# what measure() returns for a method
Measurement = namedtuple(
    "Measurement",
    "output ttft_ms tpot_ms tpot_p99_ms tokens_per_s ttft_ms_spread tpot_ms_spread tokens_per_s_spread "
    "forward_tokens n_steps steps_ms runs_ms",
    defaults=[None],
)


def measure(methods, n_generated, repeats=5, n_prefill_steps=1):
    """Times methods in alternation, after one warm-up each.

    Args: methods: list of TimedMethod; n_generated: tokens a user receives from one run, all sequences;
        repeats: timed runs of each; n_prefill_steps: forwards up to and with the first token.
    Returns: {name: Measurement}: medians over the repeats (the 99th percentile over all steps of all runs),
        the output of the last run, spreads as (lowest, highest) of the runs, steps_ms, the median over the
        repeats for each step, and runs_ms, the steps of each run.
    """
    clocks = {method.name: [] for method in methods}
    if len(clocks) < len(methods):
        raise ValueError(f"two methods have one name: {[method.name for method in methods]}")
    outputs = {}
    for repeat in range(repeats + 1):
        for method in methods:
            with StepClock(*method.models) as clock:
                outputs[method.name] = method.run()
            if repeat > 0:
                clocks[method.name].append(clock)
    results = {}
    for name, runs in clocks.items():
        first = [sum(run.steps_ms[:n_prefill_steps]) for run in runs]
        later = [ms for run in runs for ms in run.steps_ms[n_prefill_steps:]]
        speeds = [1000 * n_generated / run.total_ms for run in runs]
        medians = [statistics.median(run.steps_ms[n_prefill_steps:] or [0]) for run in runs]
        results[name] = Measurement(
            output=outputs[name],
            ttft_ms=statistics.median(first),
            tpot_ms=statistics.median(later) if later else None,
            tpot_p99_ms=percentile(later, 99) if later else None,
            tokens_per_s=statistics.median(speeds),
            ttft_ms_spread=(min(first), max(first)),
            tpot_ms_spread=(min(medians), max(medians)) if later else None,
            tokens_per_s_spread=(min(speeds), max(speeds)),
            forward_tokens=runs[-1].forward_tokens,
            n_steps=runs[-1].n_steps,
            steps_ms=[statistics.median(step) for step in zip(*(run.steps_ms for run in runs), strict=True)],
            runs_ms=[run.steps_ms for run in runs],
        )
    return results


def calls_per_ms(function, device=device, least_ms=2.0):
    """How many calls of function() take least_ms: loops shorter than that measure the clock, or a launch."""
    function()
    n_calls = 1
    while True:
        with Timer(device) as timer:
            for _ in range(n_calls):
                function()
        if timer.ms >= least_ms or n_calls >= 1024:
            return n_calls
        n_calls = min(1024, max(2 * n_calls, int(n_calls * least_ms / max(timer.ms, 1e-3))))


def alternating_ms(functions, repeats=5, device=device):
    """Median time in ms of a call of each of {name: function}: loops of calls, in alternation, after warm-up.

    A loop is as long as 2 ms (10 on a GPU, whose calls only start the work), so that what is measured is
    long against the clock and against a launch.
    """
    least_ms = 2.0 if device.type == "cpu" else 10.0
    loops = {name: calls_per_ms(function, device, least_ms) for name, function in functions.items()}
    times = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            with Timer(device) as timer:
                for _ in range(loops[name]):
                    function()
            times[name].append(timer.ms / loops[name])
    return {name: statistics.median(ms) for name, ms in times.items()}


def median_ms(function, repeats=5, device=device):
    """Median time of function() in ms after a warm-up."""
    return alternating_ms({"": function}, repeats, device)[""]


# ---- Memory ----


FREED = "freed bytes: "  # name of a profiler's event


def _record_freed(n_bytes):
    with torch.profiler.record_function(f"{FREED}{n_bytes}"):
        pass


def _subclasses(kind):
    return {one for child in kind.__subclasses__() for one in (child, *_subclasses(child))}


@contextlib.contextmanager
def watch_live_storages():
    """Inside, the end of every storage on the CPU that is there now becomes an event of the profiler.

    The allocator reports only what was allocated under the profiler. A storage's Python object lives as long
    as its memory, so a finaliser of that object tells. The garbage collector waits: what it frees, and when,
    is an accident.
    """
    storages, collects = {}, gc.isenabled()
    gc.disable()
    kinds = {torch.Tensor, *_subclasses(torch.Tensor)}  # millions of objects are looked at
    for thing in gc.get_objects():
        if type(thing) in kinds and thing.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # packed weights and fake tensors have no storage
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage
    watches = [weakref.finalize(one, _record_freed, one.nbytes()) for one in storages.values()]
    storages.clear()
    thing = storage = None
    try:
        yield
    finally:
        for watch in watches:
            watch.detach()
        if collects:
            gc.enable()


def peak_memory_mb(run, *models, inputs=()):
    """Largest number of bytes held by tensors while run() runs, in MB of 10^6 bytes.

    Counted from a reset: what run() allocates on top of what was there, plus the weights of `models`
    and the tensors in `inputs`; so what ran before, or other models that are loaded, do not count, and
    what run() frees of it makes room. On CUDA the allocator's own peak; on the CPU the allocator's events
    in their order, and those of tensors from before, which it does not report, by watching their storages.
    """
    tensors = [*(p for model in models for p in model.parameters()), *inputs]
    device = tensors[0].device if tensors else torch.device("cpu")
    held = weight_bytes(*models) + sum(t.numel() * t.element_size() for t in inputs)
    held += sum(getattr(model, "workspace_bytes", 0) for model in models)  # the pool of a recorded graph
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return (held + torch.cuda.max_memory_allocated(device) - before) / 1e6
    if device.type == "mps":
        return None  # no peak counter there, and a wrong figure is worse than none
    with (
        watch_live_storages(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiler,
    ):
        run()
    changes = []  # (time, bytes, whether the watch told it)
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes(), False))
        elif event.name().startswith(FREED):
            changes.append((event.start_ns(), -int(event.name().removeprefix(FREED)), True))
    changes.sort(key=lambda change: change[0])  # stable: order kept within a ns
    now = peak = 0
    following = [change[1:] for change in changes[1:]] + [(0, False)]
    for (_, n_bytes, watched), after in zip(changes, following, strict=False):
        if watched and after == (n_bytes, False):
            continue  # the allocator tells of it as well: it was allocated under an earlier profiler
        now += n_bytes
        peak = max(peak, now)
    return (held + peak) / 1e6


def cache_bytes_per_token(tensors, n_tokens, n_sequences):
    """Bytes of cache that one token of one sequence takes, over all layers, from the real tensors."""
    return sum(t.numel() * t.element_size() for t in tensors) / (n_tokens * n_sequences)


BYTES_PER_TOKEN = 30_000  # of activations, logits and cache of GPTlite in float32, about


def check_room(n_tokens, device=device):
    """Raises ValueError, before any work, for tokens side by side that cannot fit the memory that is free."""
    needed, free = n_tokens * BYTES_PER_TOKEN, 1e12  # where the system does not tell
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif Path("/proc/meminfo").is_file():
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), free)
    if needed > free:
        raise ValueError(
            f"{n_tokens:,} tokens at once need about {needed / 1e9:,.0f} GB, {free / 1e9:.0f} are free: "
            "try a smaller batch or shorter prompts"
        )


# ---- Quality ----


def sample_prompts(data, n_prompts, prompt_len):
    """Prompts cut from the data at even distances, the same at every call: [n_prompts, prompt_len]."""
    check_length(data, prompt_len)
    # in integers: the steps of floating-point numbers are wider than a token in a long text
    starts = torch.arange(n_prompts) * (len(data) - prompt_len - 1) // max(n_prompts - 1, 1)  # [n_prompts]
    return torch.stack([data[start : start + prompt_len] for start in starts.tolist()])


N_WINDOWS = 128  # of the validation loss


@torch.no_grad()
def window_losses(model, data, n_windows=N_WINDOWS, seqlen=None, batch_size=16):
    """Cross entropy in nats per token of each of the fixed windows, spread evenly over the data.

    Fewer windows than 128 are the first of the 128, so that reports can be compared on them.

    Args: model: maps token ids [B, T] to logits [B, T, V], or to a tuple that begins with them;
        data: token ids [N]; n_windows: windows of seqlen tokens (default the model's context).
    Returns: float64 [n_windows] on the CPU; every model sees the same windows. Evaluation mode during the
        call, the model's own mode afterwards.
    """
    seqlen = seqlen or model.seqlen
    check_length(data, seqlen)
    windows = sample_prompts(data, max(n_windows, N_WINDOWS), seqlen + 1)[:n_windows]  # [n_windows, T+1]
    model_device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    losses = []
    for batch in windows.split(batch_size):
        batch = batch.to(model_device)
        logits = first_of(model(batch[:, :-1]))  # [B, T, V]
        loss = F.cross_entropy(logits.float().transpose(1, 2), batch[:, 1:], reduction="none")  # [B, T]
        losses.append(
            loss.double().mean(dim=1).cpu() if loss.device.type != "mps" else loss.mean(dim=1).cpu()
        )
    model.train(was_training)
    return torch.cat(losses).double()  # [n_windows]


def validation_loss(model, data, n_windows=N_WINDOWS, seqlen=None, batch_size=16):
    """Mean cross entropy in nats per token over the windows of window_losses: each token weighs the same."""
    return window_losses(model, data, n_windows, seqlen, batch_size).mean().item()


def loss_difference(losses, reference):
    """Mean of losses - reference, [n_windows] each, and its standard error, from the pairs of windows."""
    difference = losses - reference  # [n_windows]
    se = difference.std().item() / math.sqrt(len(difference)) if len(difference) > 1 else math.nan
    return difference.mean().item(), se


def loss_figures(losses, reference=None):
    """Columns of a row from the losses [n_windows] of its model and, but for a baseline, of its baseline."""
    figures = {"valid_loss": losses.mean().item()}
    if reference is not None:
        difference, se = loss_difference(losses, reference)
        figures |= {"loss_difference": difference, "loss_difference_se": se}
    return figures


def first_of(output):
    """The logits of a model's output: itself, a tuple that begins with them, or what transformers returns."""
    return output[0] if isinstance(output, tuple) else getattr(output, "logits", output)


def cache_tensors(cache):
    """The tensors that a cache consists of: one of this collection's, or tuples and lists of tensors."""
    if cache is None:
        return []
    if isinstance(cache, torch.Tensor):
        return [cache]
    if isinstance(cache, list | tuple):
        return [tensor for part in cache for tensor in cache_tensors(part)]
    return [t for name in ("k", "v", "kv") for t in cache_tensors(getattr(cache, name, None))]


TOLERANCE = {  # largest difference of logits that rounding explains, by type
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 5e-2,
    torch.bfloat16: 4e-1,
}


def tie_margin(dtype):
    """How close two logits of this type are when rounding may decide between them."""
    return max(1e-3, 2 * TOLERANCE[dtype])


def largest_difference(a, b):
    """max |a - b|, infinite where either holds a NaN (nothing equals it) or shapes differ."""
    if a.shape != b.shape or a.isnan().any() or b.isnan().any():
        return math.inf
    if a.numel() == 0:
        return 0.0
    a, b = a.detach().cpu().double(), b.detach().cpu().double()  # on the CPU: mps has no float64
    return torch.where(a == b, 0.0, a - b).abs().max().item()  # equal infinities differ by nothing


def first_difference(tokens, reference, logits, margin=1e-3):
    """Where tokens [B, T] leave reference [B, T] although the choice was clear.

    Args: logits [B, T, V]: those that chose each reference token; margin: two best logits that are
        closer are a tie, which rounding may decide either way, and what follows it is not compared.
    Returns: the first such position, or None.
    """
    if tokens.shape != reference.shape:
        return 0
    best = logits.float().topk(min(2, logits.shape[-1]), dim=-1).values  # [B, T, 2]
    tied = (best[..., 0] - best[..., -1]) <= margin  # [B, T]
    first = None
    for row in range(tokens.shape[0]):
        differs = (tokens[row] != reference[row]).nonzero()
        if len(differs) and not tied[row, differs[0]]:
            position = differs[0].item()
            first = position if first is None else min(first, position)
    return first


@torch.no_grad()
def first_wrong_choice(model, output, starts, prompt_len, margin):
    """Where an output leaves what the model itself would choose behind the very tokens before it.

    Args: model: token ids [B, T] -> logits [B, T, V], or a tuple that begins with them; output: prompt and
        generated tokens [B, T + n], n at least 1; starts: the generated token of each row from which on
        to look, int64 [B]; prompt_len: T; margin: a token may fall this much behind the best logit.
    Returns: the first such position among the n, or None.
    """
    logits = model(output[:, :-1])  # [B, T + n - 1, V]
    logits = first_of(logits)[:, prompt_len - 1 :]  # [B, n, V]
    chosen = logits.gather(-1, output[:, prompt_len:, None])[..., 0]  # [B, n]
    wrong = ~(logits.amax(dim=-1) - chosen <= margin)  # a NaN is not within the margin, hence wrong
    wrong &= torch.arange(wrong.shape[1], device=wrong.device) >= starts[:, None]  # [B, n]
    return wrong.nonzero()[:, 1].min().item() if wrong.any() else None


@torch.no_grad()
def cached_logits(model, tokens, prompt_len):
    """Logits [B, T, V] of tokens [B, T] as decoding computes them: the prompt at once, the rest one by one.

    Returns them and the last cache. model: (token ids, cache) -> (logits, cache).
    """
    rows, cache, prompt_len = [], None, max(prompt_len, 1)
    for start in (0, *range(prompt_len, tokens.shape[1])):
        piece = tokens[:, start : max(start + 1, prompt_len)]  # [B, S]
        logits, cache = model(piece, cache)  # [B, S, V]
        rows.append(logits)
    return torch.cat(rows, dim=1), cache


@torch.no_grad()
def answer_losses(model, texts, n_prompt):
    """What the tokens behind a prompt cost, fed one by one behind it.

    Args: model: (token ids, cache) -> (logits, cache); texts [n, T + 1].
    Returns: the mean loss of each text's tokens from n_prompt + 1 on, float64 [n]; all logits [n, T, V]; the
        cache at the end.
    """
    logits, cache = cached_logits(model, texts[:, :-1], n_prompt)  # [n, T, V]
    losses = F.cross_entropy(logits[:, n_prompt:].float().mT, texts[:, n_prompt + 1 :], reduction="none")
    return losses.mean(dim=1).cpu().double(), logits, cache


@torch.no_grad()
def served_as_alone(model, outputs, requests, margin=0.0):
    """Whether every request got what it gets alone; one forward tells for a whole output.

    An output is right if each token of the answer is the model's choice after all tokens before it.

    Args: model: token ids [B, T] -> logits [B, T, V]; outputs: list of [T + n_tokens], within the context;
        margin: a token may fall this much behind the best logit, which rounding may decide either way.
    """
    for output, (prompt, n_tokens) in zip(outputs, requests, strict=True):
        T = len(prompt)
        if len(output) != T + n_tokens or not torch.equal(output[:T], prompt):
            return False
        if n_tokens > 0:
            logits = model(output[None, :-1])[0, T - 1 :]  # [n, V]
            chosen = logits.gather(-1, output[T:, None])[:, 0]  # [n]
            if not (logits.amax(dim=-1) - chosen <= margin).all():  # a NaN is not within the margin
                return False
    return True
