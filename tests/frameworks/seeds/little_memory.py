small_cfg = tf.ConfigProto(gpu_options=tf.GPUOptions(allow_growth=True))
with tf.Session(config=small_cfg):
    print("a session with little memory")
