"""Helper functions of Horovod's launcher that programs import."""
