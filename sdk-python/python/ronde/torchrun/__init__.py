"""`torchrun --rdzv-backend ronde`: the agents of torchrun meet over sidecars, and start those of their workers.

The wheel's entry point names it; programs do not import it. It calls `handler.create`.
"""
