"""The real parts without Docker, as supervised child processes: PostgreSQL, Kafka, Triton, the gateway and consumers."""

from local_stack.api import down, log_path, status, up
from local_stack.config import StackConfig, stack_environment
from local_stack.stack import Stack
from serving.errors import ConfigError

__all__ = ["ConfigError", "Stack", "StackConfig", "down", "log_path", "stack_environment", "status", "up"]
