"""The shell around the core: gRPC streams, probes, metrics, logs and the admin port."""
