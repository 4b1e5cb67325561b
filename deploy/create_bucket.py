"""Make the bucket of jobs where it is missing, with a rule that aborts uploads nobody goes on with.

Reads what the doors read: TWODOOR_JOBS_OBJECTS_URL, _ENDPOINT and _REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
Only the standard library: three requests, signed as S3 wants it (AWS Signature Version 4). Exit code 0: the bucket is there.
"""

import base64
import hashlib
import hmac
import http.client
import os
import sys
from datetime import UTC, datetime
from urllib.parse import urlsplit

TIMEOUT_S = 10
RULE = (
    "<LifecycleConfiguration><Rule><ID>abort-unfinished-uploads</ID><Status>Enabled</Status><Filter><Prefix></Prefix>"
    "</Filter><AbortIncompleteMultipartUpload><DaysAfterInitiation>1</DaysAfterInitiation>"
    "</AbortIncompleteMultipartUpload></Rule></LifecycleConfiguration>"
)


class Bucket:
    """One bucket of one S3-compatible store, addressed by path."""

    def __init__(self, name: str, endpoint: str, region: str, key: str, secret: str) -> None:
        self._name, self._region, self._key, self._secret = name, region, key, secret
        self._url = urlsplit(endpoint)

    def request(self, method: str, query: str = "", body: bytes = b"") -> int:
        """Send one signed request and return the status; raises OSError where the store is away."""
        https = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        connection = kind(self._url.netloc, timeout=TIMEOUT_S)
        path = f"/{self._name}"
        try:
            target = f"{path}?{query.rstrip('=')}" if query else path
            connection.request(method, target, body or None, self._headers(method, path, query, body))
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    def _headers(self, method: str, path: str, query: str, body: bytes) -> dict[str, str]:
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        digest = hashlib.sha256(body).hexdigest()
        headers = {
            "content-md5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode(),
            "host": self._url.netloc,
            "x-amz-content-sha256": digest,
            "x-amz-date": now,
        }
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        canonical = "\n".join((method, path, query, lines, names, digest))
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        text = "\n".join(("AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()))
        signing = f"AWS4{self._secret}".encode()
        for part in scope.split("/"):
            signing = hmac.digest(signing, part.encode(), "sha256")
        signature = hmac.new(signing, text.encode(), "sha256").hexdigest()
        authorization = f"AWS4-HMAC-SHA256 Credential={self._key}/{scope}, SignedHeaders={names}, Signature={signature}"
        return {**headers, "authorization": authorization}


def main() -> int:
    """Make the bucket and its rule; a store that does not know such rules is told of and no error."""
    read = os.environ.get
    name = urlsplit(read("TWODOOR_JOBS_OBJECTS_URL", "")).netloc
    region = read("TWODOOR_JOBS_OBJECTS_REGION") or "us-east-1"
    endpoint = read("TWODOOR_JOBS_OBJECTS_ENDPOINT", "")
    bucket = Bucket(name, endpoint, region, read("AWS_ACCESS_KEY_ID", ""), read("AWS_SECRET_ACCESS_KEY", ""))
    try:
        if (status := bucket.request("HEAD")) == http.HTTPStatus.NOT_FOUND:
            where = f"<CreateBucketConfiguration><LocationConstraint>{region}</LocationConstraint></CreateBucketConfiguration>"
            status = bucket.request("PUT", body=b"" if region == "us-east-1" else where.encode())
        if status != http.HTTPStatus.OK:
            print(f"bucket {name}: the store answered {status}")  # noqa: T201 - a one-shot's only output
            return 1
        rule = bucket.request("PUT", "lifecycle=", RULE.encode())
    except OSError as exc:
        print(f"bucket {name}: {exc}")  # noqa: T201
        return 1
    said = "set" if rule == http.HTTPStatus.OK else f"refused ({rule})"
    print(f"bucket {name}: there; the rule for unfinished uploads: {said}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
