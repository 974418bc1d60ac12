devices = tf.config.experimental.list_physical_devices("GPU")
for device in devices:
    tf.config.experimental.set_memory_growth(device, True)
if devices:
    tf.config.experimental.set_visible_devices(devices[hvd.local_rank()], "GPU")
