"""What Horovod's framework modules share."""
