config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())
