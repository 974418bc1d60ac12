"""What Horovod has and this package does not yet."""


def not_yet(module: str) -> ImportError:
    """The error for importing a part that is not there, which says what to do."""
    return ImportError(
        f"{module} is not there yet: horovod-compat answers for PyTorch only (horovod.torch). Use that, or run this "
        "program with Horovod itself, in an environment without horovod-compat",
        name=module,
    )
