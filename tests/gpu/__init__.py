"""Tests and measurements on a real GPU: `make gpu-test`."""
