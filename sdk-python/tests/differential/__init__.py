"""Differential tests: the same drawn program on backend "ronde" and on Gloo, and `ronde.torch` against one process.

    python -m differential run --seconds 1800     what `make differential` does
    python -m differential replay FILE            runs a program again that a difference printed

A *program* is a JSON object with the steps of each rank. The parent process draws programs with hypothesis and sends
them to a *world*, the processes of one job, which stay alive for many programs. It compares what the ranks report.
"""
