"""When something ran and how long: dates by the wall's clock, seconds by one that nobody sets."""

import datetime
import time


class Span:
    """A stretch of time that begins when it is made."""

    def __init__(self):
        self._wall, self._steady = time.time(), time.monotonic()

    def facts(self) -> dict:
        """Return {started, ended: UTC in ISO 8601, seconds} up to now; a clock that is set in between moves neither."""
        seconds = time.monotonic() - self._steady
        return {"started": _utc(self._wall), "ended": _utc(self._wall + seconds), "seconds": round(seconds, 3)}


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
