"""Kernels compiled by numba: the decorators, where compiled code is kept, and compiling before it is needed.

Compiled code lies in a folder of its user's, one for each module that has kernels, whose name holds a digest of that
module, of every module of this package that it imports, and of the versions of what compiles it. So code is never
stale, versions of the package do not meet, and a package that another user installed is no obstacle.
"""
