"""What the estimators of `horovod.spark` share."""
