"""Health check of a door's container: exit code 0 when the path answers 200. Usage: healthcheck.py PORT PATH

It goes past any proxy named in the environment, and needs only the standard library.
"""

import http.client
import sys


def main(port: str, path: str) -> int:
    """Ask the process in this container."""
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=3)
    try:
        connection.request("GET", path)
        return 0 if connection.getresponse().status == 200 else 1
    except OSError:
        return 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
