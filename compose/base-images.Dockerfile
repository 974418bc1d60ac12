# The images that compose/Dockerfile takes for BASE and BUILDER, again: Dependabot reads FROM lines without variables only. Nothing
# builds this file. tests/product/test_release.py compares both; a new image goes into both.
FROM debian:bookworm-slim AS base
FROM rust:1.95-slim-bookworm AS builder
