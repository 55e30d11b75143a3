"""A real image, built without a registry and turned into a SIF file; jobs of a real Slurm run inside it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).with_name("container")))
sys.path.insert(0, str(Path(__file__).with_name("slurm")))
import cluster as slurm_cluster
import lab as container_lab
from test_workflow_slurm import cluster  # noqa: F401
from test_workflow_slurm import site as slurm_site

from pipeline import REPOSITORY, container_image
from pipeline.records import Status
from turbopair import native

pytestmark = [pytest.mark.container, pytest.mark.slow, pytest.mark.timeout(1800)]  # the first test waits for the build
FOLDER = container_lab.FOLDER
SIF, ARCHIVE = FOLDER / "turbopair.sif", FOLDER / "turbopair.oci.tar"


def build(environment: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    config = FOLDER / "container.yaml"
    config.write_text(yaml.safe_dump(container_lab.settings()))
    command = [sys.executable, "-m", "pipeline", "container", "build", "--config", str(config), *more]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The environment of the tools, after the image was built."""
    reason = container_lab.missing()
    if reason:
        pytest.skip(reason)
    found = container_lab.prepare()
    done = build(found)
    assert done.returncode == 0, done.stdout + done.stderr
    return found


@pytest.fixture(scope="module")
def built(environment: dict[str, str]) -> container_image.Built:
    found = container_image.read_built(ARCHIVE)
    assert found is not None
    return found


@pytest.fixture
def apptainer(environment: dict[str, str]) -> Iterator[str]:
    program = shutil.which("apptainer")
    if program is None:
        pytest.skip("apptainer is not installed; tests/workflow/container/apptainer.sh tries to make it from Debian's unstable suite")
    reason = container_lab.cannot_mount_images()
    if reason:
        pytest.skip(reason)
    yield program


def test_the_build_ends_with_a_self_test(built: container_image.Built) -> None:
    record = built.record
    assert record.kernel_digest == native.library_digest()
    backends = {name.removeprefix("triangle_attention/"): backend for name, backend in record.backends.items()}
    assert all(backends[name].version for name in ("eager", "sdpa", "flex", "turbopair.paper", "triangle_multiplication/turbopair"))
    assert "is not installed" in (backends["trifast"].reason or "")
    assert record.peers["trifast"] == "left out of this build (PEERS=none)"
    assert (record.library is None) == (container_lab.cuda() is None)
    if record.library is None:
        assert "no kernel library in the image" in (record.library_reason or "")
    else:
        assert record.library["source_digest"] == native.library_digest()


def test_the_bill_of_materials_lies_in_the_image_and_beside_it(built: container_image.Built) -> None:
    text = (FOLDER / "sbom.cdx.json").read_bytes()
    assert container_image.read_from_archive(ARCHIVE, container_image.MATERIALS) == text
    bill = json.loads(text)
    assert bill["bomFormat"] == "CycloneDX"
    versions = {component["name"]: component["version"] for component in bill["components"]}
    assert versions["torch"] == built.record.torch
    lines = [line for line in (REPOSITORY / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    locked = {normal(line.partition("==")[0]): line for line in lines}
    assert versions["pydantic"] == locked["pydantic"].split()[0].partition("==")[2]
    assert "snakemake" not in versions and "cyclonedx-bom" not in versions
    packages = json.loads((FOLDER / "packages.json").read_text())
    brought = {"pip", "setuptools"}  # with the virtual environment, not by an installation
    assert {normal(one["name"]) for one in packages} - brought == {normal(name) for name in versions} - brought
    assert all(one["file"] and f"--hash=sha256:{one['sha256']}" in locked[normal(one["name"])] for one in packages), "what the lock has"


def test_nothing_is_built_again(environment: dict[str, str]) -> None:
    before = ARCHIVE.stat().st_mtime_ns
    done = build(environment)
    assert "up to date" in done.stdout, done.stdout + done.stderr
    assert ARCHIVE.stat().st_mtime_ns == before


def checkout(run: Any) -> Path:
    """A copy of this checkout that a test may change; the run's programs use it."""
    copy: Path = run.folder / "checkout"
    skipped = shutil.ignore_patterns(".venv*", "build", "results", ".git", ".snakemake", "*_cache", "__pycache__")
    shutil.copytree(REPOSITORY, copy, ignore=skipped)
    run.environment["PYTHONPATH"] = f"{Path(__file__).with_name('peers')}:{copy}:{copy / 'kernels'}"
    return copy


def test_snakemake_builds_when_an_input_changed(run: Any, environment: dict[str, str]) -> None:
    before = ARCHIVE.stat().st_mtime_ns
    run.environment |= environment
    copy = checkout(run)
    log = copy / "build/container/snakemake.log"

    def target(*more: str) -> str:
        head = [sys.executable, "-m", "snakemake", "--profile", str(copy / "config/profiles/local"), *more]
        command = [*head, "--config", f"image={FOLDER / 'container.yaml'}", f"results={run.results}", "--", "container"]
        done = subprocess.run(command, cwd=copy, env=run.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "Nothing to be done" not in target()
    assert "the image is up to date" in log.read_text(), "the digest of the inputs decides, wherever the checkout is"
    log.unlink()
    assert "Nothing to be done" in target() and not log.exists()
    with (copy / "containers/ignore").open("a") as file:
        file.write("*.orig\n")
    assert "Updated input files: containers/ignore" in target("--dry-run").replace(f"{copy}/", "")
    assert ARCHIVE.stat().st_mtime_ns == before


def test_neither_the_pipeline_nor_the_site_is_in_the_image(built: container_image.Built) -> None:
    names: set[str] = set()
    with tarfile.open(ARCHIVE) as tar:
        manifest = json.load(tar.extractfile(f"blobs/{built.digest.replace(':', '/')}"))  # type: ignore[arg-type]
        for layer in manifest["layers"]:
            with tarfile.open(fileobj=tar.extractfile(f"blobs/{layer['digest'].replace(':', '/')}"), mode="r:*") as files:
                for member in files:
                    path = Path(member.name)
                    if path.name.startswith(".wh."):
                        hidden = str(path.with_name(path.name.removeprefix(".wh.")))
                        names = {name for name in names if name != hidden and not name.startswith(f"{hidden}/")}
                    else:
                        names.add(str(path))
    assert "opt/turbopair/image.json" in names
    assert not [name for name in names if name.startswith(("src/", "build/", "usr/local/cuda/")) or name.endswith("pip.conf")]


@pytest.mark.skipif(container_lab.cuda() is None, reason="this machine has no nvcc")
def test_two_builds_give_the_same_kernel_library(environment: dict[str, str], built: container_image.Built) -> None:
    common = ["--quiet", "--no-cache", "--target", "kernels", "--build-arg", f"BUILD_BASE={container_lab.BASE}"]
    volume = ["--volume", f"{container_lab.cuda()}:/usr/local/cuda:ro"]
    from pipeline.container_build import site_folder

    with site_folder() as volumes:
        more = [word for one in volumes for word in ("--volume", one)]
        command = ["buildah", "build", *common, *volume, *more, "--ignorefile", "containers/ignore", "--file", "containers/Containerfile"]
        subprocess.run([*command, "--tag", "localhost/turbopair-again", "."], cwd=REPOSITORY, env=environment, check=True)
    show = 'cat "$(buildah mount "$box")/opt/kernels/libturbopair.json"'
    script = f'box=$(buildah from localhost/turbopair-again) && {show} && buildah rm "$box" > /dev/null'
    text = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
    assert json.loads(text) == built.record.library


def test_slurm_jobs_run_in_the_image(run: Any, cluster: slurm_cluster.Cluster, environment: dict[str, str], apptainer: str) -> None:  # noqa: F811
    run.environment |= cluster.environment | container_lab.ENVIRONMENT
    box = {"runtime": "apptainer", "image": str(SIF), "gpus": False}
    slurm_site(run, container=box)
    run.write_config("eager", "turbopair.paper", "trifast", cases=2)
    done = run()
    assert done.returncode == 0, done.stdout
    built = container_image.read_built(SIF)
    assert built is not None
    assert f"in the image {SIF}, {built.digest[:19]}" in done.stdout
    assert "the image is without trifast: trifast is not installed" in done.stdout
    records = run.records()
    assert {name: {record.status for record in found} for name, found in records.items()} == {
        "eager": {Status.OK}, "turbopair.paper": {Status.OK}, "trifast": {Status.NOT_INSTALLED},
    }  # fmt: skip
    everything = [record for found in records.values() for record in found]
    assert {record.environment["container_digest"] for record in everything} == {built.digest}
    assert {record.environment["python"] for record in everything} == {built.record.python}
    kept = run.results / "image" / built.digest.removeprefix("sha256:")[:12]
    assert (kept / "sbom.cdx.json").read_bytes() == (FOLDER / "sbom.cdx.json").read_bytes()
    assert container_image.parse_record((kept / "image.json").read_text(), "") == built.record
    caches = run.results / "jobs" / "caches"
    assert (caches / "home").is_dir() and (caches / "tmpdir").is_dir()


def test_ranks_meet_in_the_image(run: Any, cluster: slurm_cluster.Cluster, environment: dict[str, str], apptainer: str) -> None:  # noqa: F811
    from test_workflow_ranks import the_record, write

    run.environment |= cluster.environment | container_lab.ENVIRONMENT
    slurm_site(run, container={"runtime": "apptainer", "image": str(SIF), "gpus": False})
    write(run, 0, nodes=2, per_node=2)
    done = run()
    record = the_record(run)
    assert record.status is Status.OK, f"{record.reason}\n{done.stdout}"
    assert record.metrics["hosts"] == "n1,n1,n2,n2"
    assert record.environment["container_digest"] == container_image.file_digest(SIF)


def test_podman_runs_the_archive(run: Any, environment: dict[str, str], built: container_image.Built) -> None:
    reason = container_lab.cannot_run_podman()
    if reason:
        pytest.skip(reason)
    run.environment |= environment
    box = {"runtime": "podman", "image": str(ARCHIVE), "extra": list(container_lab.LOW_LIMITS)}
    run.write_site(executor="local", device="auto", threads=1, container=box)
    run.write_config("eager", "turbopair.paper")
    done = run()
    assert done.returncode == 0, done.stdout
    records = [record for found in run.records().values() for record in found]
    assert {(record.status, record.environment["container_digest"]) for record in records} == {(Status.OK, built.digest)}
    assert {record.environment["device"] for record in records} == {"cpu"}
    assert (run.results / "image" / built.digest.removeprefix("sha256:")[:12] / "sbom.cdx.json").is_file()


def test_what_a_container_sees(run: Any, environment: dict[str, str], apptainer: str, tmp_path: Path) -> None:
    """The home folder is one of the run, values with commas and equals signs arrive, the host's variables do not."""
    from pipeline import container
    from pipeline.site import Container

    inside = {**container.caches(tmp_path / "caches"), "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_X": "a=b,c=d", "NCCL_Y": 'quote"d'}
    for name in container.caches(tmp_path / "caches").values():
        Path(name).mkdir(parents=True)
    script = (
        "import json, os; print(json.dumps([dict(os.environ), os.getcwd(), os.listdir(os.path.expanduser('~')), os.path.expanduser('~')]))"
    )
    words = container.command(
        Container(runtime="apptainer", image=str(SIF)), ["python3", "-c", script], workdir=REPOSITORY, folders=[tmp_path],
        environment=inside, use_gpu=False,
    )  # fmt: skip
    done = subprocess.run(words, env={**environment, "SECRET": "of the host"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen, where, home, path = json.loads(done.stdout)
    assert {name: seen[name] for name in inside if name != "HOME"} == {name: value for name, value in inside.items() if name != "HOME"}
    assert "SECRET" not in seen
    assert where == str(REPOSITORY)
    assert home == [] and path == inside["HOME"]
    assert seen["PATH"].startswith("/opt/venv/bin:")


def test_an_image_older_than_the_kernel_sources_is_refused_on_the_node(run: Any, environment: dict[str, str], apptainer: str) -> None:
    if container_lab.cuda() is None:
        pytest.skip("without nvcc the image has no kernels that could be old")
    image = run.folder / "old.sif"
    image.symlink_to(SIF)  # without a record beside it, as an image from elsewhere
    run.environment |= container_lab.ENVIRONMENT
    copy = checkout(run)
    with (copy / "kernels/csrc/common.cuh").open("a") as file:
        file.write("// changed\n")
    run.write_site(executor="local", device="cpu", container={"runtime": "apptainer", "image": str(image)})
    run.write_config("eager")
    done = subprocess.run(run.arguments(), cwd=copy, env=run.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the image is older than the kernel sources: it holds kernels of" in done.stderr
    assert "Traceback" not in done.stderr
