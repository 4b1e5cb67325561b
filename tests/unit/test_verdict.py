"""Whose fault a failure is: the whole table, since a wrong verdict costs somebody a row."""

import pytest

from batch_consumer.verdict import (
    Fault,
    Step,
    after_lone_request,
    after_request,
    crashed,
    fault_of,
    halves,
    sentence,
)
from serving.errors import (
    DeadlineExceeded,
    DependencyDown,
    ModelDied,
    ModelFailed,
    ModelNotReady,
    ModelRefused,
    Overloaded,
    TwodoorError,
    UnknownModel,
)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ModelRefused("x"), Fault.REFUSED),
        (ModelFailed("x"), Fault.FAILED),
        (DeadlineExceeded("x"), Fault.LATE),
        (Overloaded("x"), Fault.BUSY),
        (ModelNotReady("x"), Fault.ABSENT),
        (UnknownModel("x"), Fault.ABSENT),
        (ModelDied("x"), Fault.LOST),
        (DependencyDown("x"), Fault.LOST),
    ],
)
def test_each_error_of_the_pipeline_is_one_kind_of_fault(error: TwodoorError, fault: Fault) -> None:
    assert fault_of(error) is fault


@pytest.mark.parametrize(
    ("fault", "many", "one"),
    [
        (Fault.REFUSED, Step.SPLIT, Step.CONDEMN),
        (Fault.FAILED, Step.SPLIT, Step.RUN_ALONE),
        (Fault.LATE, Step.SPLIT, Step.RUN_ALONE),
        (Fault.BUSY, Step.SLOW_DOWN, Step.SLOW_DOWN),
        (Fault.ABSENT, Step.WAIT, Step.WAIT),
        (Fault.LOST, Step.WAIT_AND_SUSPECT, Step.WAIT_AND_SUSPECT),
    ],
)
def test_a_failed_request_beside_others_condemns_nobody_but_an_input_refused_alone(
    fault: Fault, many: Step, one: Step
) -> None:
    assert after_request(fault, 32) is many
    assert after_request(fault, 1) is one


@pytest.mark.parametrize("fault", [Fault.FAILED, Fault.LATE, Fault.LOST])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (False, False)])
def test_while_the_canary_fails_the_server_is_at_fault_and_the_row_waits(
    fault: Fault, before: bool, after: bool
) -> None:
    assert after_lone_request(fault, before, after, late=9) is Step.WAIT


def test_a_row_that_fails_alone_between_two_canaries_that_pass_is_condemned() -> None:
    assert after_lone_request(Fault.FAILED, True, True, late=0) is Step.CONDEMN
    assert after_lone_request(Fault.REFUSED, True, True, late=0) is Step.CONDEMN


def test_a_row_is_condemned_for_being_late_only_the_second_time() -> None:
    assert after_lone_request(Fault.LATE, True, True, late=1) is Step.RUN_ALONE
    assert after_lone_request(Fault.LATE, True, True, late=2) is Step.CONDEMN


def test_a_death_counts_only_between_two_canaries_that_pass() -> None:
    assert after_lone_request(Fault.LOST, True, True, late=0) is Step.COUNT_DEATH


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.ABSENT])
def test_a_full_queue_or_an_absent_model_is_never_a_row_s_fault(fault: Fault) -> None:
    assert after_lone_request(fault, True, True, late=9) in (Step.WAIT, Step.SLOW_DOWN)


def test_the_error_of_a_condemned_row_has_a_code_of_the_interface_and_no_inner_words() -> None:
    assert sentence(Fault.FAILED, ModelFailed("the model failed on this input")).code == "model_failed"
    assert sentence(Fault.LATE, DeadlineExceeded("inner")).code == "model_failed"
    assert "inner" not in str(sentence(Fault.LATE, DeadlineExceeded("inner")))
    assert crashed(3).code == "row_crashed"


@pytest.mark.parametrize("count", [2, 3, 32])
def test_halves_hold_all_rows_and_are_never_empty(count: int) -> None:
    left, right = halves(list(range(count)))
    assert left + right == list(range(count))
    assert left
    assert right
