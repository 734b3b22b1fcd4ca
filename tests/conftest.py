"""Fixtures and settings of all tests."""

import os
import signal

# two test processes share the cores (pyproject.toml): a thread that waits must not keep one busy
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton, whose interpreter is chosen then
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

from gptlite import GPTlite
from inference_utils import GPTLITE_CKPT_PATH, GPTLITE_DISTILLED_CKPT_PATH, make_model

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a background job: the tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("collection", deadline=None, max_examples=25)
settings.load_profile("collection")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(skip)


def trained_or_random(path, folder, distilled):
    """The file of trained weights where it is there, else random weights of the same size and form."""
    if path.is_file():
        return path
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_model(GPTlite, 96, distilled)
    path = folder / path.name
    torch.save(model.half().state_dict(), path)
    return path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Path of a checkpoint of GPTlite; it is GPTLITE_CKPT_PATH only if that is trained."""
    return trained_or_random(GPTLITE_CKPT_PATH, tmp_path_factory.mktemp("checkpoint"), False)


@pytest.fixture(scope="session")
def distilled_checkpoint(tmp_path_factory):
    """Path of a checkpoint of the distilled GPTlite, trained where there is one."""
    return trained_or_random(GPTLITE_DISTILLED_CKPT_PATH, tmp_path_factory.mktemp("distilled"), True)
