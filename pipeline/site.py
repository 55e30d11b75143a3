"""Where to run: this machine or a Slurm cluster, with or without a container.

Nothing here is about experiments (see :mod:`pipeline.config`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, field_validator, model_validator

from pipeline.config import Section
from pipeline.loading import override, read_mapping, validate

#: Slurm may send the warning signal up to a minute early, and a chunk needs a minute to start: less time than this
#: beside the signal's delay would make every job look timed out at once.
MARGIN_S = 120


class Container(Section):
    """The image in which the work runs; submission stays outside of it."""

    runtime: Literal["none", "apptainer", "podman", "pyxis"] = "none"
    """What starts the container: a program on the nodes, or Slurm's plugin pyxis."""
    image: str = ""
    """Path of a SIF file (apptainer), OCI archive (podman) or squashfs file (pyxis), or the name of an image, pinned by `@sha256:...`."""
    python: str = "python3"
    """The interpreter inside the image."""
    binds: tuple[str, ...] = ()
    """Further folders to make visible, `host:inside` or one path for both; the repository and the results are always bound."""
    gpus: StrictBool = True
    """Make the GPUs visible inside where the work uses them (apptainer `--nv`, podman's CDI device, pyxis NVIDIA_VISIBLE_DEVICES)."""
    extra: tuple[str, ...] = ()
    """Further arguments for the runtime, before the image."""

    @model_validator(mode="after")
    def _image_given(self) -> Self:
        if self.runtime != "none" and not self.image:
            raise ValueError(f"container.runtime is {self.runtime!r}, which needs container.image")
        return self

    @field_validator("binds")
    @classmethod
    def _absolute(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for bind in value:
            if not all(part.startswith("/") for part in bind.split(":")[:2]) or "," in bind:
                raise ValueError(f"{bind!r} is not an absolute path without commas, or a pair of them separated by a colon")
        return value


class LocalSite(Section):
    """This machine: one worker process a GPU, or one for the CPU."""

    executor: Literal["local"] = "local"
    """Run here."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: the GPUs when there are any, else the CPU."""
    threads: StrictInt = Field(default=0, ge=0)
    """CPU threads a worker; 0 shares the CPUs (of its affinity, cgroup and Slurm) among the workers, whatever OMP_NUM_THREADS says."""
    container: Container = Container()
    """The image in which the work runs."""

    @model_validator(mode="after")
    def _no_pyxis(self) -> Self:
        if self.container.runtime == "pyxis":
            raise ValueError("container.runtime is 'pyxis', a plugin of Slurm; with executor: local accepted are none, apptainer, podman")
        return self

    @model_validator(mode="after")
    def _gpus_asked_for_are_passed_on(self) -> Self:
        if self.device == "cuda" and self.container.runtime != "none" and not self.container.gpus:
            raise ValueError("device is 'cuda' and container.gpus is false, which hides them; give device: cpu, or container.gpus: true")
        return self


class SlurmSite(Section):
    """A Slurm cluster, reached from a machine that has `sbatch`."""

    executor: Literal["slurm"] = "slurm"
    """Submit to Slurm."""
    partition: str | None = None
    """Partition; left out: the cluster's default."""
    account: str | None = None
    """Account to charge; left out: the user's default."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Feature that nodes must have, for example the name of a GPU."""
    gpus_per_node: StrictInt = Field(default=8, ge=0)
    """GPUs of a node: the most that a multi-node job asks for on each."""
    gpus_per_job: StrictInt = Field(default=1, ge=0)
    """GPUs of a job of the array; a job uses all its GPUs, one worker each. 0 runs on the CPU."""
    gres: str | None = None
    """How GPUs are asked for where `--gpus-per-node` is not accepted, with `{gpus}` for the number, e.g. `gpu:h200:{gpus}`."""
    cpus_per_gpu: StrictInt = Field(default=8, ge=1)
    """CPUs for each worker."""
    mem_gb: StrictFloat | None = Field(default=None, gt=0)
    """Memory of a job; left out: the cluster's default."""
    timeout_min: StrictInt = Field(default=120, ge=1)
    """Time limit of a job. A job that reaches it is requeued and carries on with the cells that are left."""
    signal_delay_s: StrictInt = Field(default=90, ge=10)
    """How long before the limit Slurm warns the job, so that it can requeue."""
    max_requeues: StrictInt = Field(default=3, ge=0)
    """How often a job that reached its time limit is requeued."""
    cells_per_job: StrictInt = Field(default=200, ge=1)
    """About how many cells a job of the array computes; cells of one input stay together."""
    max_jobs: StrictInt = Field(default=64, ge=1)
    """How many jobs of the array may run at once."""
    setup: tuple[str, ...] = ()
    """Shell lines at the start of a job, such as `module load` or `export NCCL_SOCKET_IFNAME=...`."""
    python: str | None = None
    """Interpreter on the nodes that has this package's requirements; left out: the one that submits."""
    srun_args: tuple[str, ...] = ()
    """Further arguments for `srun`."""
    poll_s: StrictFloat = Field(default=10, gt=0)
    """How often Slurm is asked for the states of the jobs."""
    start_timeout_s: StrictFloat = Field(default=900, gt=0)
    """A job that has run for this long without any sign of life is cancelled."""
    container: Container = Container()
    """The image in which the work runs."""

    @field_validator("gres")
    @classmethod
    def _placeholder(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                made = value.format(gpus=1)
                if "{" in made or not made.isprintable():
                    raise ValueError(made)
        except (LookupError, ValueError, TypeError, AttributeError):  # what format raises, by kind of mistake
            raise ValueError(f"{value!r} has another placeholder than {{gpus}}, the number of GPUs; give e.g. gpu:h200:{{gpus}}") from None
        return value

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.timeout_min * 60 < self.signal_delay_s + MARGIN_S:
            least = -(-(self.signal_delay_s + MARGIN_S) // 60)
            raise ValueError(
                f"timeout_min = {self.timeout_min} with signal_delay_s = {self.signal_delay_s}: Slurm may warn the job before it has "
                f"computed anything; give timeout_min >= {least} or a smaller signal_delay_s"
            )
        if self.gpus_per_job > self.gpus_per_node:
            raise ValueError(f"gpus_per_job = {self.gpus_per_job} is more than gpus_per_node = {self.gpus_per_node}")
        return self

    @property
    def usable_s(self) -> float:
        """The time of a job in which cells can run, in seconds."""
        return self.timeout_min * 60 - self.signal_delay_s - 60


Site = LocalSite | SlurmSite


SITE: TypeAdapter[Site] = TypeAdapter(Annotated[Site, Field(discriminator="executor")])


def load(path: Path | None, settings: list[str] | tuple[str, ...] = ()) -> Site:
    """The site in ``path``, or this machine when there is no path. Raises :class:`pipeline.loading.ConfigError`."""
    data = read_mapping(path) if path else {"executor": "local"}
    override(data, settings)
    return validate(SITE, data, str(path or "site"))
