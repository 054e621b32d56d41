"""Times of a run on a machine whose date is set meanwhile."""

import time
from datetime import datetime, timedelta

from tfm.span import Span


def test_a_date_that_is_set_back_shortens_nothing(monkeypatch):
    span = Span()
    before, real = time.monotonic(), time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
    time.sleep(0.05)
    facts = span.facts()
    assert 0.05 <= facts["seconds"] <= time.monotonic() - before + 0.05
    started, ended = (datetime.fromisoformat(facts[name]) for name in ("started", "ended"))
    assert abs((ended - started) - timedelta(seconds=facts["seconds"])) < timedelta(milliseconds=2)
