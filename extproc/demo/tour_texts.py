"""Texts for the demo's requests: an inspection log of any length, the same on every machine.

Lists whose lengths share no factor make entries that differ for a long time without any chance in them.
"""

from __future__ import annotations

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_CREWS = (
    "the early crew",
    "two apprentices and their foreman",
    "the night shift",
    "an outside contractor",
    "Ms Okafor",
)
_PARTS = (
    "the north bridge's expansion joint",
    "pump 4 of the cooling circuit",
    "a row of ageing insulators",
    "the signal box at the harbour sidings",
    "the emergency lighting in tunnel B",
    "three of the eleven ventilation flaps",
    "the hydraulic press in hall 2",
    "the weighbridge beside the main gate",
)
_FINDINGS = (
    "found hairline cracks no longer than a fingernail",
    "measured a drift of 0.4 mm since the last visit",
    "replaced a seal that had hardened in the frost",
    "could not reproduce the noise reported by the operators",
    "logged a temperature 6 degrees above the usual",
    "tightened every bolt to 85 newton metres",
    "noticed that the drawing and the actual wiring disagree",
    "cleaned the filters and took oil samples for the laboratory",
    "postponed the job, since the crane was needed elsewhere",
    "closed the work order without further remarks",
    "asked for a second opinion before the next freight train",
)
_FOLLOWUPS = (
    "A follow-up is due within a fortnight.",
    "No action is required for now.",
    "Spare parts have been ordered; delivery takes five weeks.",
    "The finding was reported to the plant manager the same evening.",
    "Photographs are in the annex.",
    "This is the third time in a year, so the cause must be sought upstream.",
    "The insurer has been informed.",
    "See also the entry on lubricants.",
    "The area stays fenced off until the report is signed.",
    "Nobody was hurt.",
    "Costs stay within the maintenance budget.",
    "The old part was kept for examination.",
    "The operators were shown how to check it themselves.",
)


def inspection_log(entries: int) -> str:
    """A log of `entries` entries, about forty tokens each."""
    return "\n".join(_entry(number) for number in range(1, entries + 1))


def _entry(number: int) -> str:
    def turn(phrases: tuple[str, ...]) -> str:
        return phrases[number % len(phrases)]

    return (
        f"{number}. On {turn(_DAYS)} {turn(_CREWS)} inspected {turn(_PARTS)} and {turn(_FINDINGS)}. {turn(_FOLLOWUPS)}"
    )
