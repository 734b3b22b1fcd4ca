"""What masks do to the distribution: probabilities by hand, and the script itself."""

import pytest
import torch
from helpers import assert_close, run_script

from main_structured_decoding import Guide
from structured_distribution import CASES, expected_tries, text_probabilities


def fixed_model(*probabilities):
    """A model with these probabilities at each position."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log()
    return lambda tokens: logits.expand(*tokens.shape, -1)


def test_by_hand():
    """Tokens a, b and the end with 0.6, 0.3, 0.1; the texts aa, ab and b."""
    guide, prompt = Guide("aa|ab|b", "ab$", "$"), torch.tensor([0, 1])
    p, q = text_probabilities(fixed_model(0.6, 0.3, 0.1), prompt, [[0, 0, 2], [0, 1, 2], [1, 2]], guide)
    assert_close(p, torch.tensor([0.6 * 0.6 * 0.1, 0.6 * 0.3 * 0.1, 0.3 * 0.1], dtype=torch.float64))
    assert_close(q, torch.tensor([4 / 9, 2 / 9, 1 / 3], dtype=torch.float64))
    free, masked = expected_tries(p, q)
    assert free == pytest.approx(1 / 0.084) and masked == pytest.approx(0.09 / 0.084)


def test_masks_change_nothing_where_all_texts_are_equally_cut():
    """One character and the end: what is cut off is the same for each text."""
    guide, prompt = Guide("a|b", "abc$", "$"), torch.tensor([2])
    p, q = text_probabilities(fixed_model(0.2, 0.4, 0.3, 0.1), prompt, [[0, 3], [1, 3]], guide)
    assert_close(p / p.sum(), q)
    assert expected_tries(p, q)[1] == pytest.approx(1)


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "shares.png"
    options = ["--quick", "--json", "-", "--plot", figure]
    run = run_script("more/structured_distribution.py", *options, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stdout + run.stderr
    assert figure.stat().st_size > 1000
    assert run.json["checks"] and all(run.json["checks"].values())
    assert len(run.json["sweeps"]) == len(CASES)
    for lines in run.json["sweeps"].values():
        for name in ("model", "masked", "of 100 draws"):
            assert sum(line[name] for line in lines) == pytest.approx(1, abs=1e-3)
