"""What an image is and whether it fits: every bad input is refused by name."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline import REPOSITORY, container_cli, container_selftest, implementations, launch
from pipeline import container_image as images
from pipeline.cells import OPERATORS, Cell
from pipeline.loading import ConfigError
from pipeline.loading import validate as validate_model
from pipeline.site import SITE, Container
from pipeline.todo import Item

DIGEST = "sha256:" + "a" * 64
RECORD = images.ImageRecord(
    inputs="1" * 64, kernel_digest="2" * 64, library={"arch": "sm_90a"}, python="3.12.3", torch="2.13.0", cuda="13.0",
    backends={
        "triangle_attention/eager": images.Backend(version="1"),
        "triangle_attention/trifast": images.Backend(reason="trifast is not installed"),
    },
    peers={"trifast": "no wheel"},
)  # fmt: skip


def sif(folder: Path, content: bytes = b"an image", record: images.ImageRecord | None = None) -> Path:
    path = folder / "x.sif"
    path.write_bytes(content)
    if record is not None:
        images.beside(path).write_text(images.Built(digest=DIGEST, size=len(content), record=record).model_dump_json())
    return path


def box(image: object, runtime: str = "apptainer", **more: Any) -> Container:
    return Container(runtime=runtime, image=str(image), **more)  # type: ignore[arg-type]


def attention(name: str) -> str:
    return images.backend_key("triangle_attention", name)


def archive(path: Path, *layers: dict[str, bytes], images_: int = 1) -> str:
    """An OCI archive of the layers; the digest of its manifest."""
    blobs = []
    for files in layers:
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        blobs.append(gzip.compress(layer.getvalue()))
    manifest = json.dumps({"layers": [{"digest": f"sha256:{hashlib.sha256(blob).hexdigest()}"} for blob in blobs]}).encode()
    found = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    index = json.dumps({"manifests": [{"digest": found}] * images_}).encode()
    with tarfile.open(path, "w") as tar:
        names = {f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob for blob in (*blobs, manifest)}
        for name, content in {"index.json": index, **names}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return found


def test_the_digest_of_a_file_is_kept_until_the_file_changes(tmp_path: Path) -> None:
    image = sif(tmp_path)
    expected = f"sha256:{hashlib.sha256(b'an image').hexdigest()}"
    assert images.digest(box(image)) == expected
    kept = tmp_path / "x.sif.digest"
    kept.write_text(kept.read_text().replace(expected, DIGEST))
    assert images.digest(box(image)) == DIGEST, "read, not computed"
    image.write_bytes(b"another image")
    assert images.digest(box(image)) == f"sha256:{hashlib.sha256(b'another image').hexdigest()}"


def test_the_record_beside_an_image_counts_for_that_file_only(tmp_path: Path) -> None:
    image = sif(tmp_path, record=RECORD)
    assert images.digest(box(image)) == DIGEST
    image.write_bytes(b"another image")
    assert images.read_built(image) is None
    assert images.digest(box(image)) != DIGEST


def test_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "x.oci.tar"
    found = archive(path, {"opt/turbopair/image.json": b"old", "etc/x": b""}, {"./opt/turbopair/image.json": b"new"}, {"etc/y": b""})
    assert images.digest(box(path, "podman")) == found == images.digest(box(f"oci-archive:{path}", "podman"))
    assert images.read_from_archive(path, images.RECORD) == b"new"
    with pytest.raises(images.ImageError, match="has no /opt/turbopair/sbom"):
        images.read_from_archive(path, images.MATERIALS)
    archive(path, {}, images_=2)
    with pytest.raises(images.ImageError, match="holds 2 images"):
        images.digest(box(path, "podman"))
    path.write_bytes(b"no archive")
    with pytest.raises(images.ImageError, match="no OCI archive"):
        images.digest(box(path, "podman"))


def test_images_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert images.digest(box(f"registry/x@{DIGEST}", "pyxis")) == DIGEST
    with pytest.raises(images.ImageError, match="neither a file nor pinned"):
        images.digest(box("docker://registry/x:1"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(images.ImageError, match="podman, which is not found on this machine"):
        images.digest(box("x:1", "podman"))
    fake = tmp_path / "podman"
    fake.write_text(f'#!/bin/sh\n[ "$5" = known:1 ] && echo {DIGEST} || {{ echo "no such image" >&2; exit 125; }}\n')
    fake.chmod(0o755)
    assert images.digest(box("known:1", "podman")) == DIGEST
    with pytest.raises(images.ImageError, match=r"podman knows no image 'x:1' \(no such image\); build it"):
        images.digest(box("x:1", "podman"))


def test_an_image_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(images.ImageError, match=r"x\.sqsh does not exist; after .*: enroot import --output .*x\.sqsh podman://"):
        images.digest(box(tmp_path / "x.sqsh", runtime="pyxis"))
    with pytest.raises(images.ImageError, match=r"x\.sif does not exist; build it: python -m pipeline container build"):
        images.digest(box(tmp_path / "x.sif"))
    with pytest.raises(images.ImageError, match="is a folder, which has no digest"):
        images.digest(box(tmp_path))


def test_an_image_older_than_the_kernel_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURBOPAIR_LIBRARY", raising=False)
    image = sif(tmp_path, record=RECORD)
    assert images.check_before(box(image), [], "2" * 64) == (DIGEST, [])
    with pytest.raises(
        images.ImageError, match="older than the kernel sources: it holds kernels of 222222222222, this checkout has 333333333333"
    ):
        images.check_before(box(image), [], "3" * 64)
    without_library = RECORD.model_copy(update={"library": None})
    assert images.stale(without_library, "3" * 64) is None
    monkeypatch.setenv("TURBOPAIR_LIBRARY", "/somewhere/libturbopair.so")
    assert images.stale(RECORD, "3" * 64) is None


def test_an_image_without_the_asked_backend(tmp_path: Path) -> None:
    image = sif(tmp_path, record=RECORD)
    _, remarks = images.check_before(box(image), [attention(name) for name in ("eager", "trifast", "of.a.plugin", "trifast")], "2" * 64)
    assert remarks == ["the image is without trifast: trifast is not installed"]
    half = RECORD.model_copy(
        update={"backends": {attention("turbopair.paper"): images.Backend(version="1", reason="on CPU tensors only: no nvcc")}}
    )
    assert images.without(half, attention("turbopair.paper")) == "turbopair.paper in the image: on CPU tensors only: no nvcc"


def test_an_image_for_cpus_when_a_gpu_is_to_compute(tmp_path: Path) -> None:
    for_cpus = RECORD.model_copy(update={"cuda": None, "torch": "2.13.0+cpu"})
    image = sif(tmp_path, record=for_cpus)
    assert images.check_before(box(image), [], "2" * 64) == (DIGEST, [])
    text = r"the image is for CPUs \(PyTorch 2\.13\.0\+cpu without CUDA\), and the work asks for a GPU: build one with a PyTorch for CUDA"
    with pytest.raises(images.ImageError, match=text):
        images.check_before(box(image), [], "2" * 64, use_gpu=True)
    with pytest.raises(launch.LaunchError, match=text):
        launch.check_image(box(image), [], "2" * 64, print, use_gpu=True)


def test_the_launcher_tells_it(tmp_path: Path) -> None:
    image = sif(tmp_path, record=RECORD)
    cell = Cell(
        experiment="accuracy", implementation="trifast", operator="triangle_attention", n=16, slices=2, heads=1, head_dim=16,
        family="normal", seed=0,
    )  # fmt: skip
    said: list[str] = []
    assert launch.check_image(box(image), [Item(cell=cell)], "2" * 64, said.append) == DIGEST
    assert said == [f"in the image {image}, {DIGEST[:19]}", "the image is without trifast: trifast is not installed"]
    with pytest.raises(launch.LaunchError, match="older than the kernel sources"):
        launch.check_image(box(image), [], "3" * 64, said.append)
    assert launch.check_image(Container(), [], "3" * 64, said.append) is None


def on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, *programs: str) -> None:
    for name in programs:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(("runtime", "program"), [("apptainer", "apptainer"), ("podman", "podman"), ("pyxis", "srun")])
def test_no_container_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, program: str) -> None:
    on_path(tmp_path, monkeypatch)
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    with pytest.raises(images.ImageError, match=f"container.runtime is {runtime}, and {program} is not found on n7: install it"):
        images.check_host(box("x", runtime), [], use_gpu=False)
    on_path(tmp_path, monkeypatch, program)
    images.check_host(box("x", runtime), [], use_gpu=False)


def test_a_bind_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(tmp_path, monkeypatch, "apptainer")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    with pytest.raises(images.ImageError, match=r"container\.binds: /no/such/folder does not exist on this machine"):
        images.check_host(box("x", binds=("/no/such/folder:/inside:ro",)), [], use_gpu=False)
    odd = tmp_path / "a:b"
    odd.mkdir()
    with pytest.raises(images.ImageError, match="colon or a comma"):
        images.check_host(box("x"), [odd], use_gpu=False)


def test_a_node_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(tmp_path, monkeypatch, "apptainer")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setattr(images, "DRIVER", tmp_path / "version")
    with pytest.raises(images.ImageError, match="n7 has no NVIDIA driver, and the work asks for a GPU"):
        images.check_host(box("x"), [], use_gpu=True)
    images.check_host(box("x"), [], use_gpu=False)
    images.check_host(box("x", gpus=False), [], use_gpu=True)
    images.DRIVER.touch()
    images.check_host(box("x"), [], use_gpu=True)


@pytest.mark.parametrize(
    ("cuda", "found", "text"),
    [
        ("13.0", ("550.54.15", 12040), "it is 550.54.15 (CUDA 12.4), the image holds CUDA 13.0; use nodes with driver 580 or newer"),
        ("13.2", ("580.65", 13000), None),
        ("12.8", ("580.65", 13000), None),
        ("13.0", None, None),
    ],
)
def test_a_driver_too_old_for_the_image(cuda: str, found: tuple[str, int] | None, text: str | None) -> None:
    answer = images.driver_too_old(cuda, found)
    assert answer is None if text is None else text in (answer or "")


def test_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOPAIR_LIBRARY", "")
    monkeypatch.delenv("TURBOPAIR_LIBRARY")
    monkeypatch.setattr(images, "RECORD", tmp_path / "image.json")
    images.check_inside("2" * 64, use_gpu=True)
    assert "TURBOPAIR_LIBRARY" not in os.environ, "an image of another repository is left alone"
    images.RECORD.write_text(RECORD.model_dump_json())
    monkeypatch.setattr(images, "driver", lambda: ("550.54", 12040))
    with pytest.raises(images.ImageError, match="too old for the image"):
        images.check_inside("2" * 64, use_gpu=True)
    with pytest.raises(images.ImageError, match="older than the kernel sources"):
        images.check_inside("3" * 64, use_gpu=False)
    images.check_inside("2" * 64, use_gpu=False)
    assert os.environ["TURBOPAIR_LIBRARY"] == str(images.LIBRARY)
    images.RECORD.write_text(RECORD.model_copy(update={"cuda": None}).model_dump_json())
    with pytest.raises(images.ImageError, match="the image is for CPUs"):
        images.check_inside("2" * 64, use_gpu=True)
    images.RECORD.write_text('{"inputs": 3}')
    with pytest.raises(images.ImageError, match="not the record of an image of this repository"):
        images.check_inside("2" * 64, use_gpu=False)


def test_what_the_image_holds_is_kept_beside_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RECORD", "MATERIALS", "PACKAGES"):
        monkeypatch.setattr(images, name, tmp_path / "image" / getattr(images, name).name)
    results = tmp_path / "results"
    images.keep_materials(results, DIGEST)
    assert not results.exists(), "an image of another repository has none"
    (tmp_path / "image").mkdir()
    images.MATERIALS.write_text("bill")
    images.RECORD.write_text("record")
    images.keep_materials(results, DIGEST)
    assert {path.name: path.read_text() for path in (results / "image" / ("a" * 12)).iterdir()} == {
        "sbom.cdx.json": "bill", "image.json": "record",
    }  # fmt: skip
    before = (results / "image" / ("a" * 12) / "image.json").stat().st_mtime_ns
    images.keep_materials(results, DIGEST)
    assert (results / "image" / ("a" * 12) / "image.json").stat().st_mtime_ns == before


def test_site_files() -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda' and container\.gpus is false, which hides them; give device: cpu"):
        hidden = {"runtime": "apptainer", "image": "/x.sif", "gpus": False}
        validate_model(SITE, {"executor": "local", "device": "cuda", "container": hidden}, "site")
    with pytest.raises(ConfigError, match="a plugin of Slurm"):
        validate_model(SITE, {"executor": "local", "container": {"runtime": "pyxis", "image": "/x.sqsh"}}, "site")
    with pytest.raises(ConfigError, match="without commas"):
        validate_model(SITE, {"executor": "slurm", "container": {"runtime": "pyxis", "image": "/x.sqsh", "binds": ["/a,b"]}}, "site")


def test_the_self_test_knows_every_peer() -> None:
    everything = [implementations.get(name, operator) for operator in OPERATORS for name in implementations.names(operator)]
    peers = {one.distribution for one in everything if one.distribution is not None and not one.name.startswith("odd.")}
    assert peers == set(container_selftest.MODULES)
    sources = "".join(path.read_text() for path in (REPOSITORY / "pipeline/implementations").rglob("*.py"))
    assert {module for modules in container_selftest.MODULES.values() for module in modules} - {container_selftest.COMPILED} <= set(
        re.findall(r'module\("([\w.]+)"\)', sources)
    )


@pytest.mark.parametrize(
    ("error", "driver", "absent"),
    [
        ("ImportError: libcue_ops.so: cannot open shared object file", False, False),
        ("RuntimeError: Found no NVIDIA driver on your system.", False, False),
        ("ImportError: libcue_ops.so: cannot open shared object file", True, True),
        ("ImportError: undefined symbol", False, True),
    ],
)
def test_a_peer_that_needs_the_driver_is_not_called_absent(monkeypatch: pytest.MonkeyPatch, error: str, driver: bool, absent: bool) -> None:
    """Builds have no driver; on the node there is one."""

    class Peer(implementations.Implementation):
        name, title, distribution = "linked", "Linked", "torch"

        def module(self, name: str) -> Any:
            raise implementations.NotInstalled(f"cannot be imported: {error}")

        limits = bind = None  # type: ignore[assignment]

    monkeypatch.setattr(container_selftest, "MODULES", {"torch": ("x",)})
    monkeypatch.setattr(container_selftest, "has_driver", lambda: driver)
    found = container_selftest._backend(Peer(), None)
    assert (found.version is None) == absent
    assert ("not tried: the build has no NVIDIA driver, and it needs one" in (found.reason or "")) != absent


@pytest.mark.parametrize("there", [["evoattention"], ["evoformer"], ["evoattention", "evoformer"]])
def test_either_module_of_megafold_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: list[str]) -> None:
    for name in there:
        (tmp_path / f"{name}.py").write_text("")
    if len(there) > 1:  # the implementation takes the newer, however broken the older is
        (tmp_path / "evoformer.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("evoattention", "evoformer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert container_selftest._backend(implementations.get("megafold"), None) == images.Backend(version="unversioned")
    for name in there:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("operator", "name", "needs"),
    [
        ("triangle_attention", "turbopair.exact", True),
        ("attention_module", "turbopair", True),
        ("triangle_multiplication", "turbopair", False),
        ("triangle_attention", "turbopairformer", False),
    ],
)
def test_what_needs_the_kernel_library_says_when_there_is_none(
    monkeypatch: pytest.MonkeyPatch, operator: Any, name: str, needs: bool
) -> None:
    one = implementations.get(name, operator)
    monkeypatch.setattr(type(one), "version", lambda self: "1")
    monkeypatch.setattr(type(one), "module", lambda self, name: None)
    reason = "on CPU tensors only: no library" if needs else None
    assert container_selftest._backend(one, "no library") == images.Backend(version="1", reason=reason)


def test_a_record_that_cannot_be_written_is_said_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(container_cli.app, ["selftest", "--write", str(tmp_path / "file" / "image.json")])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert f"error: cannot write {tmp_path}/file/image.json" in done.stderr


def test_an_image_with_cuda_has_triton() -> None:
    good = images.Backend(version="1")
    whole = RECORD.model_copy(
        update={"backends": {attention(name): good for name in ("eager", "sdpa", "turbopair.paper")}, "triton": "3.7.1"}
    )
    container_selftest.check(whole, "required")
    container_selftest.check(whole.model_copy(update={"triton": None, "cuda": None}), "required")
    with pytest.raises(container_selftest.SelfTestError, match="fails its self-test: triton, which"):
        container_selftest.check(whole.model_copy(update={"triton": None}), "required")


def test_the_self_test_prints_the_reasons(tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_text('{"trifast": "no wheel"}')
    record = container_selftest.examine("1" * 64, tmp_path)
    assert record.peers == {"trifast": "no wheel"} and record.library is None
    assert record.backends[attention("eager")] == images.Backend(version=record.torch)
    assert "on CPU tensors only: no kernel library in the image" in (record.backends[attention("turbopair.paper")].reason or "")
    assert record.backends["triangle_multiplication/turbopair"].version
    text = "\n".join(container_selftest.lines(record))
    assert "no kernel library in the image" in text and "megafold" in text
    container_selftest.check(record, "optional")
    with pytest.raises(container_selftest.SelfTestError, match="the image fails its self-test: kernel library: no kernel library"):
        container_selftest.check(record, "required")
    container_selftest.write(record, tmp_path / "image.json")
    assert images.parse_record((tmp_path / "image.json").read_text(), "x") == record
