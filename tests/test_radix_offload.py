"""Second and third level of the radix cache: pages come back bit for bit or not at all."""

import random
import shutil
from tempfile import TemporaryDirectory

import pytest
import torch
from helpers import random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from test_main_block_cache import PAGED, alone, assert_clean, run, tree_of_texts
from test_main_radix_cache import assert_contents, make_scheduler

import inference_pages
from gptlite_blocks import block_keys
from gptlite_paged import BlockPool, GPTlite_Paged
from inference_pages import PageStore, fingerprint
from inference_scheduling import PagedScheduler
from radix_offload import OffloadingCache


def poisoned(n_slots, store, page_size=4, model=PAGED):
    cache = OffloadingCache(model, n_slots, store, page_size)
    cache.kv.fill_(float("nan"))
    return cache


def page_of(number):
    return torch.full((2, 4, 2, 2, 16), float(number), dtype=torch.float64)  # [L, P, 2, H, D]


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(0, 6), st.sampled_from([None, 0, 2, 99]))
def test_every_request_gets_what_it_gets_alone(seed, page_size, n_host, n_files):
    """Smallest pools, host memory from none to little, files from none to many; all of it finds its way."""
    draw = random.Random(seed)
    with TemporaryDirectory() as folder:
        store = PageStore(n_host, None if n_files is None else folder, n_files or 0)
        cache = poisoned(draw.randint(16, 24), store, page_size)
        scheduler = make_scheduler(PAGED, cache, draw.random() < 0.5, max_running=draw.randint(1, 4))
        requests = tree_of_texts(draw, 10)
        sequences = run(scheduler, requests)
        for i, (ids, n) in enumerate(requests):
            assert sequences[i].ids == alone(ids, n, i)
        assert_clean(cache)
        assert_contents(cache)
        assert len(store.host) <= n_host
        assert len(store.files) <= (n_files or 0)
        assert len(list(store.folder.glob("*")) if store.folder else []) == len(store.files)


@pytest.mark.parametrize(("n_host", "level"), [(99, "host"), (0, "file")])
def test_what_was_evicted_comes_back_bit_for_bit(n_host, level, tmp_path):
    """A of 13 tokens is thrown out by B and comes back: three pages of four, the rest is computed."""
    a, b = [1, *random_tokens(1, 12)[0].tolist()], [2, *random_tokens(1, 14, 1)[0].tolist()]
    cache = poisoned(16, PageStore(n_host, tmp_path))
    scheduler = PagedScheduler(PAGED, cache)
    assert run(scheduler, [(a, 2)])[0].ids == alone(a, 2)
    before = cache.kv[:, cache.match([*a, 0])[:12]].clone()
    run(scheduler, [(b, 1)])
    assert cache.n_found([*a, 0]) < 12
    in_tree = cache.n_found(a)
    assert run(scheduler, [(a, 3)])[0].ids == alone(a, 3)
    assert scheduler.found[-1] == (0, 13, 12)
    assert cache.n_loaded == {"host": 0, "file": 0} | {level: 12 - in_tree}
    assert torch.equal(cache.kv[:, cache.match([*a, 0])[:12]], before)
    assert_contents(cache)


def test_a_page_that_only_partly_left_is_completed():
    """The tree keeps 2 tokens of a page, the page brings the other 2; a text that differs there gets none."""
    a, cache = [1, 2, 3, 4, 5, 6, 7, 8], poisoned(16, PageStore(9))
    scheduler = PagedScheduler(PAGED, cache)
    run(scheduler, [(a, 1)])
    cache.evict(6)
    assert cache.n_found([*a, 0]) == 2 and len(cache.store.host) == 2
    other = [1, 2, 3, 9, 5, 6]
    assert run(scheduler, [(other, 2)])[0].ids == alone(other, 2)
    assert cache.n_loaded["host"] == 0
    assert run(scheduler, [([*a, 3], 2)])[0].ids == alone([*a, 3], 2)
    assert scheduler.found[-1] == (0, 9, 8)  # 3 of them came from the other text
    assert cache.n_loaded["host"] == 5
    assert_contents(cache)


def test_a_prompt_that_is_stored_as_a_whole_computes_its_last_page():
    a, cache = random_tokens(1, 8)[0].tolist(), poisoned(16, PageStore(9))
    scheduler = PagedScheduler(PAGED, cache)
    run(scheduler, [(a, 1)])
    cache.evict(8)
    assert run(scheduler, [(a, 2)])[0].ids == alone(a, 2)
    assert cache.n_loaded["host"] == 4  # of two pages: one token at least is computed, and pages are whole


def test_levels_and_order(tmp_path):
    """The least recently used page leaves host memory for a file, and the least recent file goes."""
    store = PageStore(2, tmp_path, n_files=2)
    keys = list(block_keys(list(range(6)), 1))
    for number, key in enumerate(keys[:5]):
        store.put(key, page_of(number))
    assert list(store.host) == keys[3:5] and list(store.files) == keys[1:3]
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(key.hex() for key in keys[1:3])
    assert keys[0] not in store and store.get(keys[0], page_of(0)) == (None, None)
    page, level = store.get(keys[3], page_of(0))
    assert level == "host" and torch.equal(page, page_of(3))
    page, level = store.get(keys[2], page_of(0))
    assert level == "file" and torch.equal(page, page_of(2))
    assert list(store.host) == [keys[4], keys[2]] and keys[3] in store.files
    store.touch([keys[4], keys[2]])
    assert list(store.host) == [keys[2], keys[4]]


@pytest.mark.parametrize("damage", ["a bit", "cut", "empty", "gone", "another page's"])
def test_damaged_files_are_not_used(damage, tmp_path):
    store = PageStore(0, tmp_path)
    one, other = block_keys([1, 2], 1)
    for number, key in enumerate((one, other)):
        store.put(key, page_of(number))
    path, content = store.path(one), store.path(one).read_bytes()
    flipped = content[:40] + bytes([content[40] ^ 4]) + content[41:]
    another = store.path(other).read_bytes()
    path.write_bytes({"a bit": flipped, "cut": content[:-8], "another page's": another}.get(damage, b""))
    if damage == "gone":
        path.unlink()
    assert store.get(one, page_of(0)) == (None, None)
    assert store.n_damaged == 1 and one not in store and not path.exists()
    page, level = store.get(other, page_of(0))
    assert level == "file" and torch.equal(page, page_of(1))


def test_files_of_another_shape_or_model_are_not_used(tmp_path):
    store = PageStore(0, tmp_path)
    (key,) = block_keys([1], 1)
    store.put(key, page_of(0))
    assert store.get(key, page_of(0)[:, :2]) == (None, None)
    marks = {
        fingerprint(m) for m in (PAGED, tiny_model(GPTlite_Paged, seed=1), tiny_model(GPTlite_Paged).float())
    }
    assert len(marks) == 3 and fingerprint(tiny_model(GPTlite_Paged)) in marks


def test_another_process_finds_the_files(tmp_path):
    """Same folder and model: the pages are found; with another fingerprint none is."""
    a = random_tokens(1, 13)[0].tolist()
    first = poisoned(16, PageStore(0, tmp_path))
    run(PagedScheduler(PAGED, first), [(a, 2)])
    first.evict(14)
    assert len(list(tmp_path.iterdir())) == 3
    for model, n_loaded in ((PAGED, 12), (tiny_model(GPTlite_Paged, seed=1), 0)):
        cache = poisoned(16, PageStore(0, tmp_path), model=model)
        fresh = PagedScheduler(model, BlockPool(model, 16, 1))
        assert run(PagedScheduler(model, cache), [(a, 2)])[0].ids == run(fresh, [(a, 2)])[0].ids
        assert cache.n_loaded["file"] == n_loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_of_every_type(dtype, tmp_path):
    page, store = torch.randn(2, 4, 2, 2, 16).to(dtype), PageStore(0, tmp_path)
    (key,) = block_keys([1], 1)
    store.put(key, page)
    back, _ = store.get(key, page)
    assert back.dtype == dtype and torch.equal(back, page)


@pytest.mark.parametrize("trouble", ["a file", "unwritable", "full disk", "removed later"])
def test_trouble_with_files_costs_speed_only(trouble, tmp_path, monkeypatch):
    """The folder is a file, may not be written, is full, or vanishes: every request is served."""
    folder = tmp_path / "pages"
    if trouble == "a file":
        folder.write_text("a file where a folder is needed")
    else:
        folder.mkdir()

    def fail(*_):
        raise OSError(28, "No space left on device")

    if trouble in ("full disk", "unwritable"):  # for root every folder is writable: the call fails instead
        monkeypatch.setattr(inference_pages, "write_atomically", fail)
    store = PageStore(0, folder)
    cache = poisoned(16, store)
    scheduler = PagedScheduler(PAGED, cache)
    a, b = [1, *random_tokens(1, 12)[0].tolist()], [2, *random_tokens(1, 14, 1)[0].tolist()]
    for ids in (a, b, a, b):
        n = 2 if ids is a else 1
        assert run(scheduler, [(ids, n)])[0].ids == alone(ids, n)
        if trouble == "removed later":
            shutil.rmtree(folder)
            folder.write_text("in its place")
            trouble = "a file"
    assert store.n_lost + store.n_damaged > 0
    assert cache.n_loaded["file"] == 0
    assert_clean(cache)


def test_a_page_that_comes_from_the_tree_again_is_the_most_recent():
    """Of two pages in host memory the first is generated and evicted anew: the other one has to go."""
    store, texts = PageStore(2), ([1, 1, 1, 1], [2, 2, 2, 2], [1, 1, 1, 1], [3, 3, 3, 3])
    cache = poisoned(16, store)
    for ids in texts:
        slots = cache.allocate(4)
        cache.insert(ids, slots)
        cache.release(slots)
        cache.evict(4)
    first, second = (next(block_keys(ids, 4, cache.root_key)) for ids in texts[:2])
    assert first in store and second not in store


@pytest.mark.cuda
def test_on_cuda(tmp_path):
    model = tiny_model(GPTlite_Paged).cuda()
    a, b = [1, *random_tokens(1, 12)[0].tolist()], [2, *random_tokens(1, 14, 1)[0].tolist()]
    cache = OffloadingCache(model, 16, PageStore(1, tmp_path), 4)
    scheduler = PagedScheduler(model, cache)
    for ids in (a, b, a, b):
        assert run(scheduler, [(ids, 2 if ids is a else 1)])[0].ids == alone(ids, 2 if ids is a else 1)
    assert sum(cache.n_loaded.values()) > 0


# The script


@pytest.mark.slow
def test_script(checkpoint, tmp_path):
    figure = tmp_path / "levels.png"
    options = ["--quick", "--json", "-", "--plot", figure]
    run = run_script("more/radix_offload.py", *options, checkpoint=checkpoint)
    assert run.status == 0, run.stdout + run.stderr
    assert figure.stat().st_size > 1000
    assert run.json["checks"] and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert all(row["same_output"] for row in rows.values())
    for name in ("documents", "chats"):
        levels = [rows[f"{name}: {way}"] for way in ("no cache", "tree", "tree, host", "tree, host, files")]
        computed = [row["forward_tokens"] for row in levels]
        assert computed == sorted(computed, reverse=True) and computed[-1] < computed[1]
        assert levels[3]["n_file"] > 0 and levels[2]["n_host"] > 0
    (lines,) = run.json["sweeps"].values()
    assert [line["computed"] for line in lines] == [200, 8, 8, 8]


def test_pages_of_other_heads_and_files_of_others(tmp_path):
    """The same weights cut into other heads are another model; a foreign file in the folder is left alone."""
    one, other = (tiny_model(GPTlite_Paged, n_heads=n, d_head=32 // n) for n in (2, 4))
    assert fingerprint(one) != fingerprint(other)
    for name in ("notes.kv", "abc.kv"):
        (tmp_path / name).write_text("of somebody else")
    assert not PageStore(1, tmp_path).files


def test_script_refuses_workloads_that_never_reach_the_files(checkpoint):
    run = run_script("more/radix_offload.py", "--quick", "--n-requests", "3", checkpoint=checkpoint)
    assert run.status == 2 and len(run.stderr.splitlines()) == 1 and "from 8 on" in run.stderr
