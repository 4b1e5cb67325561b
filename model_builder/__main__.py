"""`python -m model_builder build|list|add|verify`: what `twodoor models` does, without the `twodoor` command."""

import argparse
import sys
from pathlib import Path

import model_builder
from model_builder import say, sst2
from serving.errors import ConfigError
from serving.settings import ModelSettings, load


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 1 failed, 2 wrong usage)."""
    chosen = _parser().parse_args(arguments)
    try:
        repository = chosen.repository or load(ModelSettings).repository
        return int(chosen.run(repository, chosen))
    except ConfigError as exc:
        say.progress(f"error: {exc}")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m model_builder", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--repository", type=Path, help="default: TWODOOR_MODELS_REPOSITORY")
    commands = parser.add_subparsers(required=True)

    build = commands.add_parser("build", help="build the default models")
    build.add_argument("models", nargs="*", help="default: all")
    build.add_argument("--precision", choices=("int8", "fp16", "fp32"), default="int8")
    build.add_argument("--cache", type=Path, default=Path(".models-cache"))
    build.set_defaults(run=_build)

    commands.add_parser("list", help="list the repository's models").set_defaults(run=_list)

    add = commands.add_parser("add", help="add a model of your own")
    add.add_argument("name")
    add.add_argument("--onnx", type=Path, required=True)
    add.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    add.add_argument("--task", choices=("classify", "embed"), required=True)
    add.add_argument("--labels", type=Path, help="text file, one label a line")
    add.add_argument("--max-tokens", type=int)
    add.add_argument("--prompt-prefix", default="")
    add.set_defaults(run=_add)

    verify = commands.add_parser("verify", help="check the models again")
    verify.add_argument("models", nargs="*", help="default: all")
    verify.set_defaults(run=_verify)
    return parser


def _build(repository: Path, chosen: argparse.Namespace) -> int:
    model_builder.build(repository, chosen.cache, chosen.precision, chosen.models or None, say.answer)
    return 0


def _list(repository: Path, chosen: argparse.Namespace) -> int:
    for info in model_builder.list_models(repository):
        say.answer(
            f"{info.name}\t{info.task}\t{info.precision or '-'}\t{info.size_bytes / 1e6:.0f} MB\t{', '.join(info.labels)}"
        )
    return 0


def _add(repository: Path, chosen: argparse.Namespace) -> int:
    model_builder.add(
        repository, chosen.name, chosen.onnx, chosen.tokenizer, chosen.task, chosen.labels,
        max_tokens=chosen.max_tokens, prompt_prefix=chosen.prompt_prefix, progress=say.answer,
    )  # fmt: skip
    return 0


def _verify(repository: Path, chosen: argparse.Namespace) -> int:
    results = model_builder.verify(repository, sst2.folder(), chosen.models or None)
    for result in results:
        say.answer(f"{result.name}: {'ok' if result.ok else 'FAILED'}")
        for mark, lines in (("  ", result.passed), ("  wrong: ", result.problems)):
            for line in lines:
                say.answer(f"{mark}{line}")
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
