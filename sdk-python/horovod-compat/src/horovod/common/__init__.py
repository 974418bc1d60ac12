"""Common modules of Horovod's frameworks."""
