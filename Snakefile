# Table of contents of the workflow. Each rule is one command of `python -m pipeline`, which also runs by hand.
#
#   snakemake --profile config/profiles/local                                            all of config/smoke.yaml, here
#   snakemake --profile config/profiles/slurm --config config=config/paper.yaml site=config/sites/slurm.yaml
#   snakemake --profile config/profiles/local accuracy                                   one experiment (or: container, the image)
#
# Started again, it computes what is missing, failed, damaged or of other kernel sources; finished cells cost seconds.
# Failed cells do not stop the workflow: the tables show them with their reasons, and the status at the end names them.
# Cells that were not reached, or a run in which no cell at all succeeded, are errors.
# `python -m pipeline workflow ...` instead of `snakemake ...` also forwards signals that are sent to it alone.
import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.0")
sys.path.insert(0, workflow.basedir)

from pipeline import container_build, workflow as before

GIVEN = before.values(config, sys.argv[1:] if workflow.is_main_process else [])
CONFIG = GIVEN.get("config") or "config/smoke.yaml"
SITE = GIVEN.get("site") or "config/sites/local.yaml"
IMAGE = GIVEN.get("image") or "containers/image.yaml"
PYTHON = GIVEN.get("python") or sys.executable
SETTINGS, PLACE = before.read(Path(CONFIG), Path(SITE))
RESULTS = GIVEN.get("results") or f"results/{SETTINGS.name}"
SHOWN = [f"{RESULTS}/claims.md", f"{RESULTS}/report.html"]
THREADS = before.threads(PLACE, workflow.resource_settings.cores and workflow.cores)

wildcard_constraints:
    experiment="accuracy|determinism|ablation|kernel_time|step_time|stability",

onsuccess:
    shell("[ ! -e {RESULTS:q}/config.yaml ] || {PYTHON:q} -m pipeline status {RESULTS:q}")  # the image alone is no run

rule all:
    input: SHOWN

rule accuracy:
    input: f"{RESULTS}/jobs/accuracy.done"

rule determinism:
    input: f"{RESULTS}/jobs/determinism.done"

rule ablation:
    input: f"{RESULTS}/jobs/ablation.done"

rule kernel_time:
    input: f"{RESULTS}/jobs/kernel_time.done"

rule step_time:
    input: f"{RESULTS}/jobs/step_time.done"

rule stability:
    input: f"{RESULTS}/jobs/stability.done"

rule tables:
    input: f"{RESULTS}/claims.md"

rule report:
    input: f"{RESULTS}/report.html"

rule container:
    input: container_build.input_files()
    output: touch("build/container/done")
    log: "build/container/snakemake.log"
    resources: mem_mb=16000
    shell: "exec {PYTHON:q} -m pipeline container build --config {IMAGE:q} > {log} 2>&1"

rule measure:
    input: CONFIG, SITE
    output: touch(f"{RESULTS}/jobs/{{experiment}}.done")
    log: f"{RESULTS}/jobs/logs/snakemake-{{experiment}}.log"
    message: "{wildcards.experiment}: log in {log}"
    threads: THREADS
    resources: mem_mb=16000
    shell: "exec {PYTHON:q} -m pipeline run --config {CONFIG:q} --site {SITE:q} --results {RESULTS:q}"
           " --experiment {wildcards.experiment} --keep-going --no-tables --log {log:q}"

rule write_tables:
    input: expand(f"{RESULTS}/jobs/{{experiment}}.done", experiment=SETTINGS.experiments())
    output: SHOWN
    log: f"{RESULTS}/jobs/logs/snakemake-tables.log"
    message: "tables, figures, claims and report in {RESULTS}"
    resources: mem_mb=4000
    shell: "exec {PYTHON:q} -m pipeline tables {RESULTS:q} --log {log:q}"

if workflow.is_main_process:
    before.check(SETTINGS, PLACE, Path(RESULTS), sys.argv[1:], [rule.name for rule in workflow.rules if not rule.has_wildcards()])
