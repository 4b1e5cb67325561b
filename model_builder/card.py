"""Write MODEL_CARD.md. Figures of accuracy, flips and speed are only ever copied from a measurement, never made up."""

from collections.abc import Mapping, Sequence
from typing import Any

from model_builder import tables

_MEASURE = "python -m model_builder.measure"


def default_card(name: str, title: str, source: str, precision: str, facts: Mapping[str, str]) -> str:
    """Return the card of a default model, with the committed measurements of all its variants."""
    measured = tables.load_measured()
    lines = [
        f"# {name}",
        "",
        f"{title}. Weights from Maven `{source}`; this folder holds the **{precision}** variant.",
        "",
    ]
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    lines += ["", "## Measured", ""]
    variants: Mapping[str, Mapping[str, Any]] = measured.get("models", {}).get(name, {})
    if variants:
        lines += _table(variants, precision)
        lines += ["", f"{measured['method']}. Measured on {measured['machine']}; read speed as a ratio.", ""]
        lines.append(f"`{_MEASURE}` prints these figures again and, with `--save`, replaces the committed ones.")
    else:
        lines.append(f"Not measured yet: `{_MEASURE}`.")
    return "\n".join(lines) + "\n"


def added_card(name: str, facts: Mapping[str, str]) -> str:
    """Return the card of a user's own model: what was seen when it was added."""
    lines = [f"# {name}", "", "A model added with `twodoor models add`.", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    lines += ["", f"Accuracy and speed were not measured. `twodoor models verify {name}` runs the checks again."]
    return "\n".join(lines) + "\n"


_COLUMNS = {
    "accuracy_alone": ("accuracy alone", "{:.4f}"),
    "accuracy_batched": ("in batches", "{:.4f}"),
    "flips": ("labels that flip", "{:d}"),
    "largest_change": ("largest change of an output", "{:.1e}"),
    "rows_per_s": ("rows/s", "{:.0f}"),
    "rows_per_s_alone": ("rows/s one by one", "{:.0f}"),
    "size_mb": ("size MB", "{:.0f}"),
}


def _table(variants: Mapping[str, Mapping[str, Any]], precision: str) -> Sequence[str]:
    columns = [key for key in _COLUMNS if any(key in row for row in variants.values())]
    lines = [
        "| variant | " + " | ".join(_COLUMNS[key][0] for key in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for variant, row in variants.items():
        cells = [_COLUMNS[key][1].format(row[key]) if key in row else "" for key in columns]
        shown = f"**{variant}** (here)" if variant == precision else variant
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    return lines
