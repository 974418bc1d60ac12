"""Reduction operations, which combine elements of several ranks into one. The first six numbers are Horovod's."""

Average = 0
"""The sum divided by the number of ranks; of integers truncated toward zero. Not for bool."""
Sum = 1
"""The sum; integers wrap. Of bool: whether any is true."""
Adasum = 2
"""Adaptive summation (Maleki et al., 2020), along a binary tree of the ranks. Floating-point types, all-reduce only."""
Min = 3
"""The least element; NaN wins. Of bool: whether all are true."""
Max = 4
"""The greatest element; NaN wins. Of bool: whether any is true."""
Product = 5
"""The product; integers wrap. Of bool: whether all are true."""
Median = 6
"""The median of each element; of an even number the mean of the two middle values. Floating-point types, all-reduce
only."""
ClippedMean = 7
"""The mean of tensors after clipping each to the median of all their Euclidean norms. Floating-point types, all-reduce
only."""
BitAnd = 9
"""The bitwise *and*; of bool, whether all are true. Integers and bool only."""
BitOr = 10
"""The bitwise *or*; of bool, whether any is true. Integers and bool only."""
BitXor = 11
"""The bitwise exclusive *or*; of bool, whether an odd number is true. Integers and bool only."""

OPS = (Average, Sum, Adasum, Min, Max, Product, Median, ClippedMean, BitAnd, BitOr, BitXor)
"""All of them."""
