"""The pure core: values, policy, ledger, lanes and the desk that makes every verdict.

Nothing in this package awaits, does I/O, reads a clock or draws a random number. Time comes in as `now_ns`
(a monotonic integer), jitter as an argument. A test checks the imports.
"""
