"""Settings of Spark as pairs of a name and a value, for `SparkConf.set`.

Horovod's elastic jobs need them. Those of `ronde.spark` do not: each host of a job is a job of Spark, which is asked
for again when it has failed. Spark calls `spark.blacklist` `spark.excludeOnFailure` since 3.1.
"""

SPARK_CONF_MAX_INT = "2147483647"
SPARK_CONF_MAX_INT_MINUS_ONE = "2147483646"

_EXCLUDE = "spark.excludeOnFailure"

SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = ("spark.task.maxFailures", SPARK_CONF_MAX_INT)

SPARK_CONF_BLACKLIST_DISABLED = (f"{_EXCLUDE}.enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED = (f"{_EXCLUDE}.enabled", "true")

# For the same task. Spark refuses to start unless `spark.task.maxFailures` is higher than the attempts on a node.
SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK = (
    f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor",
    SPARK_CONF_MAX_INT_MINUS_ONE,
)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK = (f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor", "2")
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK = (f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor", "1")
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK = (f"{_EXCLUDE}.task.maxTaskAttemptsPerNode", SPARK_CONF_MAX_INT_MINUS_ONE)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK = (f"{_EXCLUDE}.task.maxTaskAttemptsPerNode", "2")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK = (f"{_EXCLUDE}.task.maxTaskAttemptsPerNode", "1")

# In the same stage.
SPARK_CONF_REUSE_FAILED_EXECUTOR = (f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR = (f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILING_NODE = (f"{_EXCLUDE}.stage.maxFailedExecutorsPerNode", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILING_NODE = (f"{_EXCLUDE}.stage.maxFailedExecutorsPerNode", "1")

# In the same application.
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP = (f"{_EXCLUDE}.application.maxFailedTasksPerExecutor", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP = (f"{_EXCLUDE}.application.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILING_NODE_IN_APP = (f"{_EXCLUDE}.application.maxFailedExecutorsPerNode", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP = (f"{_EXCLUDE}.application.maxFailedExecutorsPerNode", "1")

# The same with the other participle, so that each name of an executor has that of a node.
SPARK_CONF_REUSE_FAILING_EXECUTOR = SPARK_CONF_REUSE_FAILED_EXECUTOR
SPARK_CONF_DONT_REUSE_FAILING_EXECUTOR = SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR
SPARK_CONF_REUSE_FAILED_NODE = SPARK_CONF_REUSE_FAILING_NODE
SPARK_CONF_DONT_REUSE_FAILED_NODE = SPARK_CONF_DONT_REUSE_FAILING_NODE

SPARK_CONF_DEFAULT_VALUES = {
    f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor": "1",
    f"{_EXCLUDE}.task.maxTaskAttemptsPerNode": "2",
    f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor": "2",
    f"{_EXCLUDE}.stage.maxFailedExecutorsPerNode": "2",
    f"{_EXCLUDE}.application.maxFailedTasksPerExecutor": "2",
    f"{_EXCLUDE}.application.maxFailedExecutorsPerNode": "2",
}
"""Spark's defaults."""
