"""Tests of PyTorch that Gloo passes and ronde does not, each with its reason. The run fails if the list is wrong."""

DIFFERENCES: dict[str, str] = {
    "test_ddp_logging_data_cpu": (
        "the logging data of DistributedDataParallel name the kind of backend that PyTorch's C++ knows, which is "
        '"custom" for every backend that is registered from Python'
    ),
}
