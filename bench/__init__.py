"""Benchmarks of flash_ext beside its peers; see bench/README.md."""
