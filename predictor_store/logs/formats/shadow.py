"""Reads the record of a server in shadow mode."""

from __future__ import annotations

from predictor_store.logs.fields import Row, value_at
from predictor_store.logs.format import Context, Format
from predictor_store.logs.formats import table
from predictor_store.logs.request import LoggedRequest
from sage_sched.distribution import LengthDistribution


def _read(row: Row, context: Context) -> LoggedRequest:
    request = table.read(row, context)
    if (forecast := row.data["prediction"]) is not None:
        request.forecast = LengthDistribution.from_fields(forecast)
    return request


FORMAT = Format(
    "shadow",
    "a record of shadow mode: `--sage-shadow FILE`",
    '{"arrival_s": 3.0, "input_tokens": 7, "output_tokens": 5, "max_new_tokens": 64, "is_cut": '
    'false, "ttlt_s": 0.4, "prediction": null}',
    "arrivals, lengths, caps, predictions",
    lambda row: "prediction" in row and value_at(row, "arrival_s") is not None,
    _read,
)
