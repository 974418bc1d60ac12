"""Small things of Horovod's launcher that programs import."""
