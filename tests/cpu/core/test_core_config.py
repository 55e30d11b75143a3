from pathlib import Path

import pytest

from pipeline import config as configuration
from pipeline import schema
from pipeline import site as sites
from pipeline.launch import check_fit
from pipeline.loading import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
GOOD = """
name: t
accuracy: {implementations: [eager], crops: [16], head_dims: [16], cases: 1}
"""


#: what Python's format refuses in its several ways
GRES = ("{n}", "{}", "{", "{gpus.n}", "{gpus[0]}", "{gpus:z}", "{{gpus}}", "{gpus:c}")


def problem(tmp_path: Path, text: str, settings: tuple[str, ...] = ()) -> str:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        configuration.load(path, settings)
    message = str(caught.value)
    assert "some.yaml" in message or "--set" in message
    return message


def site_problem(tmp_path: Path, text: str) -> str:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        sites.load(path)
    assert "site.yaml" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: t\nacuracy: {implementations: [eager]}", ["acuracy: no such key (did you mean 'accuracy'?)", "determinism"]),
        ("name: t\naccuracy: {implementations: [eager], crop: [16]}", ["accuracy.crop: no such key (did you mean 'crops'?)"]),
        ("name: t\naccuracy: {crops: [16]}", ["accuracy.implementations: this key is required"]),
        ("name: t\naccuracy: {implementations: [eagre]}", ["unknown implementation 'eagre' (did you mean 'eager'?)", "known: ", "sdpa"]),
        ("name: t\naccuracy: {implementations: [eager], crops: [0]}", ["accuracy.crops.0: 0:", "greater than or equal to 1"]),
        ("name: t\naccuracy: {implementations: [eager], crops: []}", ["accuracy.crops: []: needs at least 1 entry"]),
        ("name: t\naccuracy: {implementations: [eager], crops: many}", ['accuracy.crops: "many":', 'valid list, such as ["many"]']),
        ("name: t\naccuracy: {implementations: [eager], crops: 192}", ["accuracy.crops: 192: ", "such as [192]"]),
        ("name: t\nablation: {precisions: []}", ["ablation.precisions: []: needs at least 2 entries"]),
        ("name: t\naccuracy: {implementations: [eager, eager]}", ["accuracy.implementations: eager given twice"]),
        ("name: t\naccuracy: {implementations: [eager], cases: true}", ["accuracy.cases: true:", "valid integer"]),
        ("name: t\naccuracy: {implementations: [eager], cases: '3'}", ['accuracy.cases: "3":', "valid integer"]),
        ("name: t\naccuracy: {implementations: [eager], cases: 1.0}", ["accuracy.cases: 1.0:", "valid integer"]),
        ("name: t\naccuracy: {implementations: [eager], crops: ['16']}", ['accuracy.crops.0: "16":', "valid integer"]),
        ("name: t\naccuracy: {implementations: [eager], cell_timeout_s: '9'}", ['accuracy.cell_timeout_s: "9":', "valid number"]),
        ("name: t\nstep_time: {backends: [lma], nodes: true}", ["step_time.nodes: true:", "valid integer"]),
        (
            "name: t\naccuracy: {implementations: [eager], slices: m}",
            ["some.yaml: accuracy.slices: 'm' is not accepted; give a number of at least 1, or n"],
        ),
        ("name: t\naccuracy: {implementations: [eager], slices: 0}", ["some.yaml: accuracy.slices: 0 is not accepted"]),
        ("name: t\naccuracy: {implementations: [eager], slices: true}", ["some.yaml: accuracy.slices: True is not accepted"]),
        (
            "name: t\naccuracy: {implementations: [eager], families: [peeked]}",
            ["accuracy.families.0: \"peeked\" is not accepted (did you mean 'peaked'?)", "accepted: normal, peaked"],
        ),
        ("name: t\naccuracy: {implementations: [eager], families: [normal, sharp], cases: 1}", ["cases = 1 leaves sharp without a case"]),
        ("name: t\nablation: {precisions: [plain, papper]}", ["ablation.precisions.1", "did you mean 'paper'?"]),
        ("name: t\nablation: {precisions: [paper, exact]}", ["needs 'plain'"]),
        ("name: t\ndeterminism: {implementations: [eager], calls: 1}", ["determinism.calls: 1", "greater than or equal to 2"]),
        (
            "name: t\nstep_time: {backends: [triton+deepspeed]}",
            ["step_time.backends: unknown back end 'triton+deepspeed'", "known: pytorch,"],
        ),
        ("name: t\nstep_time: {backends: [[triton, lma]]}", ['step_time.backends.0: ["triton", "lma"]: input should be a valid string']),
        ("name: t\nstep_time: {backends: {triton: true}}", ['step_time.backends: {"triton": true}: input should be a valid list']),
        ("name: t\nstep_time: {backends: lma}", ['step_time.backends: "lma": input should be a valid list, such as ["lma"]']),
        ("name: t\nstep_time: {backends: [lma, lma]}", ["step_time.backends: lma given twice"]),
        ("name: t\nstep_time: {backends: [lma], crops: [64, 64]}", ["step_time.crops: 64 given twice"]),
        ("name: t\nstep_time: {backends: [lma], ranks_per_node: [1, 1]}", ["step_time.ranks_per_node: 1 given twice"]),
        ("name: t\nstep_time: {backends: [lma], recycles: 4}", ["step_time.recycles: 4: ", "less than or equal to 3"]),
        ("name: t\nstability: {recycles: 4}", ["stability.recycles: 4: ", "less than or equal to 3"]),
        ("name: t\nstep_time: {backends: [tritn]}", ["unknown back end 'tritn' (did you mean 'triton'?)"]),
        ("name: t", ["no experiment is configured"]),
        ("name: a/b\naccuracy: {implementations: [eager]}", ['name: "a/b"']),
        ("name: t\nname: u\n", ["line 2: the key 'name' is given twice"]),
        ("name: t\n? [a, b]\n: 1\n", ["line 2: the key ['a', 'b'] is a list; keys are words"]),
        ("- a", ["expected keys and values, found list"]),
        ("name: [", ["not valid YAML"]),
        ("name: !!map [b]", ["line 1: the value looks like a map and is none"]),
        ("name: " + "[" * 3000, ["not valid YAML: maximum recursion depth"]),
        ("name: t\ntitle: 2024-13-45", ["line 2: '2024-13-45' looks like a timestamp and is none (month must be in 1..12); put a text in"]),
        (
            "name: t\nplugins: ['']\nstability: {}",
            ["plugins: '' is not the name of a module; give the whole name, such as my_package.peers"],
        ),
        ("name: t\nplugins: [.x]\nstability: {}", ["plugins: '.x' is not the name of a module"]),
        ("name: t\nplugins: [no.such.module]\naccuracy: {implementations: [eager]}", []),
    ],
)
def test_errors_name_file_key_value_and_remedy(tmp_path: Path, text: str, expected: list[str]) -> None:
    if "no.such.module" in text:
        path = tmp_path / "some.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"plugins: 'no.such.module' cannot be imported"):
            configuration.load(path)
        return
    message = problem(tmp_path, text)
    for part in expected:
        assert part in message, message


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    message = problem(tmp_path, "name: t\naccuracy: {implementations: [eager], cropz: [1], heads: 0}\nfoo: 1")
    assert len(message.splitlines()) == 3


def test_missing_file_lists_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "smoke.yaml").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such file; this folder has .*smoke\.yaml"):
        configuration.load(tmp_path / "nothing.yaml")


def test_whole_numbers_are_good_where_fractions_are(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(GOOD)
    config = configuration.load(path, ["accuracy.cell_timeout_s=9", "accuracy.slices=3"])
    assert config.accuracy is not None
    assert (config.accuracy.cell_timeout_s, config.accuracy.slices) == (9.0, 3)


def test_settings_replace_values_and_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(GOOD)
    config = configuration.load(path, ["accuracy.crops=[8, 24]", "accuracy.cases=2"])
    assert config.accuracy is not None
    assert config.accuracy.crops == [8, 24]
    assert config.accuracy.cases == 2
    assert "did you mean 'cases'" in problem(tmp_path, GOOD, ("accuracy.case=2",))
    assert "expected key=value" in problem(tmp_path, GOOD, ("accuracy.cases",))
    assert "'name' is not a section" in problem(tmp_path, GOOD, ("name.cases=1",))
    assert "--set title=2024-13-45: line 1: '2024-13-45' looks like" in problem(tmp_path, GOOD, ("title=2024-13-45",))
    assert "--set title=[: not valid YAML" in problem(tmp_path, GOOD, ("title=[",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("executor: slrum", ["executor", "'local', 'slurm'"]),
        ("executor: slurm\npartitoin: gpu", ["partitoin: no such key (did you mean 'partition'?)"]),
        ("executor: local\npartition: gpu", ["partition: no such key", "device"]),
        ("executor: slurm\ntimeout_min: 3\nsignal_delay_s: 90", ["timeout_min = 3 with signal_delay_s = 90", "timeout_min >= 4"]),
        ("executor: slurm\ngpus_per_node: 4\ngpus_per_job: 8", ["gpus_per_job = 8 is more than gpus_per_node = 4"]),
        ("executor: slurm\ncontainer: {runtime: apptainer}", ["container.image"]),
        ("executor: slurm\ncontainer: {runtime: aptainer, image: x}", ["container.runtime", "did you mean 'apptainer'?"]),
        ("executor: slurm\ncontainer: {runtime: apptainer, image: x, binds: [data]}", ["'data' is not an absolute path"]),
        *((f"executor: slurm\ngres: 'gpu:{wrong}'", [f"gres: 'gpu:{wrong}' has another placeholder than {{gpus}}"]) for wrong in GRES),
        ("executor: local\nthreads: '2'", ['threads: "2":', "valid integer"]),
        ("executor: slurm\nmem_gb: true", ["mem_gb: true:", "valid number"]),
        ("executor: local\ndevice: gpu", ['device: "gpu" is not accepted', "accepted: auto, cpu, cuda"]),
    ],
)
def test_site_errors(tmp_path: Path, text: str, expected: list[str]) -> None:
    message = site_problem(tmp_path, text)
    for part in expected:
        assert part in message, message


def test_a_cell_must_fit_into_a_job() -> None:
    config = configuration.ExperimentConfig.model_validate(
        {
            "name": "t",
            "accuracy": {"implementations": ["eager"], "cell_timeout_s": 600},
            "step_time": {"backends": ["lma"], "ranks_per_node": [1, 8]},
        }
    )
    check_fit(config, sites.LocalSite())
    check_fit(config, sites.SlurmSite(timeout_min=90))
    with pytest.raises(ConfigError, match="cell_timeout_s = 600 is longer"):
        check_fit(config, sites.SlurmSite(timeout_min=10))
    with pytest.raises(ConfigError, match="ranks_per_node = 8, but a node of the site has gpus_per_node = 4"):
        check_fit(config, sites.SlurmSite(timeout_min=90, gpus_per_node=4))


def test_generated_files_are_in_step() -> None:
    for path, text in schema.generated().items():
        assert (REPOSITORY / path).read_text() == text, f"{path} is out of date; run: {schema.COMMAND}"


def test_every_key_is_described() -> None:
    reference = schema.generated()[Path("config/REFERENCE.md")]
    rows = [line for line in reference.splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert not [row for row in rows if not row.split("|")[3].strip()]


@pytest.mark.parametrize("path", sorted((REPOSITORY / "config").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_experiments_are_valid(path: Path) -> None:
    config = configuration.load(path)
    assert config.name == path.stem
    assert configuration.ExperimentConfig.model_validate(config.model_dump(mode="json", exclude_none=True)) == config


@pytest.mark.parametrize("path", sorted((REPOSITORY / "config/sites").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_sites_are_valid(path: Path) -> None:
    assert sites.load(path).executor == path.stem.partition("-")[0]


def test_paper_is_what_the_paper_says() -> None:
    from collections import Counter

    from pipeline.plan import plan

    cells = [cell for cell in plan(configuration.read(REPOSITORY / "config/paper.yaml")) if cell.operator == "triangle_attention"]
    for experiment in ("accuracy", "determinism"):
        eager = [cell for cell in cells if cell.experiment == experiment and cell.implementation == "eager"]
        assert len(eager) == 600
        assert set(Counter((cell.n, cell.head_dim) for cell in eager).values()) == {100}
        assert {cell.n for cell in eager} == {384, 640, 768}
        assert {cell.slices == cell.n for cell in eager} == {True}
        assert {cell.heads for cell in eager} == {4}
    assert {cell.options["calls"] for cell in cells if cell.experiment == "determinism"} == {5}
    assert {cell.ranks for cell in cells if cell.experiment == "step_time"} == {16}
    assert {cell.family for cell in cells if cell.experiment == "ablation"} == {"normal", "peaked", "sharp", "offset", "masked", "openfold"}
