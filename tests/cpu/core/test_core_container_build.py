"""Command lines of the build, its inputs, and the Apptainer definition that is generated from the Containerfile."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_core_container_image import archive

from pipeline import REPOSITORY
from pipeline import container_build as building
from pipeline import container_definition as definitions
from pipeline.container_image import Built, ImageRecord, beside
from pipeline.loading import ConfigError

CONTAINERS = REPOSITORY / "containers"
ARGUMENTS = {"BUILD_BASE": "oci-archive:/b.tar", "RUN_BASE": "docker.io/x:1", "KERNELS": "required", "PEERS": "all", "INPUTS": "1"}


def test_the_definition_is_that_of_the_containerfile() -> None:
    text = definitions.CONTAINERFILE.read_text()
    assert definitions.DEFINITION.read_text() == definitions.generate(text), f"run {definitions.COMMAND}"


def test_every_instruction_reaches_the_definition() -> None:
    text = definitions.CONTAINERFILE.read_text()
    made = definitions.generate(text)
    for word, rest in definitions.instructions(text):
        if word == "RUN":
            assert f"    ( {rest} )\n" in made
        elif word == "ENV":
            assert made.count(f"    export {rest}\n") == 2, "while building and when running"
        elif word == "ARG":
            assert f"    {rest}\n" in made
        elif word == "COPY":
            *sources, target = rest.removeprefix("--from=environment ").removeprefix("--from=kernels ").split()
            for source in sources:
                assert f"    {source} {target if not target.endswith('/') else target + Path(source).name}\n" in made
    assert [line for line in made.splitlines() if line.startswith("Stage:")] == ["Stage: kernels", "Stage: environment", "Stage: image"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ARG BASE=x\nFROM ${BASE} AS a\nWORKDIR /x", "WORKDIR /x: only ARG, FROM, COPY, RUN, ENV and LABEL"),
        ("FROM debian AS a", "expected FROM"),
        ("ARG BASE=x\nFROM ${BASE} AS a\nRUN cat /data/x\nCOPY x /data/", "Apptainer copies before it runs"),
    ],
)
def test_what_has_no_equal_is_refused(text: str, reason: str) -> None:
    with pytest.raises(definitions.DefinitionError, match=reason):
        definitions.generate(text)


def test_what_the_containerfile_copies_exists_and_decides_the_digest() -> None:
    _, stages = definitions.parse(definitions.CONTAINERFILE.read_text())
    inputs = {path.relative_to(REPOSITORY).as_posix() for path in building.input_files()}
    for source in (source for stage in stages for origin, sources, _ in stage.files if not origin for source in sources):
        assert (REPOSITORY / source).exists()
        assert source in inputs or any(name.startswith(f"{source}/") for name in inputs), source
    assert {"containers/Containerfile", "kernels/csrc/api.cu", "kernels/nvcc_flags.txt", "requirements.lock"} <= inputs


def test_the_commands_of_each_tool() -> None:
    words, push = building.commands("buildah", ARGUMENTS, ["/a:/mnt"], ["--isolation=chroot"], Path("/out/turbopair.oci.tar"))
    assert words == [
        "buildah", "build", "--isolation=chroot", "--build-arg", "BUILD_BASE=oci-archive:/b.tar", "--build-arg",
        "RUN_BASE=docker.io/x:1", "--build-arg", "KERNELS=required", "--build-arg", "PEERS=all", "--build-arg", "INPUTS=1",
        "--volume", "/a:/mnt", "--ignorefile", "containers/ignore", "--file", "containers/Containerfile", "--tag",
        "localhost/turbopair", ".",
    ]  # fmt: skip
    assert push == ["buildah", "push", "localhost/turbopair", "oci-archive:/out/turbopair.oci.tar:turbopair"]
    podman, save = building.commands("podman", ARGUMENTS, ["/a:/mnt"], [], Path("/out/turbopair.oci.tar"))
    assert podman[:2] == ["podman", "build"] and podman[2:] == words[3:]
    assert save == ["podman", "save", "--format", "oci-archive", "--output", "/out/turbopair.oci.tar", "localhost/turbopair"]
    (apptainer,) = building.commands("apptainer", ARGUMENTS, ["/a:/mnt"], ["--fakeroot"], Path("/out/turbopair.sif"))
    assert apptainer == [
        "apptainer", "build", "--force", "--build-arg", "BUILD_BASE=/b.tar", "--build-arg", "RUN_BASE=docker.io/x:1", "--build-arg",
        "KERNELS=required", "--build-arg", "PEERS=all", "--build-arg", "INPUTS=1", "--build-arg", "BUILD_BOOTSTRAP=oci-archive",
        "--bind", "/a:/mnt", "--fakeroot", "/out/turbopair.sif", "containers/turbopair.def",
    ]  # fmt: skip


def test_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(building.BuildError, match="no container tool: apptainer, buildah, podman not found on this machine; install one"):
        building.choose_tool("auto")
    with pytest.raises(building.BuildError, match="no container tool: podman not found"):
        building.choose_tool("podman")
    (tmp_path / "buildah").write_text("#!/bin/sh\n")
    (tmp_path / "buildah").chmod(0o755)
    assert building.choose_tool("auto") == "buildah"


def test_the_digest_of_the_inputs(tmp_path: Path) -> None:
    settings = building.load(None)
    assert building.inputs_digest(settings) == building.inputs_digest(building.load(REPOSITORY / "containers/image.yaml"))
    assert building.inputs_digest(settings) != building.inputs_digest(building.load(None, ["peers=none"]))
    base = tmp_path / "base.sif"
    with pytest.raises(building.BuildError, match=r"build_base: .*base\.sif does not exist"):
        building.inputs_digest(building.load(None, [f"build_base=localimage:{base}"]))
    base.write_bytes(b"one")
    first = building.inputs_digest(building.load(None, [f"build_base=localimage:{base}"]))
    base.write_bytes(b"other")
    assert first != building.inputs_digest(building.load(None, [f"build_base=localimage:{base}"]))
    with pytest.raises(ConfigError, match="is not a pair of absolute paths"):
        building.load(None, ["volumes=[/a]"])


def test_an_image_of_the_same_inputs_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "buildah"
    fake.write_text("#!/bin/sh\necho cannot build >&2\nexit 7\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(building.shutil, "which", lambda name: str(fake) if name == "buildah" else None)
    settings = building.load(None, [f"output={tmp_path}"])
    image = tmp_path / building.ARCHIVE
    image.write_bytes(b"image")
    record = ImageRecord(inputs=building.inputs_digest(settings), kernel_digest="", python="", torch="", backends={}, peers={})
    beside(image).write_text(Built(digest="sha256:1", size=5, record=record).model_dump_json())
    said: list[str] = []
    assert building.build(settings, said.append) == [image]
    assert "up to date" in said[0]
    with pytest.raises(building.BuildError, match=r"(?s)buildah build failed \(exit status 7\); log: .*cannot build"):
        building.build(settings, said.append, force=True)
    assert not beside(image).exists(), "an image whose build failed has no record"


def test_an_archive_that_is_there_is_only_made_a_sif_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in (("buildah", "exit 7"), ("apptainer", 'if [ "$1" = exec ]; then exit 7; fi; echo sif > "$3"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    settings = building.load(None, ["tool=buildah", f"output={tmp_path}"])
    known = ImageRecord(inputs=building.inputs_digest(settings), kernel_digest="", python="", torch="", backends={}, peers={})
    inside = {building.RECORD: known.model_dump_json().encode(), building.MATERIALS: b"{}", building.PACKAGES: b"[]"}
    image = tmp_path / building.ARCHIVE
    archive(image, {str(path).lstrip("/"): content for path, content in inside.items()})
    building.record(image, image)
    said: list[str] = []
    assert building.build(settings, said.append) == [image, tmp_path / building.SIF]
    made = building.read_built(tmp_path / building.SIF)
    assert made is not None and made.record == known, "read from the archive: this apptainer mounts nothing"
    building.build(settings, said.append)
    assert "up to date" in said[-1]


@pytest.mark.parametrize(("driver", "layers"), [("overlay", "--layers=true"), ("vfs", "--layers=false")])
@pytest.mark.parametrize("tool", ["buildah", "podman"])
def test_steps_are_kept_unless_each_is_a_whole_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, driver: str, layers: str
) -> None:
    fake = tmp_path / tool
    fake.write_text(f'#!/bin/sh\nif [ "$1" = info ]; then echo {driver}; else echo "$@"; exit 7; fi\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    said: list[str] = []
    with pytest.raises(building.BuildError, match=f"\nbuild {layers} --isolation=chroot --build-arg"):
        building.build(building.load(None, [f"tool={tool}", f"output={tmp_path}", "arguments=[--isolation=chroot]"]), said.append)
    assert any("the driver vfs" in line for line in said) == (driver == "vfs")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Error: creating build container: initializing source docker://nvidia/cuda:13: pinging container registry: dial tcp", True),
        ('FATAL:   While performing build: conveyor failed to get: Get "https://index.docker.io/v2/": dial tcp', True),
        ("cmake: no such file", False),
    ],
)
def test_a_base_that_cannot_be_fetched(tmp_path: Path, text: str, told: bool) -> None:
    tool, log = tmp_path / "buildah", tmp_path / "build.log"
    tool.write_text(f"#!/bin/sh\necho '{text}'\nexit 125\n")
    tool.chmod(0o755)
    with log.open("w") as file, pytest.raises(building.BuildError) as caught:
        building.run([str(tool), "build"], file.fileno(), log)
    assert text in str(caught.value)
    assert ("build_base and run_base in containers/image.yaml" in str(caught.value)) == told


def test_settings_of_pip_reach_the_build_without_this_machines_paths(tmp_path: Path) -> None:
    (tmp_path / "mirror/simple").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "ca.crt").write_text("certificate")
    folder = tmp_path / "site"
    folder.mkdir()
    listing = (
        f"global.extra-index-url='file://{tmp_path}/mirror/simple https://index/simple'\nglobal.find-links='/gone'\n"
        f"global.cert='{tmp_path}/ca.crt'\nglobal.timeout='5'\n:env:.find-links='{tmp_path}/wheels'\n:env:.timeout='9'\n"
    )
    lines, volumes = building.pip_settings(listing, folder)
    assert lines == [
        "timeout = 9", "cert = /mnt/cert", "extra-index-url = file:///mnt/0/simple https://index/simple", "find-links = /mnt/1",
    ]  # fmt: skip
    assert volumes == [f"{tmp_path}/mirror:/mnt/0:ro", f"{tmp_path}/wheels:/mnt/1:ro"]
    assert (folder / "cert").read_text() == "certificate"
    assert (folder / "0").is_dir() and (folder / "1").is_dir()


def peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("image_peers", CONTAINERS / "peers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_peer_that_cannot_be_installed_is_recorded(tmp_path: Path) -> None:
    module = peers()
    module.HERE = tmp_path  # type: ignore[attr-defined]
    (tmp_path / "x.lock").write_text(f"# a peer\nno-such-package-for-this-test==1 --hash=sha256:{'0' * 64}\n")
    assert module.install("x", {"absent": "no wheels"}, tmp_path) == "no wheels"
    assert (
        module.install("x", {"needs": ["no-such-program"], "lock": "x.lock"}, tmp_path)
        == "needs no-such-program, which the build base has not got"
    )
    done = module.install("x", {"lock": "x.lock", "environment": {"PIP_NO_INDEX": "1"}}, tmp_path)
    assert done.startswith("pip install -r x.lock failed: ERROR: No matching distribution found for no-such-package-for-this-test==1")
    with pytest.raises(SystemExit, match="PEERS: trifats not known; accepted: all, none, or some of trifast"):
        module.chosen("trifats", ["trifast"])
    target = tmp_path / "peers.json"
    subprocess.run([sys.executable, str(CONTAINERS / "peers.py"), "none", str(target), str(tmp_path)], check=True, capture_output=True)
    found = json.loads(target.read_text())
    assert set(found.values()) == {"left out of this build (PEERS=none)"}
    assert {"cuequivariance", "trifast", "deepspeed", "openfold3"} <= set(found)


def test_what_a_peer_compiles_comes_last(tmp_path: Path) -> None:
    module = peers()
    first, last = module.steps({"lock": "peers/deepspeed.lock", "compiled": "deepspeed"})
    assert [line.partition("==")[0] for line in last] == ["deepspeed"]
    assert {"nvidia-cutlass", "ninja", "wheel"} <= {line.partition("==")[0] for line in first}
    assert len(module.steps({"lock": "peers/trifast.lock"})) == 1


def test_what_was_installed_is_listed_without_addresses(tmp_path: Path) -> None:
    wheel = tmp_path / "b-2-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    hashes = {"url": "https://index.example/a-1.tar.gz", "archive_info": {"hashes": {"sha256": "a" * 64}}}
    report = tmp_path / "report.json"
    items = [
        {"download_info": {"url": wheel.as_uri(), "archive_info": {}}, "metadata": {"name": "b", "version": "2"}},
        {"download_info": hashes, "metadata": {"name": "a", "version": "1"}},
    ]
    report.write_text(json.dumps({"install": items}))
    target = tmp_path / "packages.json"
    subprocess.run([sys.executable, str(CONTAINERS / "packages.py"), str(target), str(report)], check=True)
    assert json.loads(target.read_text()) == [
        {"name": "a", "version": "1", "file": "a-1.tar.gz", "sha256": "a" * 64},
        {"name": "b", "version": "2", "file": wheel.name, "sha256": hashlib.sha256(b"wheel").hexdigest()},
    ]
