"""Reads the times of one file, and guesses their unit and zone."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, tzinfo

import numpy as np

from predictor_store.logs.errors import RowError

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
# A unit that makes the log slower than this is implausible: at such a rate no scheduler matters.
_LEAST_RATE = 0.05
# A unit that makes the log faster than this is implausible.
MOST_RATE = 1000.0
# With fewer numbers, the unit cannot be guessed.
_LEAST_NUMBERS = 20
_SAMPLE = 20_000
# Numbers in this range, the years 2001 to 2100, are taken for seconds since 1970.
FIRST_S, LAST_S = 1e9, 4.1e9
_NUMBER = re.compile(r"\s*[-+]?\d+(\.\d*)?([eE][-+]?\d+)?\s*")
# As Azure's portal writes it: 11/20/2026, 9:00:00.656 AM
_US_DATE = re.compile(r"(\d\d?)/(\d\d?)/(\d{4}),? (\d\d?)(:\d\d:\d\d(?:\.\d+)?)(?: ([AP]M))?")
_MALFORMED = "with a time that cannot be read"


class Clock:
    """Reads times, and reports their unit once all are read.

    unit: the unit that --time-unit gives.
    zone: the zone of dates without one; None means UTC, and the summary says so.
    """

    def __init__(self, unit: str | None = None, zone: tzinfo | None = None) -> None:
        self._told_unit = unit
        self._zone = zone
        self._numbers: list[float] = []
        self._kind = self._usual = ""
        self.known_unit = ""
        self.num_zoned = 0
        self.num_naive = 0

    def read(self, value: object, unit: str | None = None, usual: str = "") -> float:
        """Return a time, in seconds if it is a date or its unit is known. Other times are unchanged
        (see scale).

        unit: the unit that the format or the field's name gives. usual: the unit to assume unless
        it is implausible. Raises RowError.
        """
        if isinstance(value, datetime):
            return self._of_date(value)
        if isinstance(value, str) and not _NUMBER.fullmatch(value):
            return self._of_date(_parsed(value))
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise RowError(_MALFORMED, f"{value!r:.60}") from None
        if isinstance(value, bool) or not math.isfinite(number):
            raise RowError(_MALFORMED, f"{value!r:.60}")
        unit = self._told_unit or unit
        if unit is None:
            self._expect("a number", value)
            self._usual = usual
            if len(self._numbers) < _SAMPLE:
                self._numbers.append(number)
            return number
        self._expect(f"a number of {unit}", value)
        self.known_unit = unit
        return number * UNITS[unit]

    def scale(self) -> float:
        """Return the seconds per unit of the times that read has returned."""
        return UNITS[self.guess()[0]] if self._numbers else 1.0

    def guess(self) -> tuple[str, str]:
        """Return the unit of plain numbers, and the reason for it; "" for the reason if the unit is
        certain."""
        numbers = np.array(self._numbers)
        size = float(np.median(np.abs(numbers)))
        for unit, seconds in UNITS.items():
            if FIRST_S <= size * seconds <= LAST_S:
                return unit, ""
        low, high = np.percentile(numbers, [1, 99])
        if high <= low:
            return self._usual or "s", ""
        rate = 0.98 * len(numbers) / (high - low)
        if len(numbers) < _LEAST_NUMBERS:
            usual = self._usual or "s"
            rate /= UNITS[usual]
            return usual, "" if _LEAST_RATE <= rate <= MOST_RATE else "too few times to tell"
        if self._usual:
            return self._usual_or_seconds(rate, self._is_fractional(numbers))
        if rate >= _LEAST_RATE or (self._is_fractional(numbers) and rate >= _LEAST_RATE / 10):
            return "s", "" if rate > 1 or self._is_fractional(numbers) else "most logs use it"
        for unit in ("ms", "us", "ns"):
            if rate / UNITS[unit] >= _LEAST_RATE:
                return unit, f"in seconds it would be {rate:.2g} requests/s"
        return "s", "no unit fits"

    def _usual_or_seconds(self, rate: float, is_fractional: bool) -> tuple[str, str]:
        usual_rate = rate / UNITS[self._usual]
        fits_seconds = _LEAST_RATE <= rate <= MOST_RATE
        if usual_rate > MOST_RATE or (is_fractional and fits_seconds):
            return "s", f"in {self._usual} it would be {usual_rate:.2g} requests/s"
        return self._usual, f"in s it would be {rate:.2g} requests/s" if fits_seconds else ""

    def said(self) -> str:
        """Return the unit and zone as text for the user; "" if there were no times."""
        if self._numbers:
            unit, why = self.guess()
            usual = ", usual in this format" if unit == self._usual else ""
            return f"numbers in {unit}{usual}" + (f" (a guess: {why})" if why else "")
        if self.known_unit:
            how = "as --time-unit says" if self._told_unit else "as the format defines"
            return f"numbers in {self.known_unit}, {how}"
        if self.num_naive and not self.num_zoned:
            return f"dates without a zone, read as {self._zone or 'UTC'}"
        return "dates with a zone" if self.num_zoned else ""

    def cautions(self) -> list[str]:
        """Return doubts that the user should settle."""
        found = []
        if self._numbers and (why := self.guess()[1]):
            found.append(f"the unit of its times is a guess ({why}): set it with --time-unit")
        if self.num_naive and self.num_zoned and self._zone is None:
            found.append(
                f"{self.num_zoned} times have a zone and {self.num_naive} have none, which are "
                "read as UTC: set their zone with --tz"
            )
        return found

    def _expect(self, kind: str, value: object) -> None:
        self._kind = self._kind or kind
        if kind != self._kind:
            raise RowError(
                "with a time of another kind", f"{value!r:.40} is {kind}, others: {self._kind}"
            )

    def _of_date(self, date: datetime) -> float:
        self._expect("a date", date.isoformat())
        if date.tzinfo is None:
            self.num_naive += 1
            date = date.replace(tzinfo=self._zone or UTC)
        else:
            self.num_zoned += 1
        try:
            return date.timestamp()
        except (OverflowError, ValueError):
            raise RowError(_MALFORMED, f"{date}") from None

    @staticmethod
    def _is_fractional(numbers: np.ndarray) -> bool:
        return bool((numbers != np.floor(numbers)).mean() > 0.5)


def _parsed(text: str) -> datetime:
    text = text.strip()
    for zone in (" UTC", " GMT", "UTC"):
        text = text.removesuffix(zone) + "+00:00" if text.endswith(zone) else text
    if len(text) > 7 and text[4] == text[7] == "/":
        text = text.replace("/", "-", 2)
    try:
        return datetime.fromisoformat(text.replace(",", ".", 1))
    except ValueError:
        if us := _US_DATE.fullmatch(text):
            month, day, year, hour, rest, half = us.groups()
            hours = int(hour) % 12 + 12 * (half == "PM") if half else int(hour)
            return datetime.fromisoformat(f"{year}-{month:0>2}-{day:0>2}T{hours:02}{rest}")
        raise RowError(_MALFORMED, f"{text!r:.60}") from None
