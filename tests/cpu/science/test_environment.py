import getpass
import json
import socket
from pathlib import Path

import pytest
import torch

from pipeline import environment


def test_block_without_a_gpu_is_whole_and_json() -> None:
    block = environment.collect(torch.device("cpu"))
    assert block["gpu"] is None and block["device"] == "cpu"
    assert block["torch"] == torch.__version__ and len(block["kernel_digest"]) == 64
    expected = {"cpu", "os", "python", "cuda", "triton", "git", "container_digest", "threads", "cpu_count", "tf32"}
    assert expected <= set(block)
    assert json.loads(json.dumps(block)) == block


def test_nothing_identifies_the_host_the_user_or_a_path() -> None:
    text = json.dumps(environment.collect())
    for secret in (socket.gethostname(), str(Path.cwd()), str(Path.home())):
        assert secret not in text
    if len(getpass.getuser()) > 3 and getpass.getuser() != "root":
        assert getpass.getuser() not in text


def test_container_digest_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_CONTAINER_DIGEST", "sha256:abc")
    assert environment.collect()["container_digest"] == "sha256:abc"
    monkeypatch.setenv("PIPELINE_CONTAINER_DIGEST", "")
    assert environment.collect()["container_digest"] is None


def test_commit_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    environment._git.cache_clear()
    monkeypatch.setenv("PIPELINE_COMMIT", "0123abcd")
    try:
        assert environment._git() == {"commit": "0123abcd", "dirty": None}
    finally:
        environment._git.cache_clear()


def test_missing_git_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PIPELINE_COMMIT", raising=False)
    environment._git.cache_clear()
    try:
        assert environment._git() == {"commit": None, "dirty": None}
    finally:
        environment._git.cache_clear()
