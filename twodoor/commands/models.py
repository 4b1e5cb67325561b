"""`twodoor models list|build|add|verify`: the model repository, through model_builder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from twodoor.console import Exit, fail, needs, read_config, say_json

app = typer.Typer(help="The models of the repository.", no_args_is_help=True)


class Precision(StrEnum):
    """The variants a default model can be built in."""

    int8 = "int8"
    fp16 = "fp16"
    fp32 = "fp32"


class Task(StrEnum):
    """What a model of one's own does."""

    classify = "classify"
    embed = "embed"


@contextmanager
def _clear() -> Iterator[None]:
    """Turn the builder's ConfigError, which is written for a person, into one line and exit code 1."""
    with needs("server,local"):
        import model_builder
    try:
        yield
    except model_builder.ConfigError as exc:
        fail(str(exc))


@app.command("list")
def list_models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the models of the repository."""
    with needs("server,local"):
        import model_builder
    repository = read_config().repository
    with _clear():
        models = model_builder.list_models(repository)
    if as_json:
        say_json({"models": [asdict(model) for model in models]})
        return
    for model in models:
        labels = ", ".join(model.labels) or "-"
        size = f"{model.size_bytes / 1e6:.0f} MB"
        typer.echo(
            f"{model.name:<24} {model.task:<9} {model.precision:<5} {size:>7}  {model.max_tokens} tokens  {labels}"
        )
    if not models:
        typer.echo(f"no model in {repository}: twodoor models build")


@app.command("build")
def build(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Default: all.")] = None,
    precision: Annotated[Precision, typer.Option(help="int8 for CPUs, fp16 for GPUs.")] = Precision.int8,
    cache: Annotated[Path, typer.Option(help="Folder of what is downloaded.")] = Path(".models-cache"),
) -> None:
    """Build the default models; what is there and unchanged stays."""
    with needs("server,local"):
        import model_builder
    with _clear():
        model_builder.build(read_config().repository, cache, precision.value, names, typer.echo)


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    onnx: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="The model.")],
    tokenizer: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder with its tokenizer.json.")],
    task: Annotated[Task, typer.Option(help="What it does.")],
    labels: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="One label a line.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a text; default: the tokenizer's.")
    ] = None,
    prompt_prefix: Annotated[str, typer.Option(help="Put before each text.")] = "",
) -> None:
    """Add a model of your own, with its bulk twin; says what is wrong with one that cannot be served."""
    with needs("server,local"):
        import model_builder
    repository = read_config().repository
    with _clear():
        model_builder.add(
            repository, name, onnx, tokenizer, task.value, labels,
            max_tokens=max_tokens, prompt_prefix=prompt_prefix, progress=typer.echo,
        )  # fmt: skip


@app.command("verify")
def verify(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Default: all.")] = None,
    sst2_dir: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, envvar="TWODOOR_SST2_DIR", help="Folder of SST-2: also measure the accuracy."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check files, configs and canary rows of the models; exits 1 where something is wrong."""
    with needs("server,local"):
        import model_builder
    with _clear():
        results = model_builder.verify(read_config().repository, sst2_dir, names)
    if as_json:
        say_json({"models": [{**asdict(result), "ok": result.ok} for result in results]})
    else:
        for result in results:
            typer.echo(f"{result.name}: {'ok' if result.ok else 'wrong'}")
            for line in (*result.passed, *result.problems):
                typer.echo(f"  {line}")
    if not all(result.ok for result in results):
        raise typer.Exit(Exit.FAILED)
