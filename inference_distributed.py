"""Several processes that run one model together: started by a script itself, or by torchrun.

    with Ranks(world_size, device) as team:
        team.run(build, state)               # build(team, state) on every rank; what rank 0 returns
        team.gather(measure, prompts)        # the same, what every rank returns, by rank

Rank 0 is the script's own process, which measures and reports; the others wait for what it asks of them, so
a loop of rank 0 whose length the clock decides leaves nobody behind. `python main_x.py --world-size 2`
starts the others on this machine; under `torchrun --nproc-per-node 2 main_x.py` they are there already. gloo
on CPUs; nccl where there is a GPU for each rank.

Every collective of a Team is counted: calls, and the bytes of the tensors that this rank hands over.
A rank that dies, fails or stops answering ends the run: rank 0 raises ChildProcessError with one line, which
the frame of a script prints, and the others are ended. They meet at a port of the loopback address that the
system chooses, so no file is needed, and every process watches that of rank 0, so none is left behind.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter, namedtuple
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from statistics import median
from types import SimpleNamespace

import torch
import torch.distributed as dist

from gptlite_kvcache import cache_bytes
from inference_utils import alternating_ms, percentile, synchronize

TIMEOUT_S = 40.0  # a collective that takes longer has lost a rank
GRACE_S = 10.0  # after a rank's death: until rank 0 is ended from outside
FOREVER = 7 * 24 * 3600.0  # ranks wait for what to do next while rank 0 measures something else
SAME_LOSS = ["loss_difference", "loss_difference_se"]  # columns without news where a check has them
LOST = ("Connection closed", "Connection reset", "Timed out", "Broken pipe", "Connection refused", "Socket")
INTERFACE = "GLOO_SOCKET_IFNAME"
UNDER_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def add_world_size(parser, default=2):
    """Adds --world-size to a parser; under torchrun the default is the number of its processes.

    There every process runs the whole script until the ranks meet: what those above 0 print is dropped.
    """
    if under_torchrun():
        default = int(os.environ["WORLD_SIZE"])
        if int(os.environ["RANK"]) > 0:
            sys.stdout = open(os.devnull, "w")
    parser.add_argument("--world-size", type=int, choices=range(1, 65), metavar="N", default=default)
    parser._actions[-1].help = "processes that run the model together"


def named(world_size, what="rank"):
    """The name of a row for so many ranks: "2 ranks"; a single one says that nothing is split."""
    return f"{world_size} {what}s" if world_size > 1 else f"1 {what} (nothing split)"


def under_torchrun():
    return all(name in os.environ for name in UNDER_TORCHRUN)


def pick_ranks_device(world_size, device, given=False):
    """The device for a number of ranks: the CPU where there is no GPU for each of them.

    Args: device: the one that a single process would take; given: whether the user asked for it.
    Raises: ValueError where the user did and there are too few.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) if under_torchrun() else world_size
    n_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cpu" or n_gpus >= local:
        return device
    if given:
        raise ValueError(f"{local} ranks need {local} GPUs, here are {n_gpus}: use --device cpu")
    return torch.device("cpu")


def ranks_device(args):
    """pick_ranks_device by the options --world-size and --device."""
    return pick_ranks_device(args.world_size, args.device, args.given.get("device", "auto") != "auto")


def part_of(n, rank, world_size):
    """The rank's part of n things (neurons, experts), as a range; the first ranks may have one more."""
    size, longer = divmod(n, world_size)
    first = rank * size + min(rank, longer)
    return range(first, first + size + (rank < longer))


class Team:
    """One rank's view of all the ranks. Functions that Ranks runs get it as their first argument.

    Attributes: rank, world_size; device: this rank's; n_threads: its share of the cores; kept: a namespace
    for what functions leave to later ones (models, caches); calls, sent_bytes, seconds: Counters by the
    collective's name, of this rank.
    The tensors of a collective lie on `device`, and every rank calls it in the same order.
    """

    dist = dist  # what moves the tensors

    def __init__(self, rank, world_size, device, control, n_threads):
        self.rank, self.world_size, self.device = rank, world_size, device
        self.kept = SimpleNamespace()
        self.reset_counts()
        self.n_threads, self._control = n_threads, control

    # ---- Counted collectives ----

    def reset_counts(self):
        self.calls, self.sent_bytes, self.seconds = Counter(), Counter(), Counter()

    @contextlib.contextmanager
    def _counted(self, name, n_bytes):
        begin = time.perf_counter()
        yield
        self.calls[name] += 1
        self.sent_bytes[name] += n_bytes
        self.seconds[name] += time.perf_counter() - begin  # on the CPU: until it is done

    def all_reduce(self, x):
        """Sum over the ranks of a contiguous tensor, in place; returns it. Counts its bytes."""
        if self.world_size > 1:
            with self._counted("all_reduce", _bytes(x)):
                self.dist.all_reduce(x)
        return x

    def broadcast(self, x, source=0):
        """Gives every rank the values of the source's tensor, in place; returns it."""
        if self.world_size > 1:
            with self._counted("broadcast", _bytes(x) if self.rank == source else 0):
                self.dist.broadcast(x, source)
        return x

    def all_gather(self, x):
        """A list of the tensors of all ranks, by rank; they have one shape. Counts this rank's bytes."""
        if self.world_size == 1:
            return [x]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        with self._counted("all_gather", _bytes(x)):
            self.dist.all_gather(parts, x)
        return parts

    def all_to_all(self, x, sizes=None, received_sizes=None):
        """Rows of a tensor [n, ...] to all ranks: part r goes to rank r; returns the parts for this rank.

        Args: sizes: rows for each rank, in order, default equal parts; received_sizes: rows that come from
            each rank, default as many as go there.
        Returns: [sum of received_sizes, ...], by source. Counts the bytes that go to other ranks.
        Raises: ValueError for rows that do not divide, or sizes that do not add up to them.
        """
        W, n = self.world_size, x.shape[0]
        if sizes is None and n % W:
            raise ValueError(f"{n} rows cannot go to {W} ranks in equal parts")
        sizes = [n // W] * W if sizes is None else [int(size) for size in sizes]
        received_sizes = sizes if received_sizes is None else [int(size) for size in received_sizes]
        if sum(sizes) != n or len(sizes) != W or len(received_sizes) != W:
            raise ValueError(f"sizes {sizes} and {received_sizes} do not fit {n} rows and {W} ranks")
        if W == 1:
            return x
        x = x.contiguous()
        out = x.new_empty(sum(received_sizes), *x.shape[1:])
        others = n - sizes[self.rank]
        with self._counted("all_to_all", others * _bytes(x) // max(n, 1)):
            self.dist.all_to_all_single(out, x, received_sizes, sizes)
        return out

    def send(self, x, to):
        """Sends a tensor; the other rank receives one of its shape and type."""
        with self._counted("send", _bytes(x)):
            self.dist.send(x.contiguous(), to)

    def receive(self, x, source):
        """Fills a tensor with what `source` sends; returns it."""
        with self._counted("receive", 0):
            self.dist.recv(x, source)
        return x

    def start_send(self, x, to, tag=0):
        """Begins to send a contiguous tensor, which must stay as it is until wait() of what is returned."""
        with self._counted("send", _bytes(x)):
            return self.dist.isend(x, to, tag=tag)

    def start_receive(self, x, source, tag=0):
        """Begins to fill a contiguous tensor: returns a handle with wait() and is_completed()."""
        with self._counted("receive", 0):
            return self.dist.irecv(x, source, tag=tag)

    def shift(self, *tensors):
        """Begins to pass tensors to the next rank and to take the previous one's, around the ring.

        Returns: (the tensors that come, a function that waits until they are there).
        """
        following, previous = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        arriving = [torch.empty_like(x) for x in tensors]
        operations = [self.dist.P2POp(self.dist.isend, x.contiguous(), following) for x in tensors]
        operations += [self.dist.P2POp(self.dist.irecv, x, previous) for x in arriving]
        with self._counted("shift", sum(map(_bytes, tensors))):
            works = self.dist.batch_isend_irecv(operations)

        def finish():
            begin = time.perf_counter()
            for work in works:
                work.wait()
            self.seconds["shift"] += time.perf_counter() - begin

        return arriving, finish

    def barrier(self):
        """Returns on every rank once all have come. Not counted."""
        if self.world_size > 1:
            self.dist.barrier(self._control)

    # ---- From rank 0 ----

    def alone(self, function, *args):
        """function(*args) on this rank alone, with a rank's share of the cores: what one rank can do."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.n_threads)
        try:
            return function(*args)
        finally:
            torch.set_num_threads(threads)

    def run(self, function, *args):
        """function(team, *args) on every rank; returns what it returns on rank 0, where run() is called.

        Args: function: one that a file defines (it is sent by its name); args: what can be pickled.
        """
        return self._do("run", function, args)

    def gather(self, function, *args):
        """As run(), but a list of what every rank returns."""
        return self._do("gather", function, args)

    def _do(self, what, function, args):
        if self.world_size > 1:
            dist.broadcast_object_list([(what, function, args)], 0, self._control, torch.device("cpu"))
        return self._call(what, function, args)

    def _call(self, what, function, args):
        result = self.alone(function, self, *args)
        if what == "run" or self.world_size == 1:
            return result if what == "run" else [result]
        results = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(result, results, 0, self._control)
        return results

    def _follow(self):
        """What every rank but 0 does: what rank 0 asks for, until it is enough."""
        while True:
            task = [None]
            dist.broadcast_object_list(task, 0, self._control, torch.device("cpu"))
            if task[0] is None:
                return
            self._call(*task[0])


class Ranks:
    """with Ranks(world_size, device) as team: ...; a Team of that many processes, this one being rank 0.

    Args: world_size: ranks, from 1 (no process is started); device: torch.device of pick_ranks_device;
        timeout_s: how long a collective may take.
    Raises: ChildProcessError, an OSError, with one line for a rank that died, failed or does not answer;
        ValueError under torchrun for another world size than torchrun's.
    Under torchrun ranks above 0 end inside, with SystemExit, when rank 0 leaves.
    """

    context = multiprocessing.get_context("spawn")  # threads and CUDA do not survive a fork

    def __init__(self, world_size, device="cpu", timeout_s=TIMEOUT_S):
        self.world_size, self.device, self.timeout_s = world_size, torch.device(device), timeout_s
        self.processes, self.store, self._closed = [], None, threading.Event()
        if under_torchrun() and world_size != int(os.environ["WORLD_SIZE"]):
            raise ValueError(f"--world-size {world_size}, but torchrun started {os.environ['WORLD_SIZE']}")

    def __enter__(self):
        n_threads = max(1, torch.get_num_threads() // self.world_size)
        self._interface = os.environ.get(INTERFACE)  # which joining may set
        if self.world_size == 1 and not under_torchrun():
            return Team(0, 1, self.device, None, n_threads)
        try:
            if under_torchrun():
                rank = int(os.environ["RANK"])
                self.team = _join(rank, self.world_size, self.device, None, n_threads, self.timeout_s)
                if rank > 0:
                    _follow_quietly(self.team, None)
            else:
                self._start(n_threads)
            return self.team
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def _start(self, n_threads):
        """Starts the other ranks and waits until all have come."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))  # a free port, of this machine alone
        listener.listen(self.world_size)
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        for rank in range(1, self.world_size):
            args = (rank, self.world_size, self.device, port, n_threads, self.timeout_s)
            process = self.context.Process(target=_other_rank, args=args, name=f"rank {rank}", daemon=True)
            process.start()
            self.processes.append(process)
        threading.Thread(target=self._watch, daemon=True).start()
        begin = time.monotonic()
        while self.store.add("ready", 0) < self.world_size - 1:
            if self._first_dead() or time.monotonic() - begin > self.timeout_s:
                raise ChildProcessError("a rank did not start")
            time.sleep(0.01)
        self.team = _join(0, self.world_size, self.device, self.store, n_threads, self.timeout_s)

    def _first_dead(self):
        """What is known of the first rank that has ended though it should not have: one line, else None."""
        for rank, process in enumerate(self.processes, 1):
            if process.exitcode is None:
                continue
            if self.store.check([f"error {rank}"]):
                return f"rank {rank} failed: {self.store.get(f'error {rank}').decode()}"
            code = process.exitcode
            how = f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
            return f"rank {rank} ended before its work was done ({how})"
        return None

    def _watch(self):
        """Ends the run when a rank ends too early while this process is busy with other things.

        A collective would tell it at once, by an error that __exit__ translates; but it may be far away.
        """
        wait([process.sentinel for process in self.processes])
        if not self._closed.wait(GRACE_S):
            print(f"{os.path.basename(sys.argv[0])}: {self._first_dead()}", file=sys.stderr, flush=True)
            self._end_processes()
            os._exit(2)

    def _end_processes(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def __exit__(self, kind, error, _traceback):
        self._closed.set()
        line = None
        try:
            if error is None and self.world_size > 1:
                dist.broadcast_object_list([None], 0, self.team._control, torch.device("cpu"))
        except RuntimeError as lost:
            error = lost
        if isinstance(error, RuntimeError | ChildProcessError):
            line = self._why_lost(error)
        if error is None:
            for process in self.processes:
                process.join(10)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._end_processes()
        self.store = None  # closes the port
        if self._interface is None:
            os.environ.pop(INTERFACE, None)
        if line:
            raise ChildProcessError(line) from None

    def _why_lost(self, error):
        """One line for an error behind which there is a lost rank, else None."""
        lost = isinstance(error, ChildProcessError) or any(word in str(error) for word in LOST)
        if not lost:
            return None
        deadline = time.monotonic() + 3  # a connection closes before its process has ended
        while self.processes and time.monotonic() < deadline:
            if dead := self._first_dead():
                return dead
            time.sleep(0.01)
        text = " ".join(str(error).split())
        if "Timed out" in text or isinstance(error, ChildProcessError):
            return f"a rank did not answer within {self.timeout_s:g} s"
        return f"a rank is lost ({text[:100]})"


def _bytes(x):
    return x.numel() * x.element_size()


def _join(rank, world_size, device, store, n_threads, timeout_s):
    """This process as a rank: the group of the model's collectives, and one for what is to be done."""
    if not under_torchrun() and INTERFACE not in os.environ:
        loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        if loopback:  # the name of this machine may lead to an address that nobody answers at
            os.environ[INTERFACE] = loopback[0]
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    where = {} if store is None else {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **where)
    patience = timeout_s if rank == 0 else FOREVER
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
    return Team(rank, world_size, device, control, n_threads)


def _follow_quietly(team, store):
    """Follows rank 0 to the end, then ends this process: status 0, or 1 if a function failed here."""
    status = 0
    try:
        team._follow()
    except BaseException as error:
        status = 1
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if store is not None:
            with contextlib.suppress(RuntimeError):  # rank 0 may be gone
                store.set(f"error {team.rank}", text[:300])
        elif not isinstance(error, KeyboardInterrupt) and not any(word in text for word in LOST):
            print(f"rank {team.rank}: {text}", file=sys.stderr)
    if status == 0:
        dist.destroy_process_group()
        sys.exit(0)
    sys.stderr.flush()
    os._exit(status)  # a group that lost a rank may wait for ever at its end


def _other_rank(rank, world_size, device, port, n_threads, timeout_s):
    """The main function of a started process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what Ctrl-C means
    torch.set_num_threads(n_threads)

    def end_with_rank_0():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_rank_0, daemon=True).start()
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    store.add("ready", 1)
    _follow_quietly(_join(rank, world_size, device, store, n_threads, timeout_s), store)


# ---- Models on all ranks ----


class OnAllRanks(torch.nn.Module):
    """A model whose shards the ranks hold, for the code that knows one process: calls run on every rank.

    Args: team; name: under which every rank keeps its shard, a module, in team.kept; it has this rank's as
        `shard`, so its parameters are those of rank 0; function: what the ranks run, (team, name, *args).
    """

    def __init__(self, team, name, function=None):
        super().__init__()
        self.team, self.name, self.shard = team, name, getattr(team.kept, name)
        self.function = function or call_shard
        self.seqlen = self.shard.seqlen
        self.train(self.shard.training)  # a new module is in training mode, its parts with it: dropout

    def forward(self, *args):
        """What the function returns on rank 0 for these arguments, with all ranks taking part."""
        return self.team.run(self.function, self.name, *args)


def call_shard(team, name, *args):
    """Calls the module team.kept.name without gradients, with tensors moved to the rank's device."""
    args = [arg.to(team.device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    with torch.no_grad():
        return getattr(team.kept, name)(*args)


def shard_ms(team, name, n_calls, *args):
    """Median time in ms of a call of the module team.kept.name, after a warm-up. To be run on every rank."""
    args = [arg.to(team.device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    times = []
    for _ in range(n_calls + 1):
        team.barrier()
        begin = time.perf_counter()
        call_shard(team, name, *args)
        synchronize(team.device)
        times.append(1000 * (time.perf_counter() - begin))
    return median(times[1:])


def shards_ms(team, name, n_calls, *args):
    """shard_ms of the rank that takes longest: a result is there when all have done their part. On rank 0."""
    return max(team.gather(shard_ms, name, n_calls, *args))


def busy_share(team, name, function, *args):
    """function(team, *args): which share of its time this rank spends inside the module team.kept.name."""
    module, spent, begun = getattr(team.kept, name), [], []
    hooks = [
        module.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter())),
        module.register_forward_hook(lambda *_: spent.append(time.perf_counter() - begun[-1])),
    ]
    team.barrier()
    total = counted(team, function, *args).total_seconds
    for hook in hooks:
        hook.remove()
    return sum(spent) / total


def idle_of(team, name, function, *args):
    """The share of the ranks' time that they spend outside the module team.kept.name; on rank 0."""
    return 1 - sum(team.gather(busy_share, name, function, *args)) / team.world_size


def function_ms(team, n_calls, function, *args):
    """Median time in ms of function(team, *args) on all ranks, after a warm-up; on rank 0."""
    return median([1000 * team.run(counted, function, *args).total_seconds for _ in range(n_calls + 1)][1:])


def group_figures(runs_ms, n_groups):
    """TTFT and TPOT of a row whose sequences go in groups: a sequence gets a token when its turn comes again.

    Args: runs_ms: the steps of each run, as a Measurement has them, one for each group in turn.
    """
    turns = [[sum(run[i : i + n_groups]) for i in range(0, len(run), n_groups)] for run in runs_ms]
    first, later = [run[0] for run in turns], [ms for run in turns for ms in run[1:]]
    figures = {"ttft_ms": median(first), "ttft_ms_spread": (min(first), max(first))}
    if later:
        medians = [median(run[1:]) for run in turns]
        figures |= {"tpot_ms": median(later), "tpot_ms_spread": (min(medians), max(medians))}
        figures["tpot_p99_ms"] = percentile(later, 99)
    return figures


def split_ms(team, name, module, x, n_calls, repeats, column, times, n_numbers):
    """A line {"one process": ms, "2 ranks": ms, column: ms} of module(x) and of the shards team.kept.name.

    Args: column: for what so many all-reduces of so many numbers take.
    """
    with torch.no_grad():
        line = alternating_ms({"one process": lambda: module(x)}, repeats, team.device)
    line[named(team.world_size)] = shards_ms(team, name, n_calls, x)
    return line | {column: times * team.run(collective_ms, "all_reduce", n_numbers, n_calls)}


def steps_by_batch(report, team, model, text, prompt_len, sizes):
    """Adds a table of decode steps in one process behind a prompt, by the number of sequences.

    Beside the whole step that of a group, which has a W-th of the sequences, and W messages of what a group's
    tokens are between two layers. Returns: rows {"sequences", "one process", "a group", "its sends"}, in ms.
    """
    rows, W = [], team.world_size
    for n in sizes:
        steps = {}
        for name, k in (("one process", n), ("a group", n // W)):
            prompts = text.prompts(k, prompt_len)
            steps[name] = partial(model, prompts[:, -1:], model(prompts)[1])
        line = alternating_ms(steps, report.args.repeats, team.device)
        n_numbers = n // W * model.ln.weight.numel()
        line["its sends"] = W * team.run(collective_ms, "send", n_numbers, 20) if W > 1 else 0.0
        rows.append({"sequences": n} | line)
    return report.sweep("A decode step: time (ms)", rows)


Counted = namedtuple("Counted", "result calls sent_bytes seconds total_seconds")


def counted(team, function, *args):
    """function(team, *args) with this rank's counters from zero: its result, the counters and the time."""
    team.reset_counts()
    begin = time.perf_counter()
    result = function(team, *args)
    synchronize(team.device)
    total = time.perf_counter() - begin
    return Counted(result, dict(team.calls), dict(team.sent_bytes), dict(team.seconds), total)


def profiled(team, name, *args):
    """What PyTorch's profiler sees of a call of team.kept.name: {collective: [numbers of each call]}."""
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        call_shard(team, name, *args)
    found = {}
    for event in profile.function_events:
        library, _, kind = event.name.partition(":")
        if library in ("gloo", "nccl"):
            found.setdefault(kind, []).append(sum(map(math.prod, event.input_shapes)))
    return found


def n_held(model):
    """Parameters that this rank holds of a model, of a DTensor its own part."""
    return sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())


def compare_shard(report, label, team, name, model, prompts):
    """A line of a table on the shards team.kept.name of a model; adds checks that they compute what it does.

    Args: model: token ids [B, T] -> logits [B, T, V], cache; label: what the shards are, for the checks.
    Returns: {"weights", "of a rank", "KV B/token", "on a rank", "all-reduces", "B/token"}: parameters, bytes
        of cache, and what PyTorch's profiler sees that a rank hands over in a pass of the prompts.
    """
    logits, cache = model(prompts)
    found, *others = team.gather(call_shard, name, prompts)
    same = all(torch.equal(other[0].cpu(), found[0].cpu()) for other in others)
    report.check(f"{label}: all ranks have the same logits, bit for bit", same)
    report.check_close(f"{label}: logits of {named(team.world_size)} and of one process", found[0], logits)
    sent = team.run(profiled, name, prompts).get("all_reduce", [])
    line = {"weights": n_held(model), "of a rank": max(team.gather(_n_held_of, name))}
    for key, one in (("KV B/token", cache), ("on a rank", found[1])):
        line[key] = cache_bytes(one) // prompts.numel()
    n_bytes = sum(sent) * logits.element_size()
    return line | {"all-reduces": len(sent), "B/token": n_bytes // prompts.numel()}


def _n_held_of(team, name):
    return n_held(getattr(team.kept, name))


# ---- What a collective costs ----


def collective_ms(team, kind, n_numbers, n_calls=50):
    """Median time in ms of one collective of float32 numbers, on rank 0. To be run on every rank.

    Args: kind: all_reduce, all_gather, all_to_all, broadcast, or send (to the next rank and back, halved);
        n_numbers: of the tensor of a rank.
    """
    W = team.world_size
    x = torch.zeros(-(-n_numbers // W) * W if kind == "all_to_all" else n_numbers, device=team.device)

    def call():
        if kind == "send":
            if team.rank == 0:
                dist.send(x, 1)
                dist.recv(x, 1)
            elif team.rank == 1:
                dist.recv(x, 0)
                dist.send(x, 0)
        else:
            getattr(team, kind)(x)
        synchronize(team.device)

    counters = team.calls, team.sent_bytes, team.seconds
    team.reset_counts()
    times = []
    for i in range(n_calls + 5):
        begin = time.perf_counter()
        call()
        if i >= 5:  # connections are made by the first calls
            times.append(1000 * (time.perf_counter() - begin))
    team.calls, team.sent_bytes, team.seconds = counters
    return median(times) / (2 if kind == "send" else 1)


def collective_sweep(team, kind, sizes, n_calls=50):
    """Rows {"KB": ..., "ms": ...} of collective_ms over sizes in float32 numbers; called on rank 0."""
    return [{"KB": 4 * n / 1000, "ms": team.run(collective_ms, kind, n, n_calls)} for n in sizes]
