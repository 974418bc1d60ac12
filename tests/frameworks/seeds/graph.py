import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
settings = tf.ConfigProto()
settings.gpu_options.visible_device_list = str(hvd.local_rank())
loss = ...
opt = hvd.DistributedOptimizer(tf.train.AdagradOptimizer(0.02 * hvd.size()))
train_op = opt.minimize(loss)
folder = "ckpt" if hvd.rank() == 0 else None
with tf.train.MonitoredTrainingSession(
    checkpoint_dir=folder, config=settings, hooks=[hvd.BroadcastGlobalVariablesHook(0)]
) as mon_sess:
    while not mon_sess.should_stop():
        mon_sess.run(train_op)
