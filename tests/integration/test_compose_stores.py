"""What compose.yaml's one-shots do to the stores: the bucket and its rule, on an S3-compatible server."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.parts import ROOT
from tests.s3 import KEYS, S3Server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    made = S3Server().start()
    yield made
    made.stop()


def create_bucket(server: S3Server, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Run the one-shot `bucket` with the variables of compose.yaml."""
    environment = {
        **os.environ, **KEYS, "TWODOOR_JOBS_OBJECTS_URL": "s3://twodoor", "TWODOOR_JOBS_OBJECTS_ENDPOINT": server.endpoint,
        **settings,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, str(ROOT / "deploy/create_bucket.py")],
        env=environment, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_the_bucket_is_made_once_and_aborts_uploads_nobody_goes_on_with(server: S3Server) -> None:
    for _ in range(2):
        done = create_bucket(server)
        assert (done.returncode, done.stdout.strip()) == (
            0, "bucket twodoor: there; the rule for unfinished uploads: set",
        ), done.stderr  # fmt: skip
    status, rule = server.request("GET", "/twodoor?lifecycle")
    assert status == 200
    assert b"<DaysAfterInitiation>1</DaysAfterInitiation>" in rule
    other = {"TWODOOR_JOBS_OBJECTS_URL": "s3://elsewhere", "TWODOOR_JOBS_OBJECTS_REGION": "eu-central-1"}
    assert create_bucket(server, **other).returncode == 0


def test_a_store_that_is_away_is_said_in_one_line(server: S3Server) -> None:
    done = create_bucket(server, TWODOOR_JOBS_OBJECTS_ENDPOINT="http://127.0.0.1:1")
    assert (done.returncode, done.stderr) == (1, "")
    assert len(done.stdout.splitlines()) == 1
