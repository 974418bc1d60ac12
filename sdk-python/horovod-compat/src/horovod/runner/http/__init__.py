"""A key-value store over HTTP between processes of one host, for Horovod's elastic driver."""
