"""Whether a head opens the WebSocket of the stream. Pure: no I/O."""

import base64
import binascii

from gateway.stream_socket import PATH, Headers


def is_handshake(url: bytes, headers: Headers) -> bool:
    """Return whether a GET is a whole WebSocket handshake for the one path that speaks it (RFC 6455 section 4.2.1)."""
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        fields[name] = fields[name] + b"," + value if name in fields else value
    options = [option.strip().lower() for option in fields.get(b"connection", b"").split(b",")]
    return (
        url.partition(b"?")[0] == PATH.encode()
        and b"upgrade" in options
        and fields.get(b"upgrade", b"").lower() == b"websocket"
        and fields.get(b"sec-websocket-version") == b"13"
        and _is_key(fields.get(b"sec-websocket-key", b""))
        and fields.get(b"content-length", b"0").strip(b"0") == b""
        and b"transfer-encoding" not in fields
    )


def _is_key(value: bytes) -> bool:
    try:
        return len(base64.b64decode(value, validate=True)) == 16
    except binascii.Error:
        return False
