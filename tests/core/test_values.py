"""Values that leave the process they were made in."""

from __future__ import annotations

import pickle

from extproc.core.values import Fault, Reason


def test_fault_crosses_processes_whole() -> None:
    """A fault raised in a worker process reaches the desk with all that the answer needs."""
    fault = Fault(Reason.CONTEXT_LIMIT, "too long", param="messages", details={"input_tokens": 9}, model="m")
    copy = pickle.loads(pickle.dumps(fault))  # noqa: S301 (bytes of this test's own)
    assert isinstance(copy, Fault)
    assert (copy.reason, copy.message, copy.param, copy.model) == (Reason.CONTEXT_LIMIT, "too long", "messages", "m")
    assert copy.details == {"input_tokens": 9}
