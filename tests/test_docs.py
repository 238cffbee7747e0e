"""The documents against the code: a table that does not say what the code does fails here.

`UPDATE_DOCS=1` writes the generated parts anew instead of comparing them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import get_args, get_origin

import pytest
from prometheus_client import Counter, Histogram
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from extproc.config_check import check
from extproc.core.admission import Desk
from extproc.core.rejection import RULES, Retry
from extproc.envoy_config import Addresses, bootstrap
from extproc.service.metrics import Metrics
from extproc.settings import PolicySection, load_policy
from tests.policies import policy

ROOT = Path(__file__).parents[1]
DASH = "\N{EN DASH}"
RETRY_TEXT = {
    Retry.NEVER: "`x-should-retry: false`",
    Retry.AFTER: "`Retry-After`, `retry-after-ms`",
    Retry.UNSAID: DASH,
}


def test_reason_table() -> None:
    """README lists every reason with the status and retry headers that it is answered with."""
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| .* \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)

    assert sorted((reason.value, str(rule.status), RETRY_TEXT[rule.retry]) for reason, rule in RULES.items()) == sorted(
        rows
    )


def test_example_policies_are_good(tmp_path: Path) -> None:
    """Every policy in the documents loads, and has a configuration in which nothing is found."""
    examples = re.findall(
        r"^```yaml\n(version:.*?)^```", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert examples
    for example in examples:
        path = tmp_path / "policy.yaml"
        path.write_text(example)
        found = load_policy(path)
        assert [] == check(found, bootstrap(found, Addresses()))


def _nested(field: FieldInfo) -> tuple[type[BaseModel] | None, str]:
    """The section that a field holds, and what is between the field's name and the section's own."""
    joints: dict[object, str] = {dict: ".<name>.", list: "[]."}
    between = joints.get(get_origin(field.annotation), ".")
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate, between
    return None, ""


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel) or value is None:
        return DASH
    if isinstance(value, list):
        return "`[" + ", ".join(str(getattr(item, "value", item)) for item in value) + "]`"
    return f"`{value if isinstance(value, Decimal) else getattr(value, 'value', value)}`"


def _policy_rows(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"| `{prefix}{name}` | {_default(field)} | {field.description} |"
        nested, between = _nested(field)
        if nested is not None:
            yield from _policy_rows(nested, f"{prefix}{name}{between}")


def _policy_reference() -> str:
    rows = "\n".join(_policy_rows(PolicySection))
    return f"| key | default | meaning |\n|---|---|---|\n{rows}"


def _metric_catalogue() -> str:
    metrics = Metrics(Desk(policy(), "i"))
    labels = {
        collector._name: collector._labelnames
        for collector in metrics.registry._collector_to_names
        if isinstance(collector, Counter | Histogram)
    }
    rows = []
    for family in metrics.registry.collect():
        names = labels.get(family.name)
        if names is None:
            seen = dict.fromkeys(name for sample in family.samples for name in sample.labels)
            names = tuple(seen) or getattr(family, "_labelnames", ())
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        rows.append(
            f"| `{name}` | {family.type} | {', '.join(f'`{n}`' for n in names) or DASH} | {family.documentation} |"
        )
    return "| metric | type | labels | meaning |\n|---|---|---|---|\n" + "\n".join(sorted(rows))


@pytest.mark.parametrize(
    ("document", "marker", "generate"),
    [
        ("docs/configuration.md", "policy reference", _policy_reference),
        ("docs/metrics.md", "metric catalogue", _metric_catalogue),
    ],
)
def test_generated_parts(document: str, marker: str, generate: Callable[[], str]) -> None:
    """A generated part of a document is what the code generates now."""
    path = ROOT / document
    begin, end = f"<!-- {marker}: begin -->\n", f"\n<!-- {marker}: end -->"
    before, _, rest = path.read_text().partition(begin)
    found, _, after = rest.partition(end)
    expected = generate()
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(before + begin + expected + end + after)
        found = expected

    assert expected == found
