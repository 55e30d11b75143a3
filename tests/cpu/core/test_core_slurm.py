import os
import pickle
import sys
from pathlib import Path

import pytest

from pipeline import REPOSITORY, slurm, slurm_state
from pipeline.launch import LaunchError
from pipeline.records import Status
from pipeline.site import Container, SlurmSite
from pipeline.slurm_job import Job

SITE = SlurmSite(
    partition="gpu", account="project", gpus_per_node=8, timeout_min=30, mem_gb=64, setup=("module load cuda", "export NCCL_DEBUG=WARN"),
    python="/scratch/env/bin/python", max_jobs=16,
)  # fmt: skip
GOLDEN = Path(__file__).parent


def fake_programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Put shell scripts in front of everything else on PATH."""
    folder.mkdir(exist_ok=True)
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_sacct_output_of_two_attempts_gives_the_last() -> None:
    # a job that was preempted and requeued, as sacct -D shows it; the order of lines does not matter
    first, second = "41|PREEMPTED|2026-11-30T10:00:00", "41|COMPLETED|2026-11-30T10:05:00"
    assert slurm_state.parse_sacct(f"{first}\n{second}\n") == {"41": "COMPLETED"}
    assert slurm_state.parse_sacct(f"{second}\n{first}\n") == {"41": "COMPLETED"}
    assert slurm_state.parse_sacct(f"{first}\n41|PENDING|Unknown\n") == {"41": "PENDING"}


def test_sacct_output_of_arrays_steps_and_words() -> None:
    text = "\n".join(
        [
            "12_0|COMPLETED|2026-11-30T10:00:00",
            "12_1|CANCELLED by 1000|2026-11-30T10:00:00",
            "12_[2-4,7%2]|PENDING|Unknown",
            "12_0.batch|COMPLETED|2026-11-30T10:00:00",
            "13|OUT_OF_MEMORY|2026-11-30T10:00:00",
            "nonsense",
            "",
        ]
    )
    assert slurm_state.parse_sacct(text) == {
        "12_0": "COMPLETED", "12_1": "CANCELLED", "12_2": "PENDING", "12_3": "PENDING", "12_4": "PENDING", "12_7": "PENDING",
        "13": "OUT_OF_MEMORY",
    }  # fmt: skip


def test_the_controller_is_believed_before_the_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = r"printf '7|TIMEOUT|2026-11-30T10:00:00\n8|COMPLETED|2026-11-30T10:00:00\n'"
    fake_programs(tmp_path / "bin", monkeypatch, squeue="echo '7|PENDING'", sacct=f'echo "$@" > {tmp_path}/sacct; {history}')
    assert slurm_state.states({"7", "8"}) == {"7": "PENDING", "8": "COMPLETED"}
    words = (tmp_path / "sacct").read_text().split()
    assert words[words.index("-S") + 1].startswith("now-")  # without a start time sacct forgets jobs at midnight


def test_without_accounting_the_queue_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_programs(tmp_path / "bin", monkeypatch, squeue="printf '7_0|FAILED\\n7_1|RUNNING\\n'", sacct="echo disabled >&2; exit 1")
    assert slurm_state.states({"7"}) == {"7_0": "FAILED", "7_1": "RUNNING"}


def test_no_answer_is_not_the_end_of_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_programs(tmp_path / "bin", monkeypatch, squeue="echo 'Unable to contact slurm controller' >&2; exit 1", sacct="exit 1")
    assert slurm_state.states({"7"}) is None
    forgotten = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    fake_programs(tmp_path / "bin", monkeypatch, squeue=forgotten, sacct="echo '7|COMPLETED|2026-11-30T10:00:00'")
    assert slurm_state.states({"7"}) == {"7": "COMPLETED"}


@pytest.mark.parametrize(
    "output",
    [
        "Submitted batch job 4711\n",
        "Dear user, this job 12 costs 3 units\nSubmitted batch job 4711\n",
        "Submitted batch job 4711 on cluster big\nYour balance: job 99\n",
    ],
)
def test_the_job_id_is_found_among_other_sentences(output: str) -> None:
    assert slurm_state.parse_submission(output) == "4711"


def test_output_without_a_job_id_is_quoted() -> None:
    with pytest.raises(ValueError, match="no job id: 'job 12 was considered"):
        slurm_state.parse_submission("job 12 was considered\n")


def test_every_end_state_has_a_status() -> None:
    assert slurm_state.ENDED["TIMEOUT"] is Status.TIMEOUT
    assert slurm_state.ENDED["OUT_OF_MEMORY"] is Status.OOM
    assert slurm_state.ENDED["NODE_FAIL"] is Status.NODE_FAIL
    assert slurm_state.ENDED["PREEMPTED"] is Status.PREEMPTED
    assert slurm_state.ENDED["CANCELLED"] is Status.CANCELLED
    assert not {"PENDING", "RUNNING", "REQUEUED", "COMPLETING", "SUSPENDED", "CONFIGURING"} & set(slurm_state.ENDED)


def batch_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: SlurmSite, *, array: int = 0, nodes: int = 1, per_node: int = 1
) -> str:
    fake_programs(tmp_path / "bin", monkeypatch, srun="exit 0")
    logs = Path("/results/run/logs")
    executor = slurm.make_executor(site, logs, name="turbopair-abc", nodes=nodes, ranks_per_node=per_node, several=nodes > 1)
    if array:
        executor.parameters["map_count"] = array
    text = str(executor._make_submission_file_text(executor._submitit_command_str, "uid"))
    return text.replace(f"--chdir={REPOSITORY}", "--chdir=/repository")


@pytest.mark.parametrize(
    ("name", "options"), [("array", {"array": 3}), ("ranks", {"nodes": 2, "per_node": 8})], ids=["array of cells", "multi-node job"]
)
def test_the_batch_script_is_the_recorded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, int]) -> None:
    text = batch_text(tmp_path, monkeypatch, SITE, **options)
    assert text == (GOLDEN / f"sbatch_{name}.sh").read_text()


def test_the_batch_script_has_only_what_the_site_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = batch_text(tmp_path, monkeypatch, SlurmSite(python="python3", gpus_per_job=0))
    for word in ("partition", "account", "qos", "constraint", "gres", "gpus", "mem", "wckey", "# setup"):
        assert word not in text, word


def test_the_submitting_interpreter_is_used_only_if_the_site_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sys.executable not in batch_text(tmp_path, monkeypatch, SITE)
    assert sys.executable in batch_text(tmp_path, monkeypatch, SITE.model_copy(update={"python": None}))


def test_gres_is_used_where_the_site_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = batch_text(tmp_path, monkeypatch, SITE.model_copy(update={"gres": "gpu:h200:{gpus}"}), nodes=2, per_node=8)
    assert "#SBATCH --gres=gpu:h200:8" in text
    assert "gpus-per-node" not in text


def test_the_container_is_inside_of_the_job() -> None:
    box = Container(runtime="apptainer", image="/x.sif")
    job = Job(box, Path("/r/jobs/chunks/a.json"), Path("/r"), python="python3", use_gpu=True, ranks=True)
    words = job.command({"RANK": "1"})
    assert words.count("apptainer") == 1
    assert words[words.index("/x.sif") + 1 :] == [
        "python3", "-m", "pipeline", "work", "--cells", "/r/jobs/chunks/a.json", "--results", "/r", "--device", "cuda", "--rank",
    ]  # fmt: skip
    assert sys.executable not in words


def test_a_job_is_pickled_by_reference_and_small() -> None:
    job = Job(Container(), Path("/r/a.json"), Path("/r"), python="python3", use_gpu=True, ranks=False)
    data = pickle.dumps(job)
    assert len(data) < 4096
    assert pickle.loads(data).command({}) == job.command({})


def test_variables_of_an_allocation_do_not_reach_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SUBMITIT_EXECUTOR", "SBATCH_PARTITION", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    with slurm.scrubbed_environment():
        left = {name for name in os.environ if name.startswith(("SLURM", "SUBMITIT", "SBATCH"))}
        assert left == {"SLURM_CONF"}
    assert os.environ["SLURM_JOB_ID"] == "x"


def test_no_sbatch_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"sbatch is not found: .*outside of any container"):
        slurm.check_cluster(SITE)


def test_a_partition_that_does_not_exist_names_those_that_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_programs(tmp_path / "bin", monkeypatch, sbatch="", squeue="", srun="", sinfo="printf 'gpus\\ncpu\\n'")
    with pytest.raises(LaunchError, match=r"'gpu' does not exist \(did you mean 'gpus'\?\); this cluster has cpu, gpus"):
        slurm.check_cluster(SITE)


def test_every_partition_of_a_list_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_programs(tmp_path / "bin", monkeypatch, sbatch="", squeue="", srun="", sinfo="printf 'gpus\\ncpu\\n'")
    slurm.check_cluster(SITE.model_copy(update={"partition": "cpu,gpus"}))
    with pytest.raises(LaunchError, match="'gpu' does not exist"):
        slurm.check_cluster(SITE.model_copy(update={"partition": "cpu,gpu"}))


def test_a_controller_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_programs(tmp_path / "bin", monkeypatch, sbatch="", squeue="", srun="", sinfo="exit 1")
    with pytest.raises(LaunchError, match="controller cannot be reached"):
        slurm.check_cluster(SITE)
