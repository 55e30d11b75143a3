"""The commands `python -m pipeline container build|selftest|digest|definition`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

P = ParamSpec("P")
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Build the image in which experiments run, and look at one.")
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="How to build (YAML, see containers/image.yaml); left out: the defaults.")
]
SetOption = Annotated[list[str], typer.Option("--set", help="Change a value: key=value, such as tool=buildah.")]


def _clear_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Errors that are the user's to mend are printed as text, without a traceback."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        from pipeline.container_build import BuildError
        from pipeline.container_definition import DefinitionError
        from pipeline.container_image import ImageError
        from pipeline.container_selftest import SelfTestError
        from pipeline.loading import ConfigError
        from pipeline.records import RecordWriteError

        try:
            command(*args, **kwargs)
        except RecordWriteError as error:
            typer.echo(f"error: {error.strerror}", err=True)
            raise typer.Exit(2) from None
        except (BuildError, ConfigError, DefinitionError, ImageError, SelfTestError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None

    return wrapped


@app.command()
@_clear_errors
def build(
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
    force: Annotated[bool, typer.Option(help="Build although the image is up to date.")] = False,
) -> None:
    """Build the image with apptainer, buildah or podman, unless one of the same inputs is there."""
    from pipeline import container_build
    from pipeline.container_image import read_built
    from pipeline.container_selftest import lines

    images = container_build.build(container_build.load(config, set_), typer.echo, force=force)
    built = read_built(images[0])
    if built is not None:
        for line in lines(built.record):
            typer.echo(line)


@app.command()
@_clear_errors
def selftest(
    write: Annotated[Path | None, typer.Option("--write", help="Write what was found as JSON.")] = None,
    inputs: Annotated[str, typer.Option(help="Digest of the inputs of the build.")] = "unknown",
    kernels: Annotated[str, typer.Option(help="required or optional: whether the kernel library must be there.")] = "optional",
) -> None:
    """Inside an image: what can be imported, and why the rest cannot. Ends every build."""
    from pipeline import container_selftest

    record = container_selftest.examine(inputs)
    for line in container_selftest.lines(record):
        typer.echo(line)
    container_selftest.check(record, kernels)
    if write is not None:
        container_selftest.write(record, write)


@app.command()
@_clear_errors
def digest(
    image: Annotated[str, typer.Argument(help="Path or name of an image; left out: the digest of the inputs of a build.")] = "",
    runtime: Annotated[str, typer.Option(help="apptainer, podman or pyxis.")] = "apptainer",
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
) -> None:
    """Print the digest that records made in an image carry, or that of what an image would be built from."""
    from pipeline import container_build, container_image
    from pipeline.loading import validate
    from pipeline.site import Container

    if image:
        box = validate(Container, {"runtime": runtime, "image": image}, "container")
        typer.echo(container_image.digest(box))
    else:
        typer.echo(container_build.inputs_digest(container_build.load(config, set_)))


@app.command()
@_clear_errors
def definition(write: Annotated[bool, typer.Option("--write", help="Write containers/turbopair.def.")] = False) -> None:
    """Print the Apptainer definition that is generated from the Containerfile."""
    from pipeline import container_definition as definitions

    text = definitions.generate(definitions.CONTAINERFILE.read_text(encoding="utf-8"))
    if write:
        definitions.DEFINITION.write_text(text, encoding="utf-8")
    else:
        typer.echo(text, nl=False)
