"""`python -m local_stack up|down|status|install`: what the `twodoor` command and `make setup` use."""

import argparse
import json
import sys

from local_stack.api import down, say, status, up
from local_stack.install import install
from local_stack.state import ORDER
from serving.errors import ConfigError


def main() -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m local_stack", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="start the stack, until Ctrl-C")
    start.add_argument("--detach", action="store_true", help="return once all is ready; stop it with down")
    start.add_argument("--consumers", type=int, default=None, help="how many consumers (default: the setting)")
    start.add_argument("--services", default=",".join(ORDER), help="comma-separated part of %(default)s")
    commands.add_parser("down", help="stop the stack")
    commands.add_parser("status", help="print the services as JSON")
    commands.add_parser("install", help="fetch Kafka and see that the machine has what the stack needs")
    arguments = parser.parse_args()
    try:
        if arguments.command == "up":
            return up(arguments.detach, arguments.consumers, tuple(arguments.services.split(",")))
        if arguments.command == "down":
            return down()
        if arguments.command == "install":
            return install()
        say(json.dumps(status(), indent=2))
    except ConfigError as exc:
        say(str(exc))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
