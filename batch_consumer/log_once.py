"""Keeps a library that repeats itself quiet: the same message is logged at most once a minute."""

import logging
import time

INTERVAL_S = 60.0


class OncePerInterval(logging.Filter):
    """Lets each distinct message template of a logger through once per interval; bounded by the library's templates."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether this record is to be logged."""
        if record.levelno < logging.WARNING:
            return False
        key = (record.name, str(record.msg))
        now_s = time.monotonic()
        if now_s - self._last_s.get(key, -INTERVAL_S) < INTERVAL_S:
            return False
        self._last_s[key] = now_s
        return True


def quieten(logger: logging.Logger) -> None:
    """Apply the filter to a library's loggers. Without a broker aiokafka logs each of its tries, many a second."""
    once = OncePerInterval()
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == logger.name]
    for name in {logger.name, *names}:
        logging.getLogger(name).addFilter(once)
