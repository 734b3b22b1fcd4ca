"""Offloading: the weights of the blocks lie outside the device's memory, and come when their turn is.

A step uses one block after the other, so the device needs the weights of one, not of all. Here it has room
for two: while a block is computed from one buffer, the next block's weights are copied into the other. On
CUDA the weights lie in the host's pinned memory and a stream of its own copies them; on a CPU they lie in a
file that is mapped into memory, and a thread reads it.

Exact, bit for bit: the same weights in the same operations. Wins memory: two blocks instead of all, so models
run that do not fit. Loses time: no step is shorter than the copying of all its blocks, which the few tokens
of a decode step do not fill. The more tokens a step has, the more of the copying is hidden behind computing:
offloading is for large batches and long prompts, not for one conversation. On a CPU, copying also takes from
the cores and the memory's bandwidth what computing needs, and what is hidden on a GPU is not there.

Run: python main_offloading.py

Source: Aminabadi et al., DeepSpeed Inference (ZeRO-Inference), 2022; Sheng et al., FlexGen, 2023.
"""

import mmap
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import torch
import torch.nn as nn

# ---- Where the weights lie: one row a block, so that a block is one copy ----


def flatten(block):
    """All weights of a block in one row [n]."""
    return torch.cat([p.detach().flatten() for p in block.parameters()])


def in_file(blocks, file):
    """The weights of all blocks in a file that is mapped into memory: [L, n], read when they are touched.

    Args: file: open for reading and writing, not to be cut off while the weights are used.
    """
    first = flatten(blocks[0])  # [n]
    file.truncate(len(blocks) * first.nbytes)
    rows = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=first.dtype).view(len(blocks), -1)  # [L, n]
    for row, block in zip(rows, blocks, strict=True):
        row.copy_(flatten(block))
    return rows


def in_host_memory(blocks, pinned=True):
    """The weights of all blocks in the host's memory: [L, n].

    Args: pinned: True locks their pages in place; only from such pages does a GPU copy while it computes.
    """
    first = flatten(blocks[0])  # [n]
    rows = torch.empty(len(blocks), len(first), dtype=first.dtype, pin_memory=pinned)  # [L, n]
    for row, block in zip(rows, blocks, strict=True):
        row.copy_(flatten(block))
    return rows


# ---- The blocks ----


class LoadedBlocks(nn.Module):
    """The blocks of a model in one buffer: the weights of a block are copied, then it is computed, in turns.

    Stands in for the model's list of blocks: iterating gives them in order, each to be used before the next.

    Args: blocks: on the device, of one shape; rows: their weights [L, n], outside the device's memory.
    Raises ValueError for rows of another number or size, and when it is to be moved.
    """

    n_buffers = 1

    def __init__(self, blocks, rows):
        super().__init__()
        sizes = [p.numel() for p in blocks[0].parameters()]
        if rows.shape != (len(blocks), sum(sizes)):
            raise ValueError(f"weights {list(rows.shape)} for {len(blocks)} blocks of {sum(sizes)} numbers")
        self.rows, weight = rows, blocks[0].ln1.weight
        self.memory = [weight.new_empty(sum(sizes)) for _ in range(self.n_buffers)]  # buffers, [n] each
        self.slots = nn.ModuleList(deepcopy(blocks[0]).requires_grad_(False) for _ in self.memory)
        for block, buffer in zip(self.slots, self.memory, strict=True):
            for p, view in zip(block.parameters(), buffer.split(sizes), strict=True):
                p.data = view.view(p.shape)  # what is copied into the buffer is the block's weight

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        for row in self.rows:  # [n]
            self.memory[0].copy_(row)
            yield self.slots[0]

    def _apply(self, fn, recurse=True):  # of to(), half(), cuda(): they would part weights from buffers
        raise ValueError("move the model to its device and type before its blocks are offloaded")


class StreamedBlocks(LoadedBlocks):
    """LoadedBlocks with two buffers: while a block is computed, the next one's weights are copied.

    Behind the last block comes the first one, for the next step. What a buffer has is kept from pass to pass,
    and counts from the end of its copy on, so a pass may end early (an error, a caller that stops).

    Args: copier: what copies beside computing, by default StreamCopier for CUDA, ThreadCopier elsewhere.
    """

    n_buffers = 2

    def __init__(self, blocks, rows, copier=None):
        super().__init__(blocks, rows)
        device = self.memory[0].device
        self.copier = copier or (StreamCopier(device) if device.type == "cuda" else ThreadCopier())
        self.layers, self.copies = [None, None], [None, None]  # what each buffer has or gets, by which copy
        self.current = 0

    def fetch(self, layer):
        """Starts to copy a block's weights into the buffer that is not in use, unless a buffer gets them."""
        if layer not in self.layers:
            slot = 1 - self.current
            self.layers[slot] = None  # should the start fail
            self.copies[slot] = self.copier.start(self.memory[slot], self.rows[layer])
            self.layers[slot] = layer

    def __iter__(self):
        for layer in range(len(self)):
            self.fetch(layer)  # in the first pass, and after one that ended early
            self.current = slot = self.layers.index(layer)
            self.fetch((layer + 1) % len(self))  # the block that had the other buffer has been computed
            self.layers[slot] = None  # until its copy is known to have ended well
            self.copier.wait(self.copies[slot])
            self.layers[slot] = layer
            yield self.slots[slot]


class ThreadCopier:
    """Copies by a thread, one after the other. Who starts a copy has finished with what the buffer had."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(max_workers=1)

    def start(self, buffer, row):
        return self.thread.submit(buffer.copy_, row)

    def wait(self, copy):
        copy.result()


class StreamCopier:
    """Copies by a CUDA stream of its own; nothing waits on the host, the two streams wait for each other."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device)

    def start(self, buffer, row):
        self.stream.wait_stream(torch.cuda.current_stream())  # for the blocks that were computed so far
        with torch.cuda.stream(self.stream):
            buffer.copy_(row, non_blocking=True)
            return self.stream.record_event()

    def wait(self, copy):
        torch.cuda.current_stream().wait_event(copy)


def offload(model, rows, blocks_class=StreamedBlocks):
    """Takes the weights of a model's blocks out of its device's memory, in place; the rest stays there.

    Args: model: whose forward iterates over model.blocks; rows: of in_file or in_host_memory.
    Returns: the model. Raises ValueError for a weight that blocks share: in two rows it would be two.
    """
    owners = {}  # address of a weight: who has it
    for name, p in model.named_parameters(remove_duplicate=False):
        owner = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "the rest of the model"
        if owners.setdefault(p.data_ptr(), owner) != owner:
            raise ValueError(f"{owners[p.data_ptr()]} and {owner} share a weight: it would become two")
    model.blocks = blocks_class(model.blocks, rows)
    return model


if __name__ == "__main__":
    import tempfile
    from collections import deque
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache
    from inference_cost import disk_bytes_per_s
    from inference_report import Method
    from inference_utils import median_ms, weight_bytes
    from main_kvcache import generate_kvcache

    sizes = [4**i for i in range(7)]  # tokens of a step
    parser = harness.options(__doc__, prompt_len=64, n_tokens=64, quick={"n_tokens": 8, "max_step": 16})
    parser.add_argument("--max-step", type=int, choices=sizes, default=1024, help="most tokens of a step")
    columns = {"weight_mb": ("weights MB", "{:.1f}")}
    with harness.script(parser) as args, tempfile.TemporaryFile() as file:
        sizes, cuda = sizes[: sizes.index(args.max_step) + 1], args.device.type == "cuda"
        text, names = harness.load_text(args), ("resident", "one buffer", "two buffers")
        ways = dict(zip(names, harness.load_models(args, *[GPTlite_KVCache] * 3, packed=False), strict=True))
        resident, loaded, streamed = ways.values()
        report = harness.Report(args, "offloading", resident, columns, ["n_parameters"], text)
        blocks, L = resident.blocks, len(resident.blocks)
        rows = in_host_memory(blocks) if cuda else in_file(blocks, file)  # [L, n]
        offload(loaded, rows, LoadedBlocks)
        offload(streamed, rows)
        mb = {name: weight_bytes(model) / 1e6 for name, model in ways.items()}
        methods = [Method(name, generate_kvcache, ways[name], weight_mb=mb[name]) for name in names]
        table = report.compare(text.prompts(1, args.prompt_len), args.n_tokens, *methods, label="")
        saved = weight_bytes(resident) - weight_bytes(streamed)
        name = f"of {L} blocks the device holds two: {saved / 1e6:.1f} MB less"
        report.check(name, saved == (L - 2) * rows[0].nbytes)

        def steps(n):
            """{way: one forward over n tokens, in sequences of at most 64}, and copying without computing"""
            tokens = text.prompts(max(n // 64, 1), min(n, 64))  # [B, T]
            runs = {name: partial(model, tokens) for name, model in ways.items()}
            return runs | {"copying alone": partial(deque, streamed.blocks, 0)}

        with torch.no_grad():
            tokens = text.prompts(3, resident.seqlen)  # [B, T]
            for name in names[1:]:
                same = torch.equal(ways[name](tokens)[0], resident(tokens)[0])
                report.check(f"{name}: the logits are those of resident weights, bit for bit", same)
            lines = report.time_sweep("One step: time (ms)", "tokens", sizes, steps)
        for line in lines:
            compute, both, copy = (line[name] for name in ("resident", "two buffers", "copying alone"))
            line["hidden"] = round(min(max((copy + compute - both) / min(copy, compute), 0.0), 1.0), 2)
            line["times resident"] = both / compute

        block_ms = {"pinned memory" if cuda else "file, page cache": lines[0]["copying alone"] / L}
        if cuda:
            ordinary = in_host_memory(blocks[:1], pinned=False)[0]  # [n]
            copy = partial(loaded.blocks.memory[0].copy_, ordinary)
            block_ms["memory not pinned"] = median_ms(copy, args.repeats, args.device)
        if from_disk := disk_bytes_per_s(rows[0].nbytes):
            block_ms["file, disk"] = 1000 * rows[0].nbytes / from_disk
        copies = []
        for name, ms in block_ms.items():
            enough = [line["tokens"] for line in lines if line["resident"] >= L * ms]
            copy = {"where the weights are": name, "GB/s": rows[0].nbytes / ms / 1e6, "a step": L * ms}
            copies.append(copy | {"computing as long: tokens": min(enough, default=None)})
        report.sweep(f"Copying {L} blocks of {rows[0].nbytes / 1e6:.1f} MB: time (ms)", copies)

        one, two, base = table["one buffer"], table["two buffers"], table["resident"]
        report.why(words.compare(two, base, "peak_memory_mb") + words.compare(two, base))
        report.why(words.compare(two, one))
        report.why(words.hidden(lines[0], lines[-1], "tokens"))
        report.why(words.stops_costing(lines, "tokens", "two buffers", "resident"))
        report.plot_sweep("One step: time (ms)", names=[*names, "copying alone"])
        report.finish()
