"""Benchmarks: what admission costs a request, measured on a real Envoy."""
