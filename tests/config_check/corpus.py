"""A corpus of bad Envoy configurations: each file is a patch of the configuration that belongs to the example policy.

`fault` says what is wrong, `patch` makes it so, `expect` holds every line that `tokenlane check` prints, and `envoy`
says whether Envoy itself `accepts` the configuration or `refuses` to start; `policy` holds keys that differ from the
example policy's. Paths of a patch are field names and
list positions; they start with a name of `ANCHORS`. Its steps: `set` a path `to` a value, `remove` a path, `insert` a
`value` before a list position (`-` is the end), `move` a list item `to` another position.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from extproc.envoy_config import Addresses, bootstrap
from extproc.settings import load_policy

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "envoy" / "policy.yaml"

_LISTENER = "static_resources/listeners/0"
_MANAGER = f"{_LISTENER}/filter_chains/0/filters/0/typed_config"
ANCHORS = {
    "$root": "",
    "$static": "static_resources",
    "$listener": _LISTENER,
    "$hcm": _MANAGER,
    "$ext_proc": f"{_MANAGER}/http_filters/0/typed_config",
    "$early": f"{_MANAGER}/early_header_mutation_extensions/0/typed_config",
    "$host": f"{_MANAGER}/route_config/virtual_hosts/0",
    "$chat": "static_resources/clusters/0",
    "$docs": "static_resources/clusters/1",
    "$service": "static_resources/clusters/2",
}


@dataclass(frozen=True)
class Bad:
    """One file of the corpus."""

    name: str
    fault: str
    envoy: str
    patch: Sequence[dict[str, Any]]
    expect: Sequence[str]
    policy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The whole configuration with the fault."""
        return patched(good(), self.patch)

    @property
    def rules(self) -> set[str]:
        """The rules that find it."""
        return {line.partition("[")[2].partition("]")[0] for line in self.expect}


def corpus() -> list[Bad]:
    """All files, in order."""
    paths = sorted((Path(__file__).parent / "bad").glob("*.yaml"))
    return [Bad(path.stem, **yaml.safe_load(path.read_text(encoding="utf-8"))) for path in paths]


@cache
def good() -> dict[str, Any]:
    """The configuration that belongs to the example policy; not to be changed."""
    return bootstrap(load_policy(POLICY), Addresses())


def patched(config: dict[str, Any], patch: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`config` after the steps of `patch`."""
    changed = copy.deepcopy(config)
    for step in patch:
        match step:
            case {"set": path, "to": value}:
                node, key = _place(changed, path)
                node[key] = copy.deepcopy(value)
            case {"remove": path}:
                node, key = _place(changed, path)
                del node[key]
            case {"insert": path, "value": value}:
                node, key = _place(changed, path)
                node.insert(key, copy.deepcopy(value))
            case {"move": path, "to": target}:
                node, key = _place(changed, path)
                item = node.pop(key)
                node, key = _place(changed, target)
                node.insert(key, item)
            case _:
                raise ValueError(f"{step} is no step of a patch")
    return changed


def _place(config: Any, path: str) -> tuple[Any, Any]:
    """The container that holds the end of `path`, and the key or position there."""
    anchor, _, rest = path.partition("/")
    *parts, last = f"{ANCHORS[anchor]}/{rest}".lstrip("/").split("/")
    node = config
    for part in parts:
        node = node[int(part)] if isinstance(node, list) else node[part]
    if not isinstance(node, list):
        return node, last
    return node, len(node) if last == "-" else int(last)
