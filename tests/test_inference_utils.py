"""Checkpoints that go wrong, exact memory, a clock without hands in the code, losses and choices."""

import contextlib
import functools
import gc
import math
import os
import pickle
import random
import shlex
import statistics
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import assert_close, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from linear_packed import pack_linears

# Loading (RP-1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny float16 checkpoint and its model."""
    model = tiny_model(GPTlite, dtype=torch.float32).half()
    path = tmp_path_factory.mktemp("saved") / "tiny.pth"
    torch.save(model.state_dict(), path)
    return SimpleNamespace(path=path, model=model, state=model.state_dict())


def save(folder, state, name="other.pth"):
    torch.save(state, folder / name)
    return folder / name


def test_checkpoint_in_16_bits_becomes_float32(saved):
    state = utils.load_checkpoint(str(saved.path))
    assert list(state) == list(saved.state)
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    for name, tensor in state.items():
        assert torch.equal(tensor, saved.state[name].float())


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_orig_mod.module._orig_mod.", "module.module."])
def test_prefixes_are_stripped_repeatedly(saved, tmp_path, prefix):
    path = save(tmp_path, {prefix + name: tensor for name, tensor in saved.state.items()})
    model = utils.load_weights(tiny_model(GPTlite, seed=1, dtype=torch.float32), utils.load_checkpoint(path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved.state[name].float())


def test_prefixes_of_wrapped_models(saved, tmp_path):
    wrapped = torch.compile(nn.DataParallel(torch.compile(saved.model)))  # nothing is compiled before it runs
    assert next(iter(wrapped.state_dict())).startswith("_orig_mod.module._orig_mod.")
    assert list(utils.load_checkpoint(save(tmp_path, wrapped.state_dict()))) == list(saved.state)


@pytest.mark.parametrize("prefixes", [("", "module."), ("_orig_mod.", "module._orig_mod.")])
def test_a_name_that_is_there_twice(tmp_path, prefixes):
    path = save(tmp_path, {prefix + "ln.bias": torch.zeros(1) for prefix in prefixes})
    with pytest.raises(ValueError, match="holds ln.bias twice"):
        utils.load_checkpoint(path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.int8),
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.tensor([1.0, float("nan")]),
        torch.tensor([-float("inf"), 1.0]).half(),
        torch.tensor([1e300], dtype=torch.float64),  # too large for float32
    ],
    ids=["int8", "bool", "complex", "sparse", "meta", "nan", "infinity", "too large"],
)
def test_only_dense_finite_floating_point_tensors_are_weights(tmp_path, tensor):
    path = save(tmp_path, {"whole": torch.zeros(1), "spoilt": tensor})
    with pytest.raises(ValueError, match="other.pth.*spoilt") as caught:
        utils.load_checkpoint(path)
    assert len(str(caught.value).splitlines()) == 1


def test_prefixes_only_at_the_start(tmp_path):
    names = ["blocks.0.module.weight", "net._orig_mod.bias", "submodule.weight", "module", "_orig_mod"]
    path = save(tmp_path, {name: torch.zeros(1) for name in names})
    assert list(utils.load_checkpoint(path)) == names


def test_missing_checkpoint_names_the_command(tmp_path):
    path = tmp_path / "absent.pth"
    with pytest.raises(
        FileNotFoundError, match="no checkpoint .*absent.pth: 'python main_training.py"
    ) as caught:
        utils.load_checkpoint(path)
    assert str(path) in str(caught.value).partition("main_training.py")[2]
    with pytest.raises(FileNotFoundError, match="main_training.py"):
        utils.load_model(GPTlite, 96, path)
    with pytest.raises(FileNotFoundError):
        utils.load_checkpoint(tmp_path)  # a folder


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("gptlite.pth", ["--checkpoint", "gptlite.pth"]),
        ("gptlite_distilled.pth", ["--size", "distilled", "--checkpoint", "gptlite_distilled.pth"]),
        ("my own weights.pth", ["--checkpoint", "my own weights.pth"]),
        ("weights.bin", ["--checkpoint", "weights.bin.pth"]),  # training writes no other names
    ],
)
def test_the_command_that_makes_a_missing_checkpoint_can_be_pasted(tmp_path, name, arguments):
    with pytest.raises(FileNotFoundError) as caught:
        utils.load_checkpoint(tmp_path / name)
    command = str(caught.value).partition(": '")[2].removesuffix("' makes one")
    arguments = [*arguments[:-1], str(tmp_path / arguments[-1])]
    assert shlex.split(command) == ["python", "main_training.py", *arguments]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.9, 0.999])
def test_truncated_checkpoint(saved, tmp_path, share):
    data = saved.path.read_bytes()
    path = tmp_path / "cut.pth"
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match="cut.pth is truncated or no checkpoint") as caught:
        utils.load_checkpoint(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "content", [b"PK", b"not a checkpoint", bytes(range(256)), b"\x80\x02", b"\x00" * 99]
)
def test_rubbish_instead_of_a_checkpoint(tmp_path, content):
    path = tmp_path / "rubbish.pth"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="rubbish.pth") as caught:
        utils.load_checkpoint(path)
    assert len(str(caught.value).splitlines()) == 1


class Attack:
    """A pickle that leaves a file behind when it is loaded without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_refused_and_not_run(saved, tmp_path, legacy):
    trace = tmp_path / "trace"
    path = tmp_path / "unsafe.pth"
    if legacy:
        path.write_bytes(pickle.dumps(Attack(trace)))
    else:
        save(tmp_path, saved.state | {"extra": Attack(trace)}, "unsafe.pth")
    with pytest.raises(ValueError, match="unsafe.pth is no plain state dictionary: refused") as caught:
        utils.load_checkpoint(path)
    assert not trace.exists()
    assert len(str(caught.value).splitlines()) == 1
    with contextlib.suppress(RuntimeError):
        torch.load(path, weights_only=False)  # the attack is a real one
    assert trace.exists()


def test_config_as_an_object_is_refused(saved, tmp_path):
    path = save(tmp_path, {"model": saved.state, "config": SimpleNamespace(n_layers=2)})
    with pytest.raises(ValueError, match="no plain state dictionary: refused"):
        utils.load_checkpoint(path)


@pytest.mark.parametrize(
    "content, message",
    [
        ([torch.zeros(2)], "holds no state dictionary"),
        (torch.zeros(2), "holds no state dictionary"),
        ({}, "holds no state dictionary"),
        ({"model": {"weight": torch.zeros(2)}}, r"holds more than tensors \(model\)"),
        ({"weight": torch.zeros(2), "step": 3}, r"holds more than tensors \(step\)"),
        ({0: torch.zeros(2)}, r"holds more than tensors \(0\)"),
    ],
)
def test_no_state_dictionary(tmp_path, content, message):
    with pytest.raises(ValueError, match=f"other.pth {message}"):
        utils.load_checkpoint(save(tmp_path, content))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop("blocks.1.ln2.bias"), "it lacks blocks.1.ln2.bias"),
        (
            lambda state: state.update({"blocks.2.ln1.bias": torch.zeros(32)}),
            "it has blocks.2.ln1.bias besides",
        ),
        (
            lambda state: state.update({"ln.weight": torch.zeros(33)}),
            r"ln.weight is \[33\], must be \[32\]",
        ),
        (
            lambda state: state.update({"token_embedding.weight": torch.zeros(65, 32)}),
            r"token_embedding.weight is \[65, 32\], must be \[16, 32\]",
        ),
    ],
)
def test_weights_that_do_not_fit(saved, change, message):
    state = {name: tensor.float() for name, tensor in saved.state.items()}
    change(state)
    model = tiny_model(GPTlite, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"some.pth does not fit GPTlite: .*{message}"):
        utils.load_weights(model, state, "some.pth")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_load_model(saved, distilled_checkpoint):
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_head": 16, "seqlen": 16}
    for model_class in (GPTlite, GPTlite_KVCache, GPTlite_StaticKVCache):
        model = utils.load_model(model_class, 16, saved.path, **sizes)
        assert type(model) is model_class and not model.training
        assert all(p.dtype == torch.float32 and p.device == utils.device for p in model.parameters())
        assert torch.equal(model.fc_out.bias.cpu(), saved.state["fc_out.bias"].float())
    with pytest.raises(ValueError, match="tiny.pth does not fit GPTlite: "):
        utils.load_model(GPTlite, 16, saved.path)  # the full size
    with pytest.raises(ValueError, match=r"token_embedding.weight is \[16, 32\], must be \[17, 32\]"):
        utils.load_model(GPTlite, 17, saved.path, **sizes)
    distilled = utils.load_model(GPTlite, 96, distilled_checkpoint, distilled=True)
    assert (len(distilled.blocks), distilled.fc_out.in_features) == (3, 192)


def test_distilled_model_has_its_own_checkpoint(monkeypatch):
    asked = []

    def load_checkpoint(path):
        asked.append(path)
        raise FileNotFoundError

    monkeypatch.setattr(utils, "load_checkpoint", load_checkpoint)
    for distilled in (False, True):
        with pytest.raises(FileNotFoundError):
            utils.load_model(GPTlite, 96, distilled=distilled)
    assert [path.name for path in asked] == ["gptlite.pth", "gptlite_distilled.pth"]


def test_pick_device():
    assert utils.pick_device("cpu") == torch.device("cpu")
    assert utils.pick_device("auto") == utils.pick_device() == utils.device
    for name, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps)):
        if backend.is_available():
            assert utils.pick_device(name).type == name
        else:
            with pytest.raises(ValueError, match=f"--device {name}: this machine has none"):
                utils.pick_device(name)


# Writing


def test_writing_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file.txt"
    utils.write_atomically(path, lambda p: p.write_text("first"))
    assert path.read_text() == "first"

    def fail(error, p):
        p.write_text("half")
        raise error

    for error in (OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("x")):
        with pytest.raises(type(error)):
            utils.write_atomically(path, functools.partial(fail, error))
        assert os.listdir(path.parent) == ["file.txt"] and path.read_text() == "first"
    full_disk = RuntimeError("PytorchStreamWriter failed writing file data/0\nframe #0")
    with pytest.raises(OSError, match=r"cannot write .*file.txt: PytorchStreamWriter failed") as caught:
        utils.write_atomically(path, functools.partial(fail, full_disk))
    assert "frame" not in str(caught.value)
    assert os.listdir(path.parent) == ["file.txt"] and path.read_text() == "first"


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError):
        utils.write_atomically(tmp_path / "file" / "below.txt", lambda p: p.write_text("y"))
    with pytest.raises(OSError):
        (tmp_path / "folder").mkdir()
        utils.write_atomically(tmp_path / "folder", lambda p: p.write_text("y"))
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_two_writers(tmp_path, monkeypatch):
    """The second process begins and ends while the first is writing: the last to finish wins, whole."""
    path = tmp_path / "file.txt"

    def slow(p):
        p.write_text("slow, first half")
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 1)
            utils.write_atomically(path, lambda q: q.write_text("quick"))
        assert path.read_text() == "quick"
        p.write_text("slow, whole")

    utils.write_atomically(path, slow)
    assert path.read_text() == "slow, whole" and os.listdir(tmp_path) == ["file.txt"]


# Sizes


def test_weight_bytes():
    model = tiny_model(GPTlite, dtype=torch.float32)
    n = utils.n_parameters(model)
    assert n == sum(tensor.numel() for tensor in model.state_dict().values())
    assert utils.weight_bytes(model) == 4 * n and utils.model_size_mb(model) == 4 * n / 1e6
    assert utils.weight_bytes(model.half()) == 2 * n
    assert utils.weight_bytes(model, model, tiny_model(GPTlite)) == 2 * n + 8 * n


def test_tied_weights_and_buffers_count_once():
    tied = tiny_model(GPTlite, dtype=torch.float32)
    before = utils.weight_bytes(tied)
    tied.fc_out.weight = tied.token_embedding.weight
    assert utils.weight_bytes(tied) == before - 16 * 32 * 4
    tied.register_buffer("view", tied.token_embedding.weight.detach()[:3])
    assert utils.weight_bytes(tied) == before - 16 * 32 * 4
    tied.register_buffer("counter", torch.zeros(10, dtype=torch.int64))
    assert utils.weight_bytes(tied) == before - 16 * 32 * 4 + 80


def test_packed_weights_count_once():
    model = tiny_model(GPTlite, dtype=torch.float32)
    before = utils.weight_bytes(model), utils.n_parameters(model)
    assert (utils.weight_bytes(pack_linears(model)), utils.n_parameters(model)) == before
    assert utils.weight_bytes(model, model) == before[0]


def test_room_for_tokens(monkeypatch):
    utils.check_room(1000, torch.device("cpu"))
    for n_tokens in (10**9, 99_999_999 * 64):
        with pytest.raises(ValueError, match=f"{n_tokens:,} tokens at once need about"):
            utils.check_room(n_tokens, torch.device("cpu"))
    monkeypatch.setattr(utils.Path, "is_file", lambda _: False)  # a system that does not tell
    utils.check_room(10**6, torch.device("cpu"))
    with pytest.raises(ValueError, match="1000 are free"):
        utils.check_room(10**9, torch.device("cpu"))


# Memory


def known_pattern():
    """a and b hold 7000 bytes, a and a temporary 8000, the result 5000."""
    a = torch.empty(4000, dtype=torch.int8)
    b = torch.empty(3000, dtype=torch.int8)
    del b
    c = a + a
    del a, c
    return torch.empty(5000, dtype=torch.int8)


def test_peak_memory_is_exact():
    assert utils.peak_memory_mb(known_pattern) == 8000 / 1e6
    assert utils.peak_memory_mb(lambda: None) == 0
    model = tiny_model(GPTlite)
    inputs = [torch.zeros(100, dtype=torch.int64), torch.zeros(10)]
    expected = (8000 + utils.weight_bytes(model) + 800 + 40) / 1e6
    assert utils.peak_memory_mb(known_pattern, model, inputs=inputs) == expected
    step = nn.Identity()  # a module without weights, as a recorded step is
    assert utils.peak_memory_mb(known_pattern, model, step, inputs=inputs) == expected
    assert utils.peak_memory_mb(known_pattern, step) == 8000 / 1e6


def test_peak_memory_does_not_depend_on_what_is_held_or_ran_before():
    kept = [torch.zeros(1_000_000)]
    (torch.zeros(10_000_000) + 1).sum()
    assert utils.peak_memory_mb(known_pattern) == utils.peak_memory_mb(known_pattern) == 8000 / 1e6
    assert len(kept) == 1


def test_tensors_from_before_that_are_freed_make_room():
    """As on a GPU, where the peak is that of all that is allocated: 40 MB for 40 MB need none."""
    held = []

    def replace():
        held.clear()
        held.append(torch.zeros(10_000_000))

    replace()
    assert utils.peak_memory_mb(replace) == utils.peak_memory_mb(replace) == 0

    def grow():
        held.clear()
        return [torch.zeros(10_000_000), torch.zeros(500_000)]

    assert utils.peak_memory_mb(grow) == 2

    def late():
        kept = torch.zeros(1_000_000)
        held.clear()
        return kept, torch.zeros(5_000_000)

    replace()
    assert utils.peak_memory_mb(late) == 4


def test_memory_that_a_view_still_needs_is_not_free():
    held = [torch.zeros(1_000_000)]
    view = held[0][:3]

    def run():
        held.clear()
        torch.zeros(1_000_000)

    assert utils.peak_memory_mb(run) == 4 and len(view) == 3
    del view
    held.append(torch.zeros(1_000_000)[:3])  # freed as a whole, though a view of 3 is what is held
    assert utils.peak_memory_mb(run) == 0


def test_garbage_from_before_does_not_make_room():
    class Cycle:
        def __init__(self):
            self.itself, self.tensor = self, torch.zeros(1_000_000)

    Cycle()
    assert utils.peak_memory_mb(lambda: [[] for _ in range(100_000)] and torch.zeros(1_000_000)) == 4
    assert gc.isenabled()


def test_the_watch_ends_with_the_run():
    held = [torch.zeros(10)]
    with pytest.raises(ZeroDivisionError):
        utils.peak_memory_mb(lambda: 1 / 0)
    assert gc.isenabled()
    held.clear()  # no profiler is there any more
    assert utils.peak_memory_mb(known_pattern) == 8000 / 1e6


@given(st.lists(st.one_of(st.integers(1, 5000), st.none()), max_size=12))
def test_peak_memory_of_any_order(steps):
    """A number allocates so many bytes, None frees the oldest."""

    def run():
        held = []
        for step in steps:
            if step is not None:
                held.append(torch.empty(step, dtype=torch.int8))
            elif held:
                held.pop(0)

    sizes, peak = [], 0
    for step in steps:
        sizes = sizes[1:] if step is None else [*sizes, step]
        peak = max(peak, sum(sizes))
    assert utils.peak_memory_mb(run) == peak / 1e6


def test_peak_memory_of_a_forward_grows_with_the_batch():
    model = tiny_model(GPTlite)
    with torch.no_grad():
        runs = [functools.partial(model, random_tokens(n, 16)) for n in (1, 4)]
        one, four = (utils.peak_memory_mb(run, model) for run in runs)
    weights = utils.model_size_mb(model)
    assert 1e6 * (one - weights) > 16 * 32 * 8  # at least the residual stream
    assert four - weights == pytest.approx(4 * (one - weights), rel=0.1)


def test_cache_bytes_per_token():
    tensors = [torch.zeros(2, 3, 10, 4, dtype=torch.float16) for _ in range(6)]
    assert utils.cache_bytes_per_token(tensors, 10, 2) == 6 * 3 * 4 * 2


# Time


class FakeModel(nn.Module):
    """Returns its tokens; every forward takes the next of `durations` ms on a clock of its own."""

    def __init__(self, now, durations):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.now, self.durations = now, iter(durations)

    def forward(self, x, fail=False):
        if fail:
            raise RuntimeError("failed")
        self.now[0] += next(self.durations) / 1000
        return x


@pytest.fixture
def now(monkeypatch):
    """Seconds on the clock that the measuring code reads; only fake models move it."""
    seconds = [100.0]
    monkeypatch.setattr(utils, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    return seconds


def test_clock_counts_forwards_and_tokens(now):
    model = FakeModel(now, [5, 1, 2])
    with utils.StepClock(model) as clock:
        now[0] += 0.003  # before the first forward: part of the first step
        model(random_tokens(2, 7))
        now[0] += 0.004  # choosing the token
        model(random_tokens(2, 1))
        model(random_tokens(2, 2))
        now[0] += 0.010
    assert clock.n_steps == 3 and clock.forward_tokens == 2 * (7 + 1 + 2)
    assert clock.steps_ms == pytest.approx([12, 1, 12])
    assert clock.total_ms == sum(clock.steps_ms) == pytest.approx(25)
    model.durations = iter([1])
    model(random_tokens(1, 1))
    assert clock.n_steps == 3 and not model._forward_pre_hooks


def test_clock_reads_the_argument_of_transformers(now):
    class Peer(FakeModel):
        def forward(self, input_ids=None, attention_mask=None):
            return super().forward(input_ids)

    with utils.StepClock(model := Peer(now, [1])) as clock:
        model(attention_mask=None, input_ids=random_tokens(3, 4))
    assert clock.forward_tokens == 12


def test_clock_of_two_models_and_of_none(now):
    draft, target = FakeModel(now, [1, 2]), FakeModel(now, [10])
    with utils.StepClock(target, draft) as clock:
        draft(random_tokens(1, 1))
        draft(random_tokens(1, 1))
        target(random_tokens(1, 5))
    assert clock.forward_tokens == 7 and clock.steps_ms == pytest.approx([1, 2, 10])
    with utils.StepClock(draft) as clock:
        pass
    assert clock.n_steps == clock.forward_tokens == 0 and clock.total_ms == 0


def test_hooks_are_removed_after_an_exception(now):
    model = FakeModel(now, [1])
    with pytest.raises(RuntimeError, match="failed"), utils.StepClock(model):
        model(random_tokens(1, 1), fail=True)
    assert not model._forward_pre_hooks


def test_measure_alternates_and_warms_up(now):
    """Two methods of three forwards; the first run of each is slow and doesn't count."""
    order = []
    slow = [1000, 1000, 1000]
    a = FakeModel(now, slow + [30, 4, 5] + [10, 1, 2] + [20, 1, 9])
    b = FakeModel(now, slow * 4)

    def run(name, model):
        order.append(name)
        for n_tokens in (6, 1, 1):
            model(random_tokens(2, n_tokens))
        return f"{name}{len(order)}"

    methods = [
        utils.TimedMethod("a", lambda: run("a", a), [a]),
        utils.TimedMethod("b", lambda: run("b", b), [b]),
    ]
    results = utils.measure(methods, n_generated=6, repeats=3)
    assert order == ["a", "b"] * 4
    m = results["a"]
    assert list(results) == ["a", "b"] and m.output == "a7"
    assert m.ttft_ms == pytest.approx(20)
    assert m.tpot_ms == pytest.approx(statistics.median([4, 5, 1, 2, 1, 9]))
    assert m.tpot_p99_ms == pytest.approx(9)
    assert m.tokens_per_s == pytest.approx(6000 / 30)  # of 39, 13 and 30 ms
    assert m.tokens_per_s_spread == pytest.approx((6000 / 39, 6000 / 13))
    assert m.ttft_ms_spread == pytest.approx((10, 30)) and m.tpot_ms_spread == pytest.approx((1.5, 5))
    assert m.forward_tokens == 2 * 8 and m.n_steps == 3
    assert m.steps_ms == pytest.approx([20, 1, 5])


def test_measure_refuses_two_methods_of_one_name():
    methods = [utils.TimedMethod("a", lambda: None, [nn.Linear(1, 1)])] * 2
    with pytest.raises(ValueError, match="two methods have one name"):
        utils.measure(methods, 1)


def test_measure_of_one_token_and_of_two_prefill_steps(now):
    a, b = FakeModel(now, [7] * 3), FakeModel(now, [1, 2, 3, 1, 2, 3])
    methods = [
        utils.TimedMethod("a", lambda: a(random_tokens(1, 3)), [a]),
        utils.TimedMethod("b", lambda: [b(random_tokens(1, 1)) for _ in range(3)], [b]),
    ]
    one = utils.measure(methods[:1], 1, repeats=2)["a"]
    assert one.ttft_ms == pytest.approx(7) and one.tpot_ms is None and one.tpot_p99_ms is None
    chunked = utils.measure(methods[1:], 2, repeats=1, n_prefill_steps=2)["b"]
    assert chunked.ttft_ms == pytest.approx(3) and chunked.tpot_ms == pytest.approx(3)


def test_alternating_ms(now):
    """A call of more than 2 ms is a loop of its own; the first ones, which find that out, do not count."""
    order, times = [], {"a": iter([9, 9, 3, 4, 5]), "b": iter([9, 9, 5, 7, 6])}

    def function(name):
        order.append(name)
        now[0] += next(times[name]) / 1000

    functions = {"a": lambda: function("a"), "b": lambda: function("b")}
    assert utils.alternating_ms(functions, 3, torch.device("cpu")) == pytest.approx({"a": 4, "b": 6})
    assert order == ["a", "a", "b", "b"] + ["a", "b"] * 3


@pytest.mark.parametrize("device, least_ms", [("cpu", 2), ("cuda", 10)])
def test_loops_are_long_against_the_clock(now, device, least_ms, monkeypatch):
    """Between two synchronisations lie so many calls, not one."""
    synchronised = []
    monkeypatch.setattr(utils, "synchronize", lambda device: synchronised.append(n_calls[0]))
    n_calls = [0]

    def function():
        n_calls[0] += 1
        now[0] += 1e-5  # 0.01 ms

    assert utils.alternating_ms({"a": function}, 2, torch.device(device)) == pytest.approx({"a": 0.01})
    last = synchronised[-2:]  # around the last loop
    assert last[1] - last[0] >= 100 * least_ms


def test_median_ms(now):
    times = iter([0.9, 0.9, 0.003, 0.005, 0.004])

    def function():
        now[0] += next(times)

    assert utils.median_ms(function, 3, torch.device("cpu")) == pytest.approx(4)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(0, 100))
def test_percentile_is_the_nearest_rank(values, percent):
    """The smallest value that at least so many percent of all are not above."""
    reached = [v for v in values if 100 * sum(w <= v for w in values) >= percent * len(values)]
    assert utils.percentile(values, percent) == min(reached)


def test_percentile_of_exact_ranks():
    for percent in range(1, 101):
        assert utils.percentile(list(range(1, 101)), percent) == percent
    with pytest.raises(ValueError, match="percentile of nothing"):
        utils.percentile([], 50)


# Quality


@given(st.integers(1, 9), st.integers(1, 20), st.integers(21, 500))
def test_sample_prompts(n_prompts, prompt_len, n_data):
    data = torch.arange(n_data)
    prompts = utils.sample_prompts(data, n_prompts, prompt_len)
    assert prompts.shape == (n_prompts, prompt_len) and prompts.dtype == torch.int64
    assert torch.equal(prompts, prompts[:, :1] + torch.arange(prompt_len))  # cut from the data
    assert torch.equal(prompts, utils.sample_prompts(data, n_prompts, prompt_len))
    starts = prompts[:, 0]
    assert starts[0] == 0
    if n_prompts > 1:
        assert starts[-1] == n_data - prompt_len - 1  # one token follows the last prompt
        assert (starts.diff() - (n_data - prompt_len - 1) / (n_prompts - 1)).abs().max() <= 1


@pytest.mark.parametrize("n_data", [2**25 + 264, 2**33 + 5])
def test_sample_prompts_of_a_text_longer_than_floating_point_numbers_count(n_data):
    """The places alone, on data that hold no memory: floats of 32 bits step by 2 and more there."""
    asked = []

    class Data:
        def __len__(self):
            return n_data

        def __getitem__(self, place):
            asked.append(place)
            return torch.zeros(place.stop - place.start)

    utils.sample_prompts(Data(), 5, 256)
    last = n_data - 257
    assert [place.start for place in asked] == [0, last // 4, last // 2, 3 * last // 4, last]
    assert all(place.stop - place.start == 256 for place in asked)


def test_sample_prompts_of_a_short_text():
    with pytest.raises(ValueError, match="too short"):
        utils.sample_prompts(torch.arange(8), 2, 8)
    assert utils.sample_prompts(torch.arange(9), 2, 8).tolist() == [list(range(8))] * 2


@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache, GPTlite_StaticKVCache])
@pytest.mark.parametrize("n_windows, seqlen, batch_size", [(1, 16, 16), (7, 16, 3), (7, 16, 7), (5, 9, 2)])
def test_validation_loss(model_class, n_windows, seqlen, batch_size):
    """By hand, window by window: every token weighs the same whatever the batches."""
    data, model = random_tokens(1, 300)[0], tiny_model(GPTlite)
    losses = [
        F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        for window in utils.sample_prompts(data, 128, seqlen + 1)[:n_windows]
    ]
    assert all(len(loss) == seqlen for loss in losses)
    loss = utils.validation_loss(tiny_model(model_class), data, n_windows, seqlen, batch_size)
    assert isinstance(loss, float)
    assert_close(loss, torch.cat(losses).mean(), 1e-6)


@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache])
@pytest.mark.parametrize("training", [False, True])
def test_validation_loss_is_without_dropout_and_restores_the_mode(model_class, training):
    data = random_tokens(1, 100)[0]
    model = tiny_model(model_class, dropout_p=0.5).train(training)
    loss = utils.validation_loss(model, data, 3)
    assert model.training is training and all(m.training is training for m in model.modules())
    assert loss == utils.validation_loss(tiny_model(model_class), data, 3)
    assert all(p.grad is None for p in model.parameters())


def test_validation_loss_of_a_short_text():
    with pytest.raises(ValueError, match="too short"):
        utils.validation_loss(tiny_model(GPTlite), random_tokens(1, 16)[0])


@given(st.integers(2, 40), st.integers(0, 10**6))
def test_loss_difference(n_windows, seed):
    """The mean of the pairs, and how far it would go in other windows."""
    generator = torch.Generator().manual_seed(seed)
    reference = torch.rand(n_windows, generator=generator, dtype=torch.float64)
    losses = reference + torch.rand(n_windows, generator=generator, dtype=torch.float64)
    difference, se = utils.loss_difference(losses, reference)
    pairs = [a - b for a, b in zip(losses.tolist(), reference.tolist(), strict=True)]
    assert difference == pytest.approx(statistics.mean(pairs))
    assert se == pytest.approx(statistics.stdev(pairs) / math.sqrt(n_windows))
    assert utils.loss_figures(losses, reference)["loss_difference_se"] == se


def test_loss_difference_of_equal_models_and_of_one_window():
    losses = torch.rand(5, dtype=torch.float64)
    assert utils.loss_difference(losses, losses) == (0, 0)
    difference, se = utils.loss_difference(losses[:1], losses[1:2])
    assert difference == (losses[0] - losses[1]).item() and math.isnan(se)
    assert utils.loss_figures(losses) == {"valid_loss": losses.mean().item()}


def test_window_losses_are_those_of_the_same_windows_in_any_batch():
    data, model = random_tokens(1, 300)[0], tiny_model(GPTlite)
    losses = utils.window_losses(model, data, 7)
    assert losses.dtype == torch.float64 and losses.shape == (7,)
    assert_close(losses, utils.window_losses(tiny_model(GPTlite_KVCache), data, 7, batch_size=2))
    assert_close(losses.mean(), utils.validation_loss(model, data, 7))


def test_fewer_windows_are_the_first_of_all():
    data, model = random_tokens(1, 3000)[0], tiny_model(GPTlite)
    whole = utils.window_losses(model, data)
    assert whole.shape == (128,) and len(set(whole.tolist())) == 128
    for n in (1, 4, 32, 100):
        assert_close(utils.window_losses(model, data, n), whole[:n])
    assert utils.window_losses(model, data, 200).shape == (200,)


def test_first_of():
    logits = torch.zeros(2)
    for output in (logits, (logits, None), SimpleNamespace(logits=logits, past_key_values=None)):
        assert utils.first_of(output) is logits


def test_cache_tensors():
    k, v = torch.zeros(1), torch.ones(1)
    static = StaticKVCache(tiny_model(GPTlite_StaticKVCache), 1)
    latent = SimpleNamespace(kv=[k, (v,)])
    for cache, tensors in ((None, []), (k, [k]), ([(k, v), (k, None)], [k, v, k]), (latent, [k, v]), (3, [])):
        found = utils.cache_tensors(cache)
        assert len(found) == len(tensors) and all(a is b for a, b in zip(found, tensors, strict=True))
    assert len(utils.cache_tensors(static)) == 2


def test_tie_margin():
    margins = [utils.tie_margin(t) for t in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
    assert margins == [1e-3, 1e-3, 0.1, 0.8]


def test_largest_difference():
    difference = utils.largest_difference
    nan = float("nan")
    a = torch.tensor([1.0, 2.0, nan])
    assert difference(a, a.clone()) == math.inf  # nothing equals NaN: two broken results do not agree
    infinities = torch.tensor([math.inf, -math.inf, 1.0])
    assert difference(infinities, infinities.clone()) == 0
    assert difference(infinities, -infinities) == math.inf
    assert difference(torch.tensor([1, 5]), torch.tensor([1, 2])) == 3
    assert difference(torch.tensor([1.0, 2.0]), torch.tensor([1.5, -1.0])) == 3
    assert difference(a, torch.tensor([1.0, 2.0, 3.0])) == math.inf
    assert difference(torch.tensor([1.0, 2.0, 3.0]), a) == math.inf
    assert difference(a, torch.tensor([nan, 2.0, 1.0])) == math.inf
    assert difference(torch.zeros(2), torch.zeros(2, 1)) == math.inf
    assert difference(torch.zeros(2), torch.tensor([0.0, math.inf])) > 1e30
    assert difference(torch.zeros(0, 3), torch.zeros(0, 3)) == 0
    assert difference(torch.tensor([1 + 1e-12]).double(), torch.ones(1)) < 1e-11


def test_first_difference():
    reference = torch.tensor([[5, 1, 2, 3], [0, 1, 2, 3]])
    logits = torch.zeros(2, 4, 6)
    logits[..., 0] = 1.0  # a clear choice everywhere
    first = functools.partial(utils.first_difference, reference=reference, logits=logits)
    assert first(reference.clone()) is None
    other = reference.clone()
    other[1, 2] = other[1, 3] = 5
    assert first(other) == 2
    other[0, 3] = 0
    assert first(other) == 2  # the earliest of all rows
    other[0, 1] = 0
    assert first(other) == 1
    assert first(reference[:, :3]) == 0  # another length


def test_first_difference_at_a_tie():
    """Rounding decides a tie either way, and what follows is another text; nothing else is excused."""
    reference = torch.tensor([[5, 1, 2, 3], [0, 1, 2, 3]])
    logits = torch.zeros(2, 4, 6)
    logits[..., 0] = 1.0
    logits[0, 1, 4] = 1.0 - 5e-4
    other = reference.clone()
    other[0, 1:] = 0
    assert utils.first_difference(other, reference, logits) is None
    assert utils.first_difference(other, reference, logits, margin=1e-4) == 1
    other[1, 3] = 0
    assert utils.first_difference(other, reference, logits) == 3
    other[0, 0] = 0  # now the row leaves the reference before its tie
    assert utils.first_difference(other, reference, logits) == 0


@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache])
def test_first_wrong_choice(model_class):
    """Against the model's own greedy text; a row is judged from its start on, behind its own tokens."""
    model, output = tiny_model(model_class), random_tokens(3, 4)
    for _ in range(6):
        logits = tiny_model(GPTlite)(output)[:, -1]
        output = torch.cat([output, logits.argmax(dim=-1, keepdim=True)], dim=1)  # [3, 10]
    starts = torch.zeros(3, dtype=torch.int64)
    assert utils.first_wrong_choice(model, output, starts, 4, 0.0) is None
    worst = tiny_model(GPTlite)(output[:, :8])[1, -1].argmin()
    output[1, 8] = worst  # its fifth generated token
    assert utils.first_wrong_choice(model, output[[0, 2]], starts[:2], 4, 0.0) is None
    assert utils.first_wrong_choice(model, output, starts, 4, 1e-3) == 4
    assert utils.first_wrong_choice(model, output, starts + 4, 4, 1e-3) == 4
    assert utils.first_wrong_choice(model, output[:, :9], starts + 5, 4, 1e-3) is None
    assert utils.first_wrong_choice(lambda x: tiny_model(GPTlite)(x) * math.nan, output, starts, 4, 9.0) == 0


@pytest.mark.parametrize("n_prompt", [1, 5, 10])
def test_answer_losses(n_prompt):
    """The tokens behind a prompt and behind the one that the prompt predicts, each judged by its own text."""
    texts, model = random_tokens(3, 12), tiny_model(GPTlite)
    losses, logits, cache = utils.answer_losses(tiny_model(GPTlite_KVCache), texts, n_prompt)
    expected = model(texts[:, :-1])
    assert_close(logits, expected)
    picked = expected.log_softmax(dim=-1).gather(-1, texts[:, 1:, None])[..., 0]
    assert_close(losses, -picked[:, n_prompt:].mean(dim=1), 1e-5)  # cross entropy in float32
    assert cache[0][0].shape[-2] == 11


@given(st.integers(1, 16), st.integers(0, 16))
def test_cached_logits(n_tokens, prompt_len):
    tokens, model = random_tokens(2, n_tokens), tiny_model(GPTlite_KVCache)
    prompt_len = min(prompt_len, n_tokens)
    with utils.StepClock(model) as clock:
        logits, cache = utils.cached_logits(model, tokens, prompt_len)
    assert_close(logits, tiny_model(GPTlite)(tokens))
    assert cache[0][0].shape[-2] == n_tokens
    assert clock.n_steps == 1 + n_tokens - max(prompt_len, 1) and clock.forward_tokens == 2 * n_tokens


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("new_format", [True, False])
def test_a_damaged_file_is_named_whatever_breaks(tmp_path, new_format):
    """Bytes that were cut off or changed end in any error of pickle, struct or torch."""
    path, generator = tmp_path / "x.pth", random.Random(0)
    state = {f"layer.{i}.weight": torch.randn(3, 2) for i in range(3)}
    torch.save(state, path, _use_new_zipfile_serialization=new_format)
    whole = path.read_bytes()
    for _ in range(300):
        content = bytearray(whole[: generator.randrange(len(whole))] if generator.random() < 0.3 else whole)
        for _ in range(generator.randrange(4)):
            if content:
                content[generator.randrange(len(content))] = generator.randrange(256)
        path.write_bytes(content)
        try:
            utils.load_checkpoint(path)
        except ValueError as error:
            assert "x.pth" in str(error) and "\n" not in str(error).strip()


def test_a_scalar_is_no_embedding():
    with pytest.raises(ValueError, match="fit"):
        utils.model_from({"token_embedding.weight": torch.tensor(1.0)}, GPTlite, 96)
