"""Reads the record of a server in shadow mode."""

from __future__ import annotations

from predictor_store.logs.fields import Row
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.formats import table
from predictor_store.logs.request import LoggedRequest
from sage_sched.distribution import LengthDistribution


def _read(row: Row, context: Context) -> LoggedRequest:
    request = table.read(row, context)
    if (forecast := row.data["prediction"]) is not None:
        request.forecast = LengthDistribution.from_fields(forecast)
    return request


READER = Reader(_read)
