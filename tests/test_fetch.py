"""Wheels fetched by hash: pip itself runs, on a folder in place of the package index."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from triton_specdec.fetch import FetchError, Wheel, cache_folder, check_sha256, fetch_wheel

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for the index; no network is asked."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def wheel(index):
    path = index / "parcel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("parcel/data.txt", "x")
        archive.writestr("parcel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: parcel\nVersion: 1.0\n")
        archive.writestr("parcel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("parcel-1.0.dist-info/RECORD", "")
    return Wheel("parcel==1.0", path.name, hashlib.sha256(path.read_bytes()).hexdigest())


@needs_pip
def test_a_wheel_is_fetched_once(wheel, index, tmp_path):
    cache = tmp_path / "not" / "there"
    path = fetch_wheel(wheel, cache)
    assert path == cache / wheel.file
    assert path.read_bytes() == (index / wheel.file).read_bytes()
    assert list(cache.iterdir()) == [path]
    (index / wheel.file).unlink()
    assert fetch_wheel(wheel, cache) == path


@needs_pip
def test_pip_refuses_another_hash_and_nothing_is_left(wheel, tmp_path):
    other = wheel._replace(sha256="0" * 64)
    with pytest.raises(FetchError, match=rf"could not fetch parcel==1.0(.|\n)*{wheel.sha256}"):
        fetch_wheel(other, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@needs_pip
def test_without_the_wheel_pip_s_reason_and_a_way_out_are_named(index, tmp_path):
    missing = Wheel("parcel==1.0", "parcel-1.0-py3-none-any.whl", "0" * 64)
    with pytest.raises(FetchError, match=r"put parcel-1.0-py3-none-any.whl into .*cache by hand(.|\n)*No matching"):
        fetch_wheel(missing, tmp_path / "cache")


def test_without_pip_the_error_says_so(wheel, tmp_path, monkeypatch):
    def no_pip(command, **_):
        assert command[:3] == [sys.executable, "-m", "pip"]
        assert {"--require-hashes", "--no-deps"} <= set(command)
        return subprocess.CompletedProcess(command, 1, "", "No module named pip\n")

    monkeypatch.setattr(subprocess, "run", no_pip)
    with pytest.raises(FetchError, match="No module named pip"):
        fetch_wheel(wheel, tmp_path)


def test_a_kept_file_of_another_hash_is_refused(wheel, tmp_path):
    (tmp_path / wheel.file).write_bytes(b"half of it")
    with pytest.raises(ValueError, match=f"delete it to fetch it again.*expected SHA-256 {wheel.sha256}, got "):
        fetch_wheel(wheel, tmp_path)


def test_a_hash_of_bytes_and_of_a_file(tmp_path):
    data = b"x" * 3_000_000
    (tmp_path / "x").write_bytes(data)
    for value in (data, tmp_path / "x"):
        check_sha256(value, hashlib.sha256(data).hexdigest(), "x")
        with pytest.raises(ValueError, match="x: expected SHA-256 0, got "):
            check_sha256(value, "0", "x")


def test_the_cache_folder_is_the_user_s(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "triton_specdec"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == Path.home() / ".cache" / "triton_specdec"
