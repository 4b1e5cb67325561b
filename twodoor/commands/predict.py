"""`twodoor predict`: ask the interactive door for a few texts."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from twodoor.asking import exits
from twodoor.console import Exit, plain, say_json, shorten

if TYPE_CHECKING:
    from twodoor.wire import Prediction, Predictions


def predict(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="One text or several.")],
    model: Annotated[str | None, typer.Option(help="Name of the model; default: the server's.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a text that is too long for the model.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.001, help="Deadline of the call.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
) -> None:
    """Ask the interactive door; exits 1 where a text has no answer."""
    from twodoor.client import Client
    from twodoor.errors import RowFailed

    with exits(tell_when=False), Client(timeout_s=timeout_s) as client:
        answer = client.predict_many(texts, model=model, truncate=truncate)
    if as_json:
        say_json(_whole(answer))
    else:
        for text, row in zip(texts, answer.rows, strict=True):
            line = f"error     {row.code}: {row}" if isinstance(row, RowFailed) else _line(row)
            typer.echo(f"{plain(line)}  {shorten(text, 80)}")
    if any(isinstance(row, RowFailed) for row in answer.rows):
        raise typer.Exit(Exit.FAILED)


def _line(row: "Prediction") -> str:
    if row.embedding is not None:
        shown = ", ".join(f"{value:.3f}" for value in row.embedding[:4])
        return f"[{shown}, …] {len(row.embedding)} numbers"
    return f"{row.label:<9} {(row.scores or {}).get(row.label or '', 0.0):.3f}"


def _whole(answer: "Predictions") -> dict[str, Any]:
    return {
        "model": answer.model,
        "model_version": answer.model_version,
        "predictions": [_row(row) for row in answer.rows],
    }


def _row(row: "Prediction | Exception") -> dict[str, Any]:
    from twodoor.errors import RowFailed

    if isinstance(row, RowFailed):
        return {"error": {"code": row.code, "message": str(row)}}
    fields = ("sentiment", "label", "score", "scores", "embedding")
    return {name: value for name in fields if (value := getattr(row, name)) is not None}
