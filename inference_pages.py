"""Pages of keys and values outside of the model's memory: in host memory, then in files.

PageStore keeps them under their keys, fingerprint() is what makes keys know the weights. It is optional by
nature: an error of files costs what they would have saved.
"""

import hashlib
import re
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import torch

from inference_utils import write_atomically


def to_bytes(tensor):
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def fingerprint(model):
    """32 bytes that differ for other weights, heads or types: pages of another model are never found."""
    mha = model.blocks[0].mha
    digest = hashlib.sha256(f"{type(model).__name__} {mha.n_heads} {mha.d_head}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(to_bytes(tensor))
    return digest.digest()


class PageStore:
    """Pages under their keys: the most recently used in host memory, others in files.

    Args: n_host: pages in host memory at most; folder: where files go, None for no files; n_files: files
        at most. The least recently used page leaves a level first. Files that are there already are used.
        A folder that cannot be read or written, or a full disk, loses pages and raises nothing.
    """

    def __init__(self, n_host, folder=None, n_files=10**6):
        self.n_host, self.n_files, self.folder = n_host, n_files, folder and Path(folder)
        self.host, self.files = OrderedDict(), OrderedDict()  # key -> page [L, P, 2, H, D]; key -> None
        self.n_damaged = self.n_lost = self.bytes_written = self.bytes_read = 0  # of files
        with suppress(OSError):
            found = sorted(path.stem for path in self.folder.glob("*.kv")) if folder else []
            ours = [stem for stem in found if re.fullmatch("([0-9a-f]{2})+", stem)]
            self.files = OrderedDict.fromkeys(map(bytes.fromhex, ours))

    def path(self, key):
        return self.folder / f"{key.hex()}.kv"

    def __contains__(self, key):
        return key in self.host or key in self.files

    def touch(self, keys):
        """Makes the pages of a text the most recently used, the first one last: the others need it."""
        for level in (self.host, self.files):
            for key in reversed(keys):
                if key in level:
                    level.move_to_end(key)

    def put(self, key, page):
        """Keeps a page in host memory; the least recently used ones there go to files."""
        self.host[key] = page
        self.host.move_to_end(key)
        while len(self.host) > self.n_host:
            oldest, page = self.host.popitem(last=False)
            if self.folder and oldest not in self.files:
                self.write(oldest, page)

    def write(self, key, page):
        """A file is the hash of key and data, then the data; it is there as a whole or not at all."""
        data = to_bytes(page)
        check = hashlib.sha256(key + data).digest()
        try:
            write_atomically(self.path(key), lambda path: path.write_bytes(check + data))
        except OSError:
            self.n_lost += 1
            return
        self.files[key] = None
        self.bytes_written += len(data)
        while len(self.files) > self.n_files:
            self.remove(next(iter(self.files)))

    def remove(self, key):
        del self.files[key]
        with suppress(OSError):
            self.path(key).unlink(missing_ok=True)

    def read(self, key, like):
        """The page of a file, or None if the file is gone or not what was written; then it is forgotten."""
        content = b""
        with suppress(OSError):
            content = self.path(key).read_bytes()
        check, data = content[:32], content[32:]
        if check != hashlib.sha256(key + data).digest() or len(data) != like.numel() * like.element_size():
            self.remove(key)
            self.n_damaged += 1
            return None
        self.bytes_read += len(data)
        return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape)  # [L, P, 2, H, D]

    def get(self, key, like):
        """(page, "host" or "file"), or (None, None). like: a tensor of a page's shape and type."""
        if key in self.host:
            return self.host[key], "host"
        page = self.read(key, like) if key in self.files else None
        if page is None:
            return None, None
        self.put(key, page)
        return page, "file"
