"""`twodoor models list|build|add|verify|switch`: the model repository, through model_builder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from twodoor.config import ClientConfig
from twodoor.console import Exit, fail, needs, read_config, say_json

PINNED_TIMEOUT_S = 10.0
# An old version is unloaded once it had no request for as long; a door looks which one to use every second.
SETTLE_S = 4.0

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
    """Turn the builder's errors, which are written for a person, into one line and exit code 1 (3: no model server)."""
    with needs("server,local"):
        import model_builder
    try:
        yield
    except model_builder.ConfigError as exc:
        fail(str(exc))
    except model_builder.DependencyDown as exc:
        fail(f"{exc}; nothing is lost: the same command again goes on", Exit.NOT_REACHABLE)


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
            f"{model.name:<24} {model.task:<9} {model.precision:<5} {size:>7}  version {model.version:<3} {model.max_tokens} tokens  {labels}"
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
    version: Annotated[
        str | None, typer.Option(metavar="N", help="A further version of a model that is there; `switch` serves it.")
    ] = None,
    twin: Annotated[
        bool,
        typer.Option("--twin/--no-twin", help="Bulk work on instances of its own, or behind callers in one queue."),
    ] = True,
) -> None:
    """Add a model of your own, with its bulk twin; says what is wrong with one that cannot be served."""
    if version and (max_tokens or prompt_prefix or not twin):
        fail("--max-tokens, --prompt-prefix and --no-twin are the model's: a version has none of its own", Exit.USAGE)
    with needs("server,local"):
        import model_builder
    repository = read_config().repository
    with _clear():
        model_builder.add(
            repository, name, onnx, tokenizer, task.value, labels,
            max_tokens=max_tokens, prompt_prefix=prompt_prefix, progress=typer.echo, version=version, has_twin=twin,
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


@app.command("switch")
def switch(
    name: Annotated[str, typer.Argument(metavar="MODEL")],
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Name of its folder: a whole number.")],
    timeout_s: Annotated[float, typer.Option(min=1, help="How long loading and waiting may take together.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Serve another version of a model, without a gap: load it and its twin, route to it, unload the old one.

    Waits until no open job needs the old version. Interrupted, or out of time: the same command again goes on.
    """
    with needs("server,local"):
        import model_builder
    config = read_config()
    with _clear():
        done = model_builder.switch(
            config.repository, name, version,
            triton_address=config.triton_address,
            pinned=lambda: pinned_versions(config, name),
            timeout_s=timeout_s,
            settle_s=SETTLE_S,
            progress=(lambda line: typer.echo(line, err=True)) if as_json else typer.echo,
        )  # fmt: skip
    if as_json:
        say_json(asdict(done))
    if not done.retired:
        old = ", ".join(done.previous)
        fail(
            f"{name} serves version {version}; version {old} stays loaded: {done.reason}. The same command again goes on"
        )
    if not as_json:
        typer.echo(f"{name}: version {version} serves alone")


def pinned_versions(config: ClientConfig, model: str) -> frozenset[str] | None:
    """Return the versions of a model that open jobs have pinned; None where the gateway does not tell."""
    import httpx

    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    try:
        answer = httpx.get(f"{config.url}/v1/admin/models", headers=headers, timeout=PINNED_TIMEOUT_S, trust_env=False)
        if answer.status_code == httpx.codes.NOT_FOUND and answer.json()["code"] == "not_found":
            return frozenset()  # a gateway without jobs, and not another program at its address
        answer.raise_for_status()
        return frozenset(str(version) for version in answer.json()["pinned"].get(model, ()))
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return None
