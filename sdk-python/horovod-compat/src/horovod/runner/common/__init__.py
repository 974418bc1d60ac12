"""What Horovod's launchers share."""
