"""The error for modules of Horovod that this package does not support yet."""


def unsupported_module(module: str) -> ImportError:
    """Returns the error for importing an unsupported module, with the alternatives."""
    return ImportError(
        f"{module} is not supported yet: horovod-compat supports PyTorch, TensorFlow and Keras. Use one of these, or "
        "run this program with Horovod itself, in an environment without horovod-compat",
        name=module,
    )
