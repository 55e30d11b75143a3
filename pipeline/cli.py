"""The command line, `python -m pipeline COMMAND`."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from pipeline import REPOSITORY
from pipeline.cells import EXPERIMENTS, TABLES
from pipeline.container_cli import app as container_app

if TYPE_CHECKING:
    from pipeline.folder import RunFolder
    from pipeline.records import Reading

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(container_app, name="container")
P = ParamSpec("P")


def _one_of(*known: str) -> Callable[[str], str]:
    """Reads one of ``known``. An enumeration would do it too, but its error does not name the nearest."""

    def read(word: str) -> str:
        from pipeline.loading import nearest

        if word not in known:
            raise typer.BadParameter(f"{word!r} is not known{nearest(word, known)}; there are {', '.join(known)}")
        return word

    return read


TABLE_NAMES = (*TABLES, "claims")
TableArgument = Annotated[str, typer.Argument(parser=_one_of(*TABLE_NAMES), metavar="TABLE", help=f"One of {', '.join(TABLE_NAMES)}.")]

ConfigOption = Annotated[Path, typer.Option("--config", help="What to run (YAML, see config/).")]
SiteOption = Annotated[Path | None, typer.Option("--site", help="Where to run (YAML, see config/sites/); left out: this machine.")]
ResultsOption = Annotated[Path | None, typer.Option("--results", help="Folder of the run; left out: results/<name of the configuration>.")]
SetOption = Annotated[list[str], typer.Option("--set", help="Change a value of the configuration: key=value, such as accuracy.cases=2.")]
SiteSetOption = Annotated[list[str], typer.Option("--set-site", help="Change a value of the site: key=value.")]
ExperimentOption = Annotated[
    list[str],
    typer.Option(
        "--experiment",
        "-e",
        parser=_one_of(*EXPERIMENTS),
        metavar="|".join(EXPERIMENTS),
        help="Only this experiment; may be given several times.",
    ),
]
LogOption = Annotated[Path | None, typer.Option("--log", help="Write what is printed to this file, too.")]
SMOKE = Path("config/smoke.yaml")


def _clear_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Errors that are the user's to mend are printed as text, without a traceback."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        from pipeline.folder import FolderError
        from pipeline.launch import LaunchError, Stopped
        from pipeline.loading import ConfigError
        from pipeline.output import also_to
        from pipeline.records import DamagedRecord, RecordWriteError

        def failed(text: str, status: int = 2) -> int:
            typer.echo(text, err=True)
            return status

        def attempt() -> int:
            try:
                command(*args, **kwargs)
            except typer.Exit as end:
                return end.exit_code
            except (ConfigError, FolderError, LaunchError) as error:
                return failed(f"error: {error}")
            except RecordWriteError as error:
                return failed(f"error: {error.strerror}")
            except DamagedRecord as error:
                return failed(f"error: {error}; {_remedy(error.path)}")
            except Stopped as stop:
                return failed("stopped; the same command carries on with the cells that are left", 128 + stop.number)
            return 0

        log = kwargs.get("log")
        try:
            with also_to(log if isinstance(log, Path) else None):
                status = attempt()
        except BrokenPipeError:  # the reader of the output has gone, as with `| head`
            raise
        except (OSError, EOFError) as error:
            named = getattr(error, "filename", None)
            what = f"{named}: {error.strerror}" if named and isinstance(error, OSError) else str(error) or type(error).__name__
            status = failed(f"error: {what}; see that the file is there and whole and the disk has room, then start the same command again")
        if status:
            raise typer.Exit(status)

    return wrapped


def _remedy(path: Path) -> str:
    """What to do about a damaged record or archive."""
    if path.suffix == ".gz":
        return "put the file back as it was (git checkout), or write it again from the run with `python -m pipeline archive`"
    return "`python -m pipeline run` with the configuration of the folder computes the cell again"


@app.command()
@_clear_errors
def plan(config: ConfigOption = SMOKE, set_: SetOption = [], experiment: ExperimentOption = [], ids: bool = False) -> None:  # noqa: B006
    """Print how many cells a configuration has; with --ids also the id of each."""
    from collections import Counter

    from pipeline import config as configuration
    from pipeline.plan import plan as make_plan

    settings = configuration.load(config, set_)
    settings.check_sections(experiment)
    cells = make_plan(settings, experiment or None)
    if ids:
        for cell in cells:
            typer.echo(cell.id)
        return
    counts = Counter((cell.table, cell.implementation) for cell in cells)
    for (name, implementation), number in counts.items():
        typer.echo(f"{name:26} {implementation:24} {number:6}")
    typer.echo(f"{'all':51} {len(cells):6}")


@app.command()
@_clear_errors
def run(
    config: ConfigOption = SMOKE,
    site: SiteOption = None,
    results: ResultsOption = None,
    experiment: ExperimentOption = [],  # noqa: B006
    set_: SetOption = [],  # noqa: B006
    set_site: SiteSetOption = [],  # noqa: B006
    keep_going: Annotated[bool, typer.Option(help="Exit with 0 although cells failed: the tables show them with their reasons.")] = False,
    tables: Annotated[bool, typer.Option(help="Write the tables at the end.")] = True,
    log: LogOption = None,
) -> None:
    """Compute every cell that has no result yet, then write the tables.

    Exit status: 0 when all went well; 1 when cells failed (they are named, the others were finished); 2 when no cell succeeded or
    nothing could be computed; 128 + signal when stopped. With --keep-going failed cells are no error, missing ones are.
    """
    from pipeline import config as configuration
    from pipeline import launch
    from pipeline import site as sites
    from pipeline.status import write_status

    settings = configuration.load(config, set_)
    root = results or Path("results") / settings.name
    summary = launch.run(settings, sites.load(site, set_site), root, experiments=experiment or None, say=typer.echo)
    write_status(root)
    typer.echo(summary.text())
    if tables:
        _write_tables(root)
    if summary.exit_status and not (keep_going and not summary.missing):
        raise typer.Exit(summary.exit_status)


@app.command()
def work(
    cells: Annotated[Path, typer.Option(help="Chunk file written by the launcher.")],
    results: Annotated[Path, typer.Option(help="Folder of the run.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: int = 0,
    attached: bool = False,
    rank: bool = False,
) -> None:
    """Compute the cells of a chunk on this machine (started by `run`, here or in a job)."""
    from pipeline import work as worker

    raise typer.Exit(worker.work(cells, results, device=device, threads=threads, attached=attached, rank=rank))


@app.command()
@_clear_errors
def status(results: Annotated[Path, typer.Argument(help="Folder of the run.")] = Path("results/smoke")) -> None:
    """What is done, missing and failed, by experiment and implementation, with the reasons."""
    from pipeline.status import print_status

    print_status(results)


@app.command()
@_clear_errors
def tables(results: Annotated[Path, typer.Argument(help="Folder of the run.")] = Path("results/smoke"), log: LogOption = None) -> None:
    """Write tables, figures, claims.md and report.html from the records.

    Exit status: 2 when no cell has succeeded; the tables are written all the same and say why each row is empty.
    """
    if not _write_tables(results):
        raise typer.Exit(2)


@app.command()
@_clear_errors
def archive(
    results: Annotated[Path, typer.Argument(help="Folder of the run.")],
    target: Annotated[Path, typer.Argument(help="Folder to write, such as results/reference/<gpu>-<date>.")],
    config: Annotated[
        Path | None, typer.Option("--config", help="A configuration with more cells than the run: they become rows 'not run'.")
    ] = None,
) -> None:
    """Copy a run into a folder that can be committed: its configuration, all records in one compressed file, tables and report."""
    from pipeline import config as configuration
    from pipeline.archive import archive as write_archive
    from pipeline.folder import RunFolder

    source = RunFolder(results)
    settings = source.read_config() if config is None else configuration.load(config)
    number = write_archive(source, RunFolder(target), settings)
    typer.echo(f"{number} records in {target / 'records.jsonl.gz'}")
    _write_tables(target)


@app.command()
@_clear_errors
def gather(
    target: Annotated[Path, typer.Argument(help="Run folder to make, or to add to.")],
    sources: Annotated[list[Path], typer.Argument(help="Run folders and archived runs.")],
    config: Annotated[Path | None, typer.Option("--config", help="Configuration of the run folder. [default: the first source's]")] = None,
) -> None:
    """Make a run folder of an archived run, to carry on with it, or of the records of several sittings.

    Of several records of a cell the newest with numbers counts, those of GPUs before those of a CPU. Records of other
    kernel sources are left out.
    """
    from pipeline import config as configuration
    from pipeline.folder import RunFolder
    from pipeline.gather import gather as gather_records
    from pipeline.launch import kernel_digest

    folders = [RunFolder(source) for source in sources]
    settings = folders[0].read_config() if config is None else configuration.load(config)
    typer.echo(gather_records(RunFolder(target), folders, settings, kernel_digest()))


@app.command()
@_clear_errors
def show(table: TableArgument, results: Annotated[Path, typer.Argument(help="Folder of the run.")] = Path("results/smoke")) -> None:
    """Print the table of one experiment, or the claims, in the terminal."""
    from rich.console import Console

    from pipeline.config import load_plugins
    from pipeline.folder import RunFolder
    from pipeline.plan import plan as make_plan
    from pipeline.show import show as print_table
    from pipeline.show import show_claims

    folder = RunFolder(results)
    config = folder.read_config()
    load_plugins(config)
    records = _read(folder).records
    if table == "claims":
        show_claims(records, Console(), make_plan(config))
    else:
        print_table(table, records, Console(), make_plan(config))


@app.command()
@_clear_errors
def site(write: Annotated[Path | None, typer.Option("--write", help="Write the site file here, if it differs.")] = None) -> None:
    """Find out where experiments can run: the GPUs of this machine, a Slurm cluster with GPUs, or the CPU; print the site file."""
    from pipeline.detect import detect, site_file

    found, why = detect()
    text = site_file(found, why)
    if write is None:
        typer.echo(text, nl=False)
        return
    typer.echo(f"site: {why}")
    if not write.exists() or write.read_text(encoding="utf-8") != text:  # its time stamp makes Snakemake look for missing results
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(text, encoding="utf-8")


@app.command()
@_clear_errors
def doctor(site: SiteOption = None) -> None:
    """What this machine can run, and what to do about the rest."""
    from pipeline.doctor import print_report

    raise typer.Exit(0 if print_report(site) else 1)


@app.command("config")
@_clear_errors
def config_(
    files: Annotated[list[Path], typer.Argument(help="Experiment or site files to check.")] = [],  # noqa: B006
    write: Annotated[bool, typer.Option("--write", help="Generate config/schema/*.json and config/REFERENCE.md anew.")] = False,
) -> None:
    """Check configuration files, or generate the schema and the reference of all keys."""
    from pipeline import config as configuration
    from pipeline import schema
    from pipeline import site as sites
    from pipeline.loading import read_mapping

    if write:
        for path, text in schema.generated().items():
            target = REPOSITORY / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            typer.echo(path)
    for file in files:
        if "executor" in read_mapping(file):
            sites.load(file)
        else:
            configuration.load(file)
        typer.echo(f"{file}: good")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def workflow(context: typer.Context) -> None:
    """Run snakemake with the arguments given, and forward signals to everything it started (Ctrl-C, SIGTERM, SIGHUP)."""
    from pipeline.workflow import snakemake

    raise typer.Exit(snakemake(context.args))


def _read(folder: RunFolder) -> Reading:
    """The records of a run, after naming the damaged ones."""
    reading = folder.store.read_all()
    for damaged in reading.damaged:
        typer.echo(f"{damaged}; left out of the tables, the next run computes it again", err=True)
    return reading


def _write_tables(root: Path) -> bool:
    """Write them, and say where and what is odd about them; whether any cell of the run has succeeded."""
    from pipeline.config import load_plugins
    from pipeline.folder import RunFolder
    from pipeline.provenance import machine
    from pipeline.summary import on_gpu
    from pipeline.tables import write_all

    folder = RunFolder(root)
    config = folder.read_config()
    load_plugins(config)
    reading = _read(folder)
    gpus = sorted({name for record in reading.records if on_gpu(name := machine(record.environment))})
    if len(gpus) > 1:
        typer.echo(f"warning: records of {len(gpus)} GPU models in one run ({', '.join(gpus)}); the tables keep them apart", err=True)
    succeeded = any(record.status == "ok" for record in reading.records)
    if not succeeded:
        typer.echo(f"warning: no cell has succeeded: the tables hold reasons only; see `python -m pipeline status {root}`", err=True)
    write_all(reading.records, config, folder.root)
    typer.echo(f"tables: {root / 'tables'}  claims: {root / 'claims.md'}  report: {root / 'report.html'}")
    return succeeded


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a µ shows a question mark
    sys.path[:0] = [] if str(REPOSITORY) in sys.path else [str(REPOSITORY)]
    app()
