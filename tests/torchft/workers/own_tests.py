"""Runs torchft's own tests of process groups and of its Manager, with the process group of ronde in place of Gloo's.

    own_tests.py TESTS

TESTS is the name of a module of torchft's tests: process_group_test or manager_integ_test.
"""

from __future__ import annotations

import importlib
import sys
import unittest

from ronde.torch.torchft import ProcessGroupRonde

# Of ProcessGroupTest, what is about any group. The others are about groups of NCCL, and the texts of Gloo's errors.
_CASES = {
    "process_group_test": ["NormalGlooMultiPgTest", "ProcessGroupTest.test_gloo_apis_0_cpu"],
    "manager_integ_test": ["ManagerIntegTest"],
}

module = importlib.import_module(f"torchft.{sys.argv[1]}")
module.ProcessGroupGloo = ProcessGroupRonde
suite = unittest.defaultTestLoader.loadTestsFromNames(_CASES[sys.argv[1]], module)
result = unittest.TextTestRunner(verbosity=2).run(suite)
# Those with torchcomms and GPUs are skipped where these are missing.
print(
    f"{result.testsRun - len(result.skipped)} of torchft's own tests have run, {len(result.failures)} failed",
    flush=True,
)
sys.exit(not result.wasSuccessful())
