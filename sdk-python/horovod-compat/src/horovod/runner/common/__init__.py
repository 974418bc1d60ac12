"""Common modules of Horovod's launchers."""
