"""README and CONTRIBUTING: their links and commands exist, their programs run, their table of the supported range is true."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor

import turbopair
from pipeline import REPOSITORY, cli
from pipeline.cells import EXPERIMENTS
from turbopair import digest, native
from turbopair.triangle_attention.contract import MAX_HEAD_DIM

DOCUMENTS = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")]
TEXTS = {path.name: path.read_text() for path in DOCUMENTS}
README = TEXTS["README.md"]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every line of the shell blocks, and every `make ...` or `python -m pipeline ...` between backticks, without comments."""
    found = []
    for text in TEXTS.values():
        inline = re.findall(
            r"`([^`\n]*(?:make|python -m pipeline) [^`\n]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        )
        found += [line for block in blocks(text, "sh") for line in block.splitlines() if line[0] != "#"] + inline
    return sorted({line.split(" #")[0].strip() for line in found} - {""})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", TEXTS[path.name])
    assert targets
    headings = [heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", TEXTS[path.name], re.MULTILINE)]
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in headings, f"{path.name} links to {target}"
        elif not target.startswith("https://"):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    names = re.findall(r"`((?:config|pipeline|kernels|tests)/[\w./-]+)`", TEXTS[path.name])
    assert names
    assert not [name for name in names if not (REPOSITORY / name).exists()]


@pytest.mark.parametrize("command", commands())
def test_commands_exist(command: str) -> None:
    words = shlex.split(command)
    environment = [word for word in words if re.match(r"[A-Z_]+=", word)]
    paths = [word.partition("=")[2] or word for word in words if "config/" in word]
    assert all((REPOSITORY / path).exists() for path in paths), paths
    words = [word for word in words if word not in environment]
    if words[0] == "make":
        makefile = (REPOSITORY / "Makefile").read_text()
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"the Makefile has no target {words[1]}"
        for variable in (word.partition("=")[0] for word in environment):
            assert variable.startswith("PIP_") or re.search(rf"^{variable} \?=", makefile, re.MULTILINE), variable
    elif words[:2] == ["apt-get", "install"]:
        assert "make" in words
    elif words[1:3] == ["-m", "pipeline"]:
        context = typer.main.get_command(cli.app).make_context("pipeline", words[3:4], resilient_parsing=True)
        command_, rest = context.command.get_command(context, words[3]), words[4:]  # type: ignore[attr-defined]
        assert command_ is not None, f"no command {words[3]}"
        parsed = command_.make_context(words[3], rest, parent=context)
        if words[3] == "workflow":
            assert set(parsed.args) & set(EXPERIMENTS)
    else:
        raise AssertionError(f"a command of another kind: {command}")


def test_the_guide_names_what_changes_the_kernel_digest() -> None:
    guide = TEXTS["CONTRIBUTING.md"]
    assert all(f"`{name}`" in guide for name in (*digest.TRITON_SOURCES, "kernels/csrc/", f"kernels/{digest.FLAGS_FILE}"))


def test_the_two_commands_come_first() -> None:
    assert [line.split()[:2] for line in blocks(README, "sh")[0].splitlines()] == [["make", "run"], ["make", "test"]]


def test_the_program_of_the_readme_runs(tmp_path: Path) -> None:
    (program,) = blocks(README, "python")
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "kernels"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["out", "dq", "dk", "dv", "dbias"]
    assert lines[-1] == "agrees with FP64, and twice the same bits"


def test_the_peer_of_the_guide_is_complete(tmp_path: Path) -> None:
    (program,) = blocks(TEXTS["CONTRIBUTING.md"], "python")
    (tmp_path / "guide_peer.py").write_text(program)
    (tmp_path / "config.yaml").write_text(
        "name: guide\nplugins: [guide_peer]\naccuracy:\n  implementations: [fp32_formula, eager]\n"
        "  crops: [24]\n  head_dims: [16]\n  slices: 3\n  families: [normal, masked]\n  cases: 2\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "CUDA_VISIBLE_DEVICES": ""}
    arguments = ["run", "--config", "config.yaml", "--results", "results"]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FP32 formula" in (tmp_path / "results/tables/accuracy.md").read_text()


def example(dim: int = 32, dtype: torch.dtype = torch.bfloat16, device: str = "meta", queries: int = 8, keys: int = 8) -> list[Tensor]:
    shape = (1, 3, queries, 2, dim)
    q = torch.empty(shape, dtype=dtype, device=device)
    k, v = (torch.empty(1, 3, keys, 2, dim, dtype=dtype, device=device) for _ in range(2))
    return [q, k, v, torch.empty(1, 1, 2, queries, keys, device=device)]


def row(name: str) -> str:
    """The second cell of a row of the README's table of the supported range."""
    (found,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", README, re.MULTILINE)
    return str(found)


def test_supported_range_is_that_of_the_operator() -> None:
    assert row("D") == f"1 to {MAX_HEAD_DIM}"
    assert turbopair.supports(*example(1)) is None and turbopair.supports(*example(MAX_HEAD_DIM)) is None
    assert turbopair.supports(*example(MAX_HEAD_DIM + 1)) is not None

    assert row("precision") == ", ".join(f"`{name}`" for name in turbopair.PRECISIONS)
    assert f"compute capability {'.'.join(map(str, native.CAPABILITY))}" in row("device")

    qkv = row("q, k, v")
    names = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16}
    for name, dtype in names.items():
        accepted = turbopair.supports(*example(dtype=dtype, device="cpu")) is None
        assert accepted == (name in qkv), name
    assert "N of k and v may differ" in qkv and turbopair.supports(*example(queries=5, keys=9)) is None
    q, k, v, bias = example()
    assert "any strides" in qkv and turbopair.supports(q.mT.contiguous().mT, k, v, bias) is None
    assert "the same for all three" in qkv and turbopair.supports(q, k.float(), v, bias) is not None

    assert "expanded with stride 0" in row("bias")
    assert turbopair.supports(q, k, v, bias.expand(1, 3, 2, 8, 8)) is None
    assert turbopair.supports(q, k, v, torch.empty(1, 3, 2, 8, 8, device="meta")) is not None
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        assert (turbopair.supports(q, k, v, bias.to(dtype)) is None) == (dtype is not torch.float16)

    mask = torch.empty(1, 3, 1, 1, 8, device="meta")
    assert "no gradient" in row("mask")
    for dtype in (torch.bool, torch.bfloat16, torch.float32, torch.int32):
        assert (turbopair.supports(q, k, v, bias, mask.to(dtype)) is None) == (dtype is not torch.int32)
    assert turbopair.supports(q, k, v, bias, mask.requires_grad_()) is not None


def test_first_derivatives_only() -> None:
    assert row("derivatives") == "first only, reverse mode"
    q, k, v = (torch.randn(1, 2, 4, 1, 8, requires_grad=True) for _ in range(3))
    out = turbopair.triangle_attention(q, k, v, torch.randn(1, 1, 1, 4, 4))
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError):
        torch.autograd.grad(dq.sum(), k)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(
            lambda bias: turbopair.triangle_attention(q, k, v, bias), (torch.randn(1, 1, 1, 4, 4),), (torch.ones(1, 1, 1, 4, 4),)
        )
