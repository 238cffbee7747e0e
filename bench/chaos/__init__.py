"""Chaos for the whole chain: a seeded schedule of requests and faults, and what must hold whatever happens."""
