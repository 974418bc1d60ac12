"""Helper functions of Horovod's launcher that programs import: threads, addresses, ssh commands, a cache."""
