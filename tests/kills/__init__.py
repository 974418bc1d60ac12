"""Kills processes of an elastic job and measures how long the others need: `cd tests && python -m kills`."""
