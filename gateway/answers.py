"""Outcomes become responses: the single form, the list form, and the problem of a single text's own error."""

import asyncio
from collections.abc import Sequence
from typing import Any

from gateway.forms import Call
from gateway.predict import Outcome
from gateway.problems import Problem, problem_of
from serving.codec import encode_json
from serving.errors import RowError, RowTooLarge, TextTooLong
from serving.models import ModelSpec
from serving.postprocess import Classification
from serving.settings import GatewaySettings

JSON = "application/json"
# What one row and one number of an answer cost as JSON, about: only to decide which thread renders it.
_BYTES_PER_ROW = 100
_BYTES_PER_NUMBER = 20


async def answer(settings: GatewaySettings, call: Call, spec: ModelSpec, outcomes: Sequence[Outcome]) -> bytes:
    """Return a call's answer as JSON; raises Problem where its single text has an error."""
    if call.single and isinstance(outcomes[0], RowError):
        raise _row_problem(outcomes[0], spec, settings)
    size_bytes = len(outcomes) * (_BYTES_PER_ROW + _BYTES_PER_NUMBER * spec.output_size)
    if size_bytes > settings.offload_bytes:
        return await asyncio.to_thread(_encode, call, spec, outcomes)
    return _encode(call, spec, outcomes)


def _encode(call: Call, spec: ModelSpec, outcomes: Sequence[Outcome]) -> bytes:
    if call.single:
        return encode_json(_single(outcomes[0]))
    return encode_json(
        {"model": spec.name, "model_version": spec.version, "predictions": [_row(outcome) for outcome in outcomes]}
    )


def _single(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Classification) and outcome.sentiment:
        return {"sentiment": outcome.label, "score": outcome.score}
    return _row(outcome)


def _row(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, RowError):
        return {"error": {"code": outcome.code, "message": str(outcome)}}
    return outcome.as_json()


def _row_problem(error: RowError, spec: ModelSpec, settings: GatewaySettings) -> Problem:
    limit = None
    if isinstance(error, TextTooLong):
        limit = spec.max_tokens
    elif isinstance(error, RowTooLarge):
        limit = settings.max_text_chars
    return problem_of(error, field="text", limit=limit)
