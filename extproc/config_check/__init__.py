"""What must be true of an Envoy configuration for admission to hold, as a table of rules.

The file is read as plain data, so one that was written by hand or by another tool is checked like our own. A rule is
a pure function from the policy and a view of the file to findings; it looks at what Envoy does, not at how the file
is laid out. What Envoy itself refuses at start is left to `envoy --mode validate`.
"""

from __future__ import annotations

from extproc.config_check.document import FileError, read
from extproc.config_check.findings import Finding, Severity
from extproc.config_check.rules import check

__all__ = ["FileError", "Finding", "Severity", "check", "read"]
