"""What the tests share: tiny random models, one comparison, and running a script as a user does.

In a test: `from helpers import assert_close, run_script, tiny_model`; the fixtures `checkpoint` and
`distilled_checkpoint` (conftest.py) give files of weights that exist, trained or not.
"""

import atexit
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = {  # absolute, and relative to the expected value
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-1,
}


def randomize(model, seed=0, std=0.3):
    """Gives every parameter, biases and norms included, clearly random values, the same for a seed.

    Models whose parameters have the same shapes in the same order get the same weights. Weights this
    large make attention pick and the layers matter, so that a wrong mask or position is seen.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            centre = 1.0 if p.ndim == 1 and name.endswith("weight") else 0.0  # the scale of a layer norm
            p.copy_(centre + std * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


def tiny_model(
    model_class,
    n_layers=2,
    d_model=32,
    n_heads=2,
    d_head=16,
    vocab_size=16,
    seqlen=16,
    seed=0,
    dtype=torch.float64,
    **kwargs,
):
    """A small model with clearly random weights on the CPU, in evaluation mode.

    kwargs go to the constructor; dropout_p is 0 unless given. Classes with GPTlite's weights get equal
    weights from equal seeds. The global random state is left as it was.
    """
    sizes = {"d_model": d_model, "n_heads": n_heads, "d_head": d_head, "n_layers": n_layers}
    with torch.random.fork_rng(devices=[]):
        model = model_class(vocab_size, **sizes, **({"dropout_p": 0.0, "seqlen": seqlen} | kwargs))
    return randomize(model.to(dtype), seed).eval()


def random_tokens(batch_size, n_tokens, seed=0, vocab_size=16):
    """Token ids [batch_size, n_tokens], the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch_size, n_tokens), generator=generator)


def assert_close(actual, expected, dtype_tolerance=None):
    """Fails unless shapes agree, neither side holds a NaN, and |actual - expected| is within rounding.

    Args: tensors, numbers, arrays, or lists and tuples of them, compared one by one; dtype_tolerance: a
        number instead of that of the less exact of the two types. It bounds the absolute and, times
        |expected|, the relative difference; integers and booleans must be equal.
    """
    if isinstance(actual, (list, tuple)) and any(
        isinstance(part, torch.Tensor | list | tuple) for part in actual
    ):
        assert len(actual) == len(expected), f"{len(actual)} parts, expected {len(expected)}"
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, dtype_tolerance)
        return
    types = [torch.as_tensor(side).dtype for side in (actual, expected)]
    actual, expected = (
        torch.as_tensor(side, dtype=torch.float64 if isinstance(side, float) else None).detach().cpu()
        for side in (actual, expected)
    )
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert not actual.isnan().any(), f"{int(actual.isnan().sum())} NaN of {actual.numel()}"
    assert not expected.isnan().any(), f"{int(expected.isnan().sum())} NaN expected: the reference is wrong"
    tolerance = dtype_tolerance
    if tolerance is None:
        tolerance = max(TOLERANCE.get(dtype, 0.0) for dtype in types)
    a, e = actual.double(), expected.double()
    difference = torch.where(a == e, 0.0, (a - e).abs())  # equal infinities differ by nothing
    allowed = tolerance * (1 + e.abs().nan_to_num(posinf=0.0))
    largest = difference.max().item() if difference.numel() else 0.0
    print(f"largest difference {largest:.3e}, allowed {tolerance:.0e} (+ as much relative)")
    wrong = difference > allowed
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        values = f"{a[where].item()!r}, expected {e[where].item()!r}"
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} differ, by up to {largest:.3e} (allowed {tolerance:.0e} "
            f"absolute and relative); first at {list(where)}: {values}"
        )


class RecordingModel:
    """Stands in for GPTlite_Paged: records (request, done, n) of every step and counts upwards.

    Args: paged: GPTlite_Paged, for the shapes of the pool; think: True asks it instead of counting.
    """

    def __init__(self, paged, think=False):
        self.paged, self.think, self.parameters = paged, think, paged.parameters
        self.blocks, self.seqlen, self.calls = paged.blocks, 16, []

    def step(self, pool, work):
        self.calls.append([(sequence.request, sequence.done, n) for sequence, n in work])
        if self.think:
            return self.paged.step(pool, work)
        for sequence, n in work:
            sequence.done += n
        complete = [sequence for sequence, _ in work if sequence.pending == 0]
        chosen = torch.tensor([(sequence.ids[-1] + 1) % 16 for sequence in complete], dtype=torch.int64)
        return complete, torch.nn.functional.one_hot(chosen, 16).double()


ROW_KEYS = (
    "method baseline ttft_ms tpot_ms tpot_p99_ms tokens_per_s peak_memory_mb kv_bytes_per_token "
    "forward_tokens valid_loss n_parameters same_output loss_difference loss_difference_se"
).split()
CONFIG_KEYS = (
    "device device_name threads dtype seed repeats quick n_windows n_parameters checkpoint weights_sha256 "
    "options versions"
).split()


def check_schema(report, script):
    """Fails unless a report has the form that every report has."""
    assert set(report) >= {"script", "technique", "config", "rows", "checks", "why"}
    assert report["script"] == Path(script).name and report["technique"]
    assert set(report["config"]) >= {*CONFIG_KEYS}
    assert report["rows"] or report["sweeps"], "a report shows figures"
    for row in report["rows"]:
        assert set(row) >= {*ROW_KEYS} and isinstance(row["baseline"], bool) and row["method"]
        assert row["same_output"] in (True, False, None)
        for key in ROW_KEYS[2 : ROW_KEYS.index("same_output")]:
            assert row[key] is None or (isinstance(row[key], int | float) and row[key] >= 0), (key, row)
    assert all(isinstance(passed, bool) for passed in report["checks"].values())
    assert report["checks"], "a report says what was verified"
    assert 1 <= len(report["why"]) <= 4 and all(len(line) > 20 for line in report["why"]), "a report explains"


SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch", "torch._dynamo", "matplotlib.figure", "faiss", "sentence_transformers"]
    + ["transformers.models.opt.modeling_opt"]
)
ENVIRONMENT = {}  # of the server, from its start on


# what pytest, PyTorch's compiler and profiler and the encoder's loader set by themselves, and scripts too
NO_MATTER = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TQDM_DISABLE")


def environment():
    return {key: value for key, value in os.environ.items() if key not in NO_MATTER}


def start_server():
    """The context whose processes are forks of one that has imported PyTorch; it starts with the first."""
    if not ENVIRONMENT:
        ENVIRONMENT.update(environment())
    return SERVER


def be_the_script(command, cwd, paths, stdout, stderr, env=()):
    """In a process of its own: becomes `python command`, but for packages that are imported already."""
    os.environ.update(env)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    sys.argv, sys.path[:] = command, [str(Path(command[0]).parent), *paths]
    os.chdir(cwd)
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def run_forked(command, cwd, timeout):
    """(status, standard output, standard error) of a script, in a process that has imported torch already."""
    return run_together([command], cwd, timeout)[0]


def run_together(commands, cwd, timeout, envs=((),)):
    """run_forked of several scripts at once, each with variables of its own."""
    ours = {str(ROOT / folder) for folder in (".", "more", "tests")} | {"", os.getcwd()}
    paths = [path for path in sys.path if path not in ours]
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for i, (command, env) in enumerate(zip(commands, envs, strict=True)):
            files = [Path(folder) / f"{name} {i}" for name in ("stdout", "stderr")]
            for file in files:
                file.touch()
            work = command, str(cwd), paths, *map(str, files), env
            process = start_server().Process(target=be_the_script, args=work)
            process.start()
            runs.append((process, files))
        deadline = time.monotonic() + timeout
        for process, _ in runs:
            process.join(max(deadline - time.monotonic(), 0.1))
        if late := [process for process, _ in runs if process.is_alive()]:
            for process in late:
                process.kill()
            raise TimeoutError(f"{commands[0][0]} ran longer than {timeout} s")
        texts = [[file.read_text("utf-8", "replace") for file in files] for _, files in runs]
        return [(process.exitcode, *text) for (process, _), text in zip(runs, texts, strict=True)]


def run_script(script, *args, cwd=None, env=None, checkpoint=None, timeout=600, fresh=False):
    """Runs ROOT/script with this Python: run_script("main_x.py", "--quick", "--json", "-").

    Args: checkpoint: a file for --checkpoint, None for the script's own default; env: variables set on
        top of this process's; cwd: default the repository; fresh: starts Python anew, as a user does. Else
        the process is a fork of one that has imported PyTorch, which takes seconds each time.
    Returns: an object with .status, .stdout, .stderr, and .json, the last line of standard output parsed
        when `--json -` was asked for (None where there was no report), its form checked.
    """
    command = [str(ROOT / script), *map(str, args)]
    if checkpoint is not None:
        command += ["--checkpoint", str(checkpoint)]
    if fresh or env or ENVIRONMENT not in ({}, environment()):
        run = subprocess.run(
            [sys.executable, *command],
            cwd=cwd or ROOT,
            env=os.environ | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            check=False,
        )
        status, stdout, stderr = run.returncode, run.stdout, run.stderr
    else:
        status, stdout, stderr = run_forked(command, cwd or ROOT, timeout)
    lines = stdout.splitlines()
    asked = any(pair == ("--json", "-") for pair in zip(command, command[1:], strict=False))
    report = json.loads(lines[-1]) if asked and lines and lines[-1].startswith("{") else None
    if report is not None:
        check_schema(report, script)
    return SimpleNamespace(status=status, json=report, stdout=stdout, stderr=stderr)


def quick_report(script, folder, checkpoint):
    """The report of a quick run that also draws its figure into a folder; fails unless it ends well."""
    run = run_script(script, "--quick", "--json", "-", "--plot", "a.png", cwd=folder, checkpoint=checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    assert all(run.json["checks"].values()) and (Path(folder) / "a.png").stat().st_size > 1000
    return run.json


def large_scores(dtype):
    """Cases whose scores overflow 16 bits before they are scaled: (Q, K, V [1, 1, 2, 64], causal output).

    Two equal keys, then a second key ten times larger, as channels of outliers make them; values 1 and 3.
    """
    for factor, last in ((1.0, 2.0), (10.0, 3.0)):
        Q, K = (torch.full((1, 1, 2, 64), 40.0, dtype=dtype) for _ in range(2))
        V, expected = (torch.ones(1, 1, 2, 64, dtype=dtype) for _ in range(2))
        K[:, :, 1] *= factor
        V[:, :, 1], expected[:, :, 1] = 3.0, last
        yield Q, K, V, expected
