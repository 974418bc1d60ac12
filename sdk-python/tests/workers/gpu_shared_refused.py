"""Run by every rank whose settings exclude those of its sidecar: connecting raises ValueError."""

from __future__ import annotations

import ronde


def main() -> None:
    try:
        ronde.connect()
    except ValueError as error:
        print(f"refused: {error}", flush=True)
    else:
        raise AssertionError("it has connected")


if __name__ == "__main__":
    main()
